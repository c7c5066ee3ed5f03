"""A trial: one recipe with one seed, its result, and the file that stores it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from unmask.errors import ModelFolderError
from unmask.evaluation.measurement import by_text
from unmask.storage.atomic import atomic_text
from unmask.storage.untrusted import read_json

FORMAT = 1
LATER = {"at_once", "text_of"}  # fields missing in files of earlier versions
FOLDER, RUNS = "trials", "runs"  # subfolders of a comparison: results of trials, and their runs
State = Literal["finished", "failed", "diverged"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of a trial. Everything except `seconds`, `tokens_per_second`, `device` and `at_once` is independent of
    stops and resumes.

    nats, counts: the nats (an upper bound of -log p, or what `kind` says) and tokens of every measured row. text_of:
    for each row the number of the text in which it begins; empty if each row is a text. texts: a hash of these tokens:
    only trials of the same texts are comparable.
    """

    name: str
    system: str
    seed: int
    fingerprint: str  # digest of everything that determines the result
    state: State
    shared: str = ""  # digest of what all trials of the comparison share
    reason: str = ""
    kind: str = "upper bound"
    estimator: str = ""
    draws: int = 0
    parameters: int = 0
    parameters_without_embeddings: int = 0
    steps: int = 0
    tokens: int = 0  # training tokens, without prompts and padding
    epochs: float = 0.0
    best_step: int = 0  # step of the measured weights
    best_tokens: int = 0
    best_epochs: float = 0.0
    passes: float = 0.0  # network passes per training row
    flops: float = 0.0  # of the whole training
    seconds: float = 0.0  # in training steps
    tokens_per_second: float = 0.0
    device: str = ""
    at_once: int = 1  # number of trials that shared the device, which makes each slower
    unmask: str = ""
    texts: str = ""
    num_bytes: int = 0
    counts: list[int] = field(default_factory=list, repr=False)
    text_of: list[int] = field(default_factory=list, repr=False)
    nats: list[float] = field(default_factory=list, repr=False)
    also: dict[str, list[float]] = field(default_factory=dict, repr=False)  # nats by other estimators

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    def by_text(self, value_B: Sequence[float]) -> Tensor:
        """[T] these values of rows, summed over the rows of each text.

        >>> made = {"name": "a-s0", "system": "a", "seed": 0, "fingerprint": "", "state": "finished"}
        >>> Trial(**made, text_of=[0, 0, 1]).by_text([1.0, 2.0, 4.0]).tolist()
        [3.0, 4.0]
        """
        of_B = torch.tensor(self.text_of) if self.text_of else None
        return by_text(torch.tensor(value_B, dtype=torch.float64), of_B)

    @property
    def nats_per_token(self) -> float:
        """Infinite for a trial without a result."""
        return sum(self.nats) / sum(self.counts) if self.counts else math.inf


def trial_file(out: Path, name: str) -> Path:
    """The file in which a comparison stores a trial's result.

    >>> trial_file(Path("out"), "mdlm-s0").as_posix()
    'out/trials/mdlm-s0.json'
    """
    return out / FOLDER / f"{name}.json"


def write_trial(out: Path, trial: Trial) -> None:
    """Write a trial's file atomically.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp())
    >>> write_trial(out, Trial(name="a-s0", system="a", seed=0, fingerprint="", state="failed", reason="no memory"))
    >>> read_trial(out, "a-s0").reason
    'no memory'
    """
    path = trial_file(out, trial.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_text(path, json.dumps({"format": FORMAT} | asdict(trial), indent=1, allow_nan=False) + "\n")


def read_trial(out: Path, name: str) -> Trial | None:
    """The stored result of a trial; None if there is none yet."""
    path = trial_file(out, name)
    if not path.exists():
        return None
    data = read_json(path)
    known = {field.name for field in fields(Trial)}
    if data.pop("format", None) != FORMAT or known - data.keys() - LATER or data.keys() - known or data["name"] != name:
        raise ModelFolderError(f"{path} is not what a comparison writes there: remove it, and the trial is run again")
    return Trial(**data)


def failed(trial: Any, reason: str, state: State = "failed") -> Trial:
    """The record of a trial without a result; trial: anything with its name, system, seed and fingerprints."""
    named = {key: getattr(trial, key) for key in ("name", "system", "seed", "fingerprint", "shared")}
    return Trial(**named, state=state, reason=" ".join(reason.split())[:500])
