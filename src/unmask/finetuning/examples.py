"""Labelled texts: read from TSV, CSV and JSON lines, split, their labels made into class numbers or numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unmask.corpora import sources
from unmask.corpora.csv import Csv
from unmask.data.order import permuted
from unmask.errors import DataError, UsageError, did_you_mean
from unmask.finetuning.config import FinetuneConfig, TaskData
from unmask.heads.task import MAX_LABELS, Kind, Task

MANY = 100  # classes; more of them are looked at before they are believed


@dataclass(frozen=True)
class Example:
    """A text, its pair where there is one, its label as it is spelled in the file, and where it stands."""

    text: str
    pair: str | None
    label: str | None
    where: str


@dataclass(frozen=True)
class Split:
    """Examples with their class numbers or numbers."""

    examples: list[Example]
    targets: list[float]
    what: str  # the file, and which part of it

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class Splits:
    """What is trained on, what stops it, and what is measured at the end."""

    train: Split
    valid: Split
    test: Split | None
    labels: tuple[str, ...]

    @property
    def parts(self) -> dict[str, Split]:
        """By name, those that predictions are written of."""
        return {"valid": self.valid} | ({} if self.test is None else {"test": self.test})


def read_examples(path: str, data: TaskData, *, labelled: bool = True) -> list[Example]:
    """The examples of a file or a folder's files; labelled: each must have its label, else none is read.

    >>> read_examples("mine.tsv", TaskData(text="sentence", label="class"))  # doctest: +SKIP
    """
    endings = (*sources.TABLES, *sources.JSONL, ".txt")
    examples: list[Example] = []
    for file in sources.one_split(path, sources.find(path, endings)):
        read = _json_lines if sources.ending(file) in sources.JSONL else _table
        for number, values in read(file, data, labelled):
            examples.append(_example(values, data, f"{file}, line {number}", labelled))
    if not examples:
        raise sources.is_empty(path)
    return examples


def _example(values: dict[str, str], data: TaskData, where: str, labelled: bool) -> Example:
    label = values[data.label].strip() if labelled else None
    if label == "":
        raise DataError(f"{where} has an empty label: give it one, or take the line out")
    return Example(values[data.text], None if data.pair is None else values[data.pair], label, where)


def _names(data: TaskData, labelled: bool) -> list[str]:
    """The columns that are read."""
    return [data.text, *([] if data.pair is None else [data.pair]), *([data.label] if labelled else [])]


def _table(file: sources.File, data: TaskData, labelled: bool) -> Iterator[tuple[int, dict[str, str]]]:
    delimiter = data.delimiter or ("," if sources.ending(file) == ".csv" else r"\t")
    quoted = data.quoted if data.quoted is not None else delimiter == ","
    rows = Csv(path=str(file), delimiter=delimiter, quoted=quoted).rows(file)
    columns = list(data.columns)
    source = "data.columns"
    if not columns:
        columns = [name.strip() for name in next(rows, (0, []))[1]]
        if not columns:
            return
        source = f"the first line of {file}"
    for name in _names(data, labelled):
        if columns.count(name) != 1:
            which = "no column" if name not in columns else f"{columns.count(name)} columns"
            hint = did_you_mean(name, [known[:40] for known in columns])
            raise DataError(f"{source} names {which} {name!r}; {hint} (see data.text, data.pair, data.label)")
    for number, row in rows:
        if number in data.skip_lines:
            continue
        if len(row) != len(columns) and not (data.extra_columns and len(row) > len(columns)):
            raise DataError(
                f"{file}, line {number} has {len(row)} columns, {source} {len(columns)}: mend the line, or see "
                "data.delimiter, data.quoted and data.extra_columns"
            )
        yield number, dict(zip(columns, row, strict=False))


def _json_lines(file: sources.File, data: TaskData, labelled: bool) -> Iterator[tuple[int, dict[str, str]]]:
    for number, line in sources.lines(file):
        if not line.strip() or number in data.skip_lines:
            continue
        where = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise DataError(f"{where} is not valid JSON: {e}") from None
        if not isinstance(record, dict):
            raise DataError(f"{where} is not a JSON object with a field {data.text!r}")
        values: dict[str, str] = {}
        for name in _names(data, labelled):
            if name not in record:
                raise DataError(f"{where} has no field {name!r}; {did_you_mean(name, map(str, record))}")
            value: Any = record[name]
            number_too = name == data.label and isinstance(value, int | float)
            if not isinstance(value, str) and not number_too:
                raise DataError(f"{where}: the field {name!r} is no text but {type(value).__name__}")
            values[name] = value if isinstance(value, str) else json.dumps(value)
        yield number, values


# --- splits -----------------------------------------------------------------------------------------------------------


def make_splits(config: FinetuneConfig) -> Splits:
    """Read a fine-tuning's files; every label is looked at before anything is trained.

    >>> make_splits(FinetuneConfig(data=TaskData(train="mine.tsv")))  # doctest: +SKIP
    """
    data = config.data
    if not data.train:
        raise UsageError("there are no examples: give --data.train FILE with labelled texts, or --suite glue")
    parts: dict[str, tuple[list[Example], str]] = {}
    rest, what = read_examples(data.train, data), data.train
    data = replace(data, skip_lines=())  # they are train's
    if data.test is not None:
        parts["test"] = read_examples(data.test, data), data.test
    elif data.test_share:
        rest, part = divided(rest, data.test_share, 1)
        parts["test"] = part, f"{len(part):,} examples of {data.train}, kept from training"
    if data.valid is not None:
        parts["valid"] = read_examples(data.valid, data), data.valid
    else:
        rest, part = divided(rest, data.held_out, 0)
        parts["valid"] = part, f"{len(part):,} examples of {data.train}, kept from training"
    labels = class_words(rest, config) if config.kind == "classification" else ()
    made = {
        name: Split(examples, targets(examples, config.kind, labels), said)
        for name, (examples, said) in {"train": (rest, what), **parts}.items()
    }
    return Splits(made["train"], made["valid"], made.get("test"), labels)


def divided(examples: list[Example], share: float, key: int) -> tuple[list[Example], list[Example]]:
    """All but a share, and the share, each in the order of the file; which those are is a keyed permutation.

    >>> one, other = divided([Example(str(n), None, None, "") for n in range(10)], 0.2, 0)
    >>> len(one), len(other)
    (8, 2)
    """
    n = len(examples)
    count = max(1, round(n * share))
    if count >= n:
        raise DataError(f"{n} examples are too few to keep {count} of them from training: give more, or data.valid")
    taken = {*permuted(np.arange(count), n, key, np.zeros(count, dtype=np.int64)).tolist()}
    kept = [one for i, one in enumerate(examples) if i not in taken]
    return kept, [one for i, one in enumerate(examples) if i in taken]


def class_words(train: list[Example], config: FinetuneConfig) -> tuple[str, ...]:
    """The classes: those that are stated, each of which has an example, or those that are there."""
    there = {example.label for example in train if example.label is not None}
    if config.labels:
        targets(train, "classification", config.labels)  # a label of another class is told first, with its line
        if missing := [word for word in config.labels if word not in there]:
            raise UsageError(
                f"the class {missing[0][:40]!r} has no example in {config.data.train}: leave it out of labels"
            )
        return config.labels
    if len(there) == 1:
        raise UsageError(
            f"all of {config.data.train} is of one class, {min(there)[:40]!r}: there is nothing to tell apart"
        )
    if len(there) > MAX_LABELS or (len(there) > MANY and len(there) > len(train) / 2):
        raise UsageError(
            f"{config.data.train} has {len(there):,} different labels in {len(train):,} examples: set kind = "
            "regression if they are numbers, or name another column in data.label"
        )
    numbers = [_number(word) for word in there]
    if all(number is not None for number in numbers):
        return tuple(sorted(there, key=lambda word: (_number(word) or 0.0, word)))
    return tuple(sorted(there))


def targets(examples: list[Example], kind: Kind, labels: tuple[str, ...]) -> list[float]:
    """The class numbers, or the numbers, of labelled examples.

    >>> targets([Example("a text", None, "yes", "a.tsv, line 2")], "classification", ("no", "yes"))
    [1]
    """
    numbers: list[float] = []
    known = {word: i for i, word in enumerate(labels)}
    for example in examples:
        label = example.label or ""
        if kind == "classification":
            if label not in known:
                raise DataError(
                    f"{example.where}: the label {label[:40]!r} is not among the {len(labels)} classes; "
                    f"{did_you_mean(label, [word[:40] for word in labels[:20]])}"
                )
            numbers.append(known[label])
            continue
        number = _number(label)
        if number is None:
            raise DataError(f"{example.where}: the label {label[:40]!r} is no number, which a regression needs")
        numbers.append(number)
    return numbers


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def columns_of(task: Task, **changed: Any) -> TaskData:
    """How a fine-tuned model's own files are read, with what is otherwise now.

    >>> columns_of(Task(labels=("no", "yes"), length=16, text="sentence")).text
    'sentence'
    """
    own: dict[str, Any] = {"text": task.text, "pair": task.pair, "label": task.label}
    return TaskData(**own | changed)
