"""JSON lines (also compressed): one object per line, its text in a field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unmask.corpora import Document, sources
from unmask.corpora.labels import check_label
from unmask.corpora.records import Records
from unmask.errors import DataError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Jsonl(Records):
    """A file of JSON lines, or a folder's, one document a line; blank lines are skipped.

    >>> Jsonl(path="pairs.jsonl.gz", field="answer", prompt_field="question").documents()  # doctest: +SKIP
    """

    endings = sources.JSONL

    def read(self, file: sources.File) -> Iterator[Document]:
        for number, line in sources.lines(file):
            if line.strip():
                yield self._document(file, number, line)

    def _document(self, file: sources.File, number: int, line: str) -> Document:
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
