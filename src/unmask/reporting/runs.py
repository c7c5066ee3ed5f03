"""Reads what is known of a run from its folder. Missing or damaged parts become a sentence, never an error."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.config import RECIPE_FILE, load_config, read_recipe
from unmask.errors import UnmaskError, UsageError
from unmask.evaluation.measurement import SIGN
from unmask.evaluation.suites import SUITES
from unmask.evaluation.suites.base import Numbers, Suite
from unmask.evaluation.suites.results import model_fingerprint, results_in
from unmask.model import load
from unmask.reporting.metrics_file import METRICS, Metrics, read_metrics
from unmask.reporting.replay import Page
from unmask.training.checkpoint.files import candidates

if TYPE_CHECKING:
    from unmask.model import Model

RUNNERS_UP = 3  # runners-up per token in a replay


@dataclass
class Samples:
    """Texts written for the report. command: the command that writes the same texts again."""

    texts: list[str]
    replay: str
    command: list[str]


@dataclass
class Results:
    """The content of a suite's folder. same_model: whether it was measured with the run's current weights."""

    suite: Suite
    folder: Path
    numbers: dict[str, Numbers]
    same_model: bool


@dataclass
class Run:
    """damage: of recipe and metrics; model_damage: why there is no information on the model, or no sample."""

    name: str
    given: str
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    sign: str = ""
    data: list[dict[str, Any]] = field(default_factory=list)
    made_with: list[Any] = field(default_factory=list)
    parameters: int | None = None
    fingerprint: str = ""
    samples: Samples | None = None
    results: list[Results] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    model_damage: list[str] = field(default_factory=list)

    @property
    def best(self) -> dict[str, Any] | None:
        """The validation with the lowest nats per token."""
        good = [one for one in self.metrics.validations if _finite(one.get("valid_nats_per_token"))]
        return min(good, key=lambda one: float(one["valid_nats_per_token"]), default=None)

    def tokens_at(self, step: int) -> int:
        """Tokens trained on up to a step; 0 if the run does not record them."""
        return max((p.tokens for p in self.metrics.points if p.step <= step), default=0)


def check_runs(given: Sequence[str]) -> None:
    """Refuse anything that is not a training run's folder, before reading or writing."""
    for one in given:
        folder = Path(one)
        if not folder.is_dir():
            raise UsageError(f"there is no folder {one}: give a training run's, such as runs/demo")
        if not any((folder / name).exists() for name in (RECIPE_FILE, METRICS, "checkpoints")):
            raise UsageError(f"{one} is no training run's folder, which holds {RECIPE_FILE} and {METRICS}: give one")


def read_run(given: str, name: str) -> Run:
    """The recipe, the metrics, and what the newest checkpoint records about the data.

    >>> read_run("runs/demo", "demo").best  # doctest: +SKIP
    """
    run, folder = Run(name, given), Path(given)
    try:
        run.recipe = read_recipe(folder) if (folder / RECIPE_FILE).is_file() else {}
        if not run.recipe:
            run.damage.append(f"{RECIPE_FILE} is missing: what was run is not known.")
        else:
            run.sign = SIGN[load_config(folder).objective.kind]
    except UnmaskError as e:
        run.damage.append(f"The recipe cannot be read: {_one_line(e)}.")
    try:
        run.metrics = read_metrics(folder, name)
        run.damage += run.metrics.damage
    except UnmaskError as e:
        run.damage.append(f"There are no curves of this run: {_one_line(e)}.")
    if run.best is not None and "valid_pseudo_ppl" in run.best:
        run.sign = SIGN["pseudo"]
    for _, place in candidates(folder / "checkpoints"):
        try:
            state = json.loads((place / "state.json").read_text(encoding="utf-8"))
            run.data = [dict(one) for one in state["data"]]
            run.made_with = list(state.get("made_with") or [])
            break
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return run


def read_model(run: Run, *, num: int, length: int | None, seed: int, device: str | None) -> None:
    """The description of the run's model, and `num` texts that it writes."""
    try:
        model = load(run.given, device=device)
    except UnmaskError as e:
        run.model_damage.append(f"The model cannot be read: {_one_line(e)}.")
        return
    run.parameters = sum(p.numel() for p in model.denoiser.parameters())
    run.fingerprint = model_fingerprint(model)
    if num:
        try:
            run.samples = _written(run, model, num, length, seed)
        except UnmaskError as e:
            run.model_damage.append(f"The model writes no texts by itself: {_one_line(e)}.")


def read_results(runs: Sequence[Run], folders: Sequence[str]) -> list[str]:
    """Assign to each run the results in its own folder, and those of the given folders that are of its weights.

    Returns a sentence for each folder that belongs to no run here.
    """
    left = []
    for run in runs:
        own = sorted(path for path in Path(run.given).iterdir() if path.is_dir())
        for place in (Path(run.given), *own):
            run.results += _results(place, run.fingerprint)
    for folder in map(Path, folders):
        owners = 0
        for run in runs:
            mine = [one for one in _results(folder, run.fingerprint) if one.same_model]
            run.results += [
                one for one in mine if one.folder.resolve() not in {r.folder.resolve() for r in run.results}
            ]
            owners += bool(mine)
        if not owners:
            found = _results(folder, "")
            what = "are of other weights than these runs' models" if found else "are not there, or no suite's"
            left.append(f"The results in {folder} {what}; they are left out.")
    return left


def _results(folder: Path, fingerprint: str) -> list[Results]:
    found = [(suite, results_in(folder, suite)) for suite in SUITES.values()]
    return [Results(suite, folder, numbers, _of(numbers, fingerprint)) for suite, numbers in found if numbers]


def _of(numbers: dict[str, Numbers], fingerprint: str) -> bool:
    kept = [one.get("identity") for one in numbers.values()]
    return all(isinstance(one, dict) and one.get("model") == fingerprint for one in kept)


def _written(run: Run, model: Model, num: int, length: int | None, seed: int) -> Samples:
    page = Page(model.tokenizer)
    size = length or min(model.typical_length or model.length, 256)
    texts = model.generate(num, size, seed=seed, watch=page, runners_up=RUNNERS_UP)
    command = ["unmask", "generate", run.given, "--num", str(num), "--length", str(size), "--seed", str(seed)]
    return Samples(texts, page.html(), command)


def _one_line(error: UnmaskError) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _finite(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 and not math.isnan(value)
    )
