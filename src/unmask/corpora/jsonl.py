"""JSON lines (also compressed): one object a line, its text in a field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.corpora import Corpus, Document, check_separator, sources
from unmask.corpora.labels import check_label
from unmask.errors import DataError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Jsonl(Corpus):
    """A file of JSON lines, or a folder's, one document a line; blank lines are skipped.

    >>> Jsonl(path="pairs.jsonl.gz", field="answer", prompt_field="question").documents()  # doctest: +SKIP
    """

    path: str
    field: str = "text"
    prompt_field: str | None = None
    label_field: str | None = None  # a word, or a whole number from 0; null for none
    separator: str = ""  # between prompt and text

    def __post_init__(self) -> None:
        check_separator(self.separator, self.prompt_field)

    def documents(self) -> Iterator[Document]:
        any_documents = False
        for file in sources.find(self.path, sources.JSONL):
            for number, line in sources.lines(file):
                if line.strip():
                    any_documents = True
                    yield self._document(file, number, line)
        if not any_documents:
            raise sources.is_empty(self.path)

    def fingerprint(self) -> str:
        options = ["jsonl", self.field, self.prompt_field]
        options += [] if self.label_field is None else [self.label_field]
        separator = [{"separator": self.separator}] if self.separator else []  # so that older caches stay known
        return sources.digest([*options, *separator], sources.find(self.path, sources.JSONL))

    def _document(self, file: Path, number: int, line: str) -> Document:
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise DataError(f"{file}, line {number} is not valid JSON: {e}") from None
        if not isinstance(data, dict):
            raise DataError(f"{file}, line {number} is not a JSON object with a field {self.field!r}")

        def value(field: str) -> str:
            if field not in data:
                raise DataError(f"{file}, line {number} has no field {field!r}; {did_you_mean(field, map(str, data))}")
            if not isinstance(data[field], str):
                kind = type(data[field]).__name__
                raise DataError(f"{file}, line {number}: the field {field!r} is no text but {kind}; name another field")
            return str(data[field])

        prompt = value(self.prompt_field) + self.separator if self.prompt_field is not None else ""
        return Document(value(self.field), prompt, self._label(data, f"{file}, line {number}"))

    def _label(self, data: dict[str, Any], where: str) -> int | str | None:
        if self.label_field is None:
            return None
        if self.label_field not in data:
            raise DataError(f"{where} has no field {self.label_field!r}; {did_you_mean(self.label_field, data)}")
        return check_label(data[self.label_field], where)
