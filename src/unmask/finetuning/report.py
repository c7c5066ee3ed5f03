"""The report of a fine-tuning: the data, the scores of guessing, the scores of every seed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from unmask.finetuning.answers import read_answers
from unmask.finetuning.config import FinetuneConfig
from unmask.finetuning.differences import score_intervals, score_on
from unmask.finetuning.examples import Example, content_of
from unmask.finetuning.results import Numbers, RunName
from unmask.finetuning.rows import TaskRows
from unmask.finetuning.scores import score_all
from unmask.finetuning.splits import Labelled, Split, Splits
from unmask.finetuning.table import reported, summarize
from unmask.heads.task import Task
from unmask.model import Model
from unmask.reader import to_dict


def make_report(
    name: str,
    model: Model,
    task: Task,
    labelled: Labelled,
    rows_of: Callable[[Split], TaskRows],
    done: Mapping[RunName, Numbers],
) -> Numbers:
    """The content of `report.json`.

    In cross-validation, counts are those of the first seed: the training and validation examples of its first fold, and
    the reported examples of all its folds.

    >>> make_report("stories", model, task, labelled, rows_of, done)["examples"]  # doctest: +SKIP
    {'train': 86, 'valid': 10}
    """
    config = labelled.config
    folds = [None] if config.folds is None else range(config.folds)
    every = [labelled.splits(0, fold) for fold in folds]
    splits = _together(every, labelled)
    rows = {part: rows_of(split) for part, split in splits.all.items()}
    guesses = [{part: guess(config, one, split) for part, split in one.parts.items()} for one in every]
    return {
        "model": name,
        "parameters": model.num_parameters,
        "task": to_dict(task),
        "metrics": list(config.measured),
        "examples": {part: len(split) for part, split in splits.all.items()},
        **({} if config.folds is None else {"folds": config.folds, "own_files": sorted(labelled.files)}),
        **({"left_out": labelled.left_out} if config.data.shortest else {}),
        "sources": {part: split.what for part, split in splits.all.items()},
        "cut_texts": {part: one.cut_texts for part, one in rows.items()},
        "cut_tokens": {part: sum(one.cut) for part, one in rows.items()},
        "repeated": {part: _repeated(part, every, labelled) for part in splits.parts},
        "guess": {part: _mean(part, guesses, every, config) for part in splits.parts},
        "results": summarize(done),
        "seconds": round(sum(one["seconds"] for one in done.values()), 3),
    }


def add_intervals(report: Numbers, folder: Path, labelled: Labelled) -> None:
    """Add to each reported score its interval over examples, computed from the answers of the folder's runs, and its
    value on the examples that do not occur in training.

    >>> add_intervals(report, Path("runs/reviews"), labelled)  # doctest: +SKIP
    """
    answers = read_answers(folder)
    content = content_of(labelled.files["train"])
    known = {content(one.text, one.pair) for one in labelled.files["train"]}
    new_E = np.array([content(text, pair) not in known for text, pair, *_ in answers.keys])
    part = reported(report)
    again = report["repeated"][part] and "test" in labelled.files and bool(new_E.any())
    for start, parts in report["results"].items():
        seeds = max(len(found["seeds"]) for found in parts[part].values())
        intervals = score_intervals(answers, start, [*parts[part]], seeds=seeds)
        for metric, found in parts[part].items():
            half = intervals[metric].texts_half
            found["examples_half"] = None if half is None else round(half, 9)
            if again:
                found["new"] = score_on(answers, start, metric, new_E, seeds=seeds)
    if again:
        report["new"] = int(new_E.sum())


def _together(every: list[Splits], labelled: Labelled) -> Splits:
    """The splits to count; in cross-validation those of the first fold, with the reported examples of all folds."""
    first, data = every[0], labelled.config.data
    if labelled.config.folds is None:
        return first
    if data.test is not None:
        return first
    tests = [one.test for one in every if one.test is not None]
    whole = Split([e for t in tests for e in t.examples], [y for t in tests for y in t.targets], data.train)
    return Splits(first.train, first.valid, whole, first.labels)


def _repeated(part: str, every: list[Splits], labelled: Labelled) -> int:
    """The number of examples of a part that also occur in training.

    In cross-validation each fold is compared with what its own run was trained on; a test file with all of train,
    including the validation part.
    """
    if part == "test" and "test" in labelled.files:
        return repeated(labelled.files["test"], labelled.files["train"])
    pairs = [(one.parts[part].examples, one.train.examples) for one in every]
    return sum(repeated(*pair) for pair in (pairs if part == "test" else pairs[:1]))


def repeated(split: Sequence[Example], train: Sequence[Example]) -> int:
    """The number of examples of a split that occur in the training examples, verbatim or as the reverse complement."""
    content = content_of(train)
    known = {content(one.text, one.pair) for one in train}
    return sum(content(one.text, one.pair) in known for one in split)


def _mean(
    part: str, guesses: list[dict[str, dict[str, float]]], every: list[Splits], config: FinetuneConfig
) -> dict[str, float]:
    """Average over folds, weighted by their numbers of examples."""
    sizes = [len(one.parts[part]) for one in every]
    scores = [one[part] for one in guesses]
    return {
        name: sum(score[name] * n for score, n in zip(scores, sizes, strict=True)) / sum(sizes)
        for name in config.measured
    }


def guess(config: FinetuneConfig, splits: Splits, split: Split) -> dict[str, float]:
    """The scores of a constant answer: the most frequent class, or the mean, of the training examples."""
    train = splits.train.targets
    if config.kind == "classification":
        answer = Counter(train).most_common(1)[0][0]
    else:
        answer = statistics.fmean(train)
    return score_all(config.measured, config.kind, [answer] * len(split), split.targets)
