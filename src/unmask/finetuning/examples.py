"""Labelled texts, read from TSV, CSV and JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unmask.corpora import sources
from unmask.corpora.csv import Csv
from unmask.corpora.fasta import other_strand
from unmask.errors import DataError, did_you_mean
from unmask.finetuning.config import TaskData
from unmask.heads.task import Task

_DNA = re.compile("[ACGTN]*", re.IGNORECASE)


@dataclass(frozen=True)
class Example:
    """A text, its pair if there is one, its label as spelled in the file, and its location."""

    text: str
    pair: str | None
    label: str | None
    where: str


def read_examples(path: str, data: TaskData, *, labelled: bool = True) -> list[Example]:
    """The examples of a file or a folder's files. labelled: every example must have a label; otherwise labels are not
    read.

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
    """The columns to read."""
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


def content_of(train: Sequence[Example]) -> Callable[[str, str | None], tuple[str, str | None]]:
    """A function from a text and its pair to their content, which is equal for copies; given the training examples.

    If all of them are DNA sequences, copies may differ in case or be the reverse complement: a model that has read one
    knows the other.

    >>> content = content_of([Example("ACC", None, "0", "")])
    >>> content("ggt", None) == content("ACC", None)
    True
    """
    if not all(one.pair is None and _DNA.fullmatch(one.text) for one in train):
        return lambda text, pair: (text, pair)
    return lambda text, pair: (min(text.upper(), other_strand(text.upper())), pair)


def columns_of(task: Task, **changed: Any) -> TaskData:
    """The columns for reading a fine-tuned model's own files, with overrides.

    >>> columns_of(Task(labels=("no", "yes"), length=16, text="sentence")).text
    'sentence'
    """
    own: dict[str, Any] = {"text": task.text, "pair": task.pair, "label": task.label}
    return TaskData(**own | changed)
