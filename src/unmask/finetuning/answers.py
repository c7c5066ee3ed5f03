"""The answers of a fine-tuning's finished runs to the reported examples, as arrays."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from unmask.errors import DataError, UsageError
from unmask.finetuning.results import ABOUT, Results, RunName
from unmask.finetuning.scores import USUAL
from unmask.heads.task import Kind
from unmask.storage.untrusted import read_json, read_text

Key = tuple[str, str | None, str | float, int]
"""An example: its text, its pair, its label, and which of several copies it is."""
MAX_LINES = 1 << 30  # maximum bytes of a predictions file


@dataclass(frozen=True)
class RunAnswers:
    """A run's answers: class numbers, or numbers. place_N: the index of each example among the folder's examples."""

    place_N: NDArray[np.int64]
    predicted_N: NDArray[np.float64]
    target_N: NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """All complete seeds of a folder: a run for each start and seed, and for each fold in cross-validation."""

    folder: Path
    model: str
    kind: Kind
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    keys: list[Key]
    runs: dict[str, dict[int, list[RunAnswers]]]


def read_answers(folder: str | Path) -> Answers:
    """Read the answers from a folder written by `unmask finetune`.

    >>> read_answers("runs/reviews").labels  # doctest: +SKIP
    ('negative', 'positive')
    """
    folder = Path(folder)
    if not (folder / ABOUT).is_file():
        raise UsageError(f"{folder} is no folder of a fine-tuning: it has no {ABOUT}")
    about = read_json(folder / ABOUT)
    try:
        task, config = about["task"], about["config"]
        kind, labels = cast(Kind, task["kind"]), tuple(map(str, task["labels"]))
        names = _finished(folder, config.get("folds"))
        metrics = tuple(config["metrics"]) or USUAL[kind]
    except (KeyError, TypeError, AttributeError) as e:
        raise DataError(f"{folder / ABOUT} is not what unmask finetune writes: {e!r:.100}") from None
    if not names:
        raise UsageError(f"{folder} has no finished seed: run its fine-tuning to the end first")
    results, place_of = Results(folder), dict[Key, int]()
    part = "test" if results.predictions(names[0], "test").is_file() else "valid"
    runs: dict[str, dict[int, list[RunAnswers]]] = {}
    for name in names:
        read = _read(results.predictions(name, part), labels, place_of)
        runs.setdefault(name.start, {}).setdefault(name.seed, []).append(read)
    return Answers(folder, str(about.get("model", folder)), kind, labels, metrics, [*place_of], runs)


def _finished(folder: Path, folds: int | None) -> list[RunName]:
    """The runs of complete seeds, sorted by seed."""
    found = [read_json(path) for path in sorted((folder / "seeds").glob("[!.]*.json"))]
    names = [RunName(one["start"], one["seed"], one.get("fold")) for one in found]
    count = Counter((name.start, name.seed) for name in names)
    whole = [name for name in names if count[name.start, name.seed] == (folds or 1)]
    return sorted(whole, key=lambda name: (name.start, name.seed, name.fold or 0))


def _read(path: Path, labels: tuple[str, ...], place_of: dict[Key, int]) -> RunAnswers:
    number_of = {word: float(i) for i, word in enumerate(labels)}
    copies: Counter[tuple[Any, ...]] = Counter()
    places, predicted, target = list[int](), list[float](), list[float]()
    for number, line in _lines(path):
        try:
            one = json.loads(line)
            label = str(one["label"]) if labels else float(one["target"])
            predicted.append(number_of[one["predicted"]] if labels else float(one["predicted"]))
            target.append(label if isinstance(label, float) else number_of[label])
            same = (one["text"], one.get("pair"), label)
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise DataError(f"{path}, line {number} is not what unmask finetune writes: {e!r:.100}") from None
        places.append(place_of.setdefault((*same, copies[same]), len(place_of)))
        copies[same] += 1
    return RunAnswers(np.array(places, dtype=np.int64), np.array(predicted), np.array(target))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers.

    Splits only at line feeds: a text may contain characters that other readers treat as line ends.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing, so its seed cannot be compared: run the fine-tuning anew")
    yield from enumerate(read_text(path, MAX_LINES).rstrip("\n").split("\n"), 1)
