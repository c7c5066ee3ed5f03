"""CSV and TSV tables (also compressed): one document a row, its text in a column that the first line names."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unmask.corpora import Document, sources
from unmask.corpora.labels import check_label
from unmask.corpora.records import Records
from unmask.errors import DataError, UsageError, did_you_mean

MAX_FIELD = 1 << 27  # characters; a quote that is never closed would else take the whole file for one text


@dataclass(frozen=True, kw_only=True)
class Csv(Records):
    """A CSV or TSV file, or a folder's, one document a row; blank lines are skipped.

    delimiter: a tab in files ending in .tsv or .tab, else a comma. quoted: a field in double quotes may hold the
    delimiter, line breaks and, doubled, quotes; false: quotes are letters as any others.

    >>> Csv(path="reviews.csv.gz", field="review", label_field="sentiment").documents()  # doctest: +SKIP
    """

    endings = sources.TABLES

    delimiter: str | None = None
    quoted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delimiter is not None and (self.delimiter != r"\t" and len(self.delimiter) != 1):
            raise UsageError(f"the delimiter must be one character, or \\t for a tab; got {self.delimiter!r}")
        if self.delimiter is not None and self.delimiter in '"\r\n':
            raise UsageError("the delimiter cannot be a quote or a line break: give a comma, a semicolon or \\t")

    def fingerprint(self) -> str:
        files = self.files()
        options = ["csv", self.field, self.prompt_field, self.label_field, self.separator, self.quoted]
        return sources.digest([*options, *map(self._delimiter, files)], files)

    def _delimiter(self, file: sources.File) -> str:
        if self.delimiter is not None:
            return "\t" if self.delimiter == r"\t" else self.delimiter
        return "\t" if sources.ending(file) in (".tsv", ".tab") else ","

    def read(self, file: sources.File) -> Iterator[Document]:
        rows = self.rows(file)
        names = [name.strip() for name in next(rows, (0, []))[1]]
        if not names:
            return
        text = _column(file, self.field, names)
        prompt, label = (
            None if name is None else _column(file, name, names) for name in (self.prompt_field, self.label_field)
        )
        for number, row in rows:
            where = f"{file}, line {number}"
            if len(row) != len(names):
                raise DataError(
                    f"{where} has {len(row)} columns, the first line {len(names)}: put a text that holds "
                    f"{self._delimiter(file)!r} in double quotes, or give another delimiter"
                )
            yield Document(
                row[text],
                "" if prompt is None else row[prompt] + self.separator,
                None if label is None else check_label(row[label], where),
            )

    def rows(self, file: sources.File) -> Iterator[tuple[int, list[str]]]:
        """The rows of one file with the number of their first line, blank ones left out; with the names of columns."""
        csv.field_size_limit(
            max(csv.field_size_limit(), MAX_FIELD)
        )  # one for all readers of the process: never lowered
        lines = (line + "\n" for _, line in sources.lines(file))  # quoted line breaks are part of a text
        how: dict[str, Any] = {} if self.quoted else {"quoting": csv.QUOTE_NONE}
        reader = csv.reader(lines, delimiter=self._delimiter(file), strict=True, **how)
        while True:
            number = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as e:
                reason = str(e).partition(" - ")[0]
                raise DataError(
                    f"{file}, line {number} is not valid CSV: {reason}; look for a quote without its pair"
                ) from None
            if any(value.strip() for value in row):
                yield number, row


def _column(file: sources.File, name: str, names: list[str]) -> int:
    if name not in names:
        columns = [known[:40] for known in names]
        raise DataError(f"the first line of {file} names no column {name!r}; {did_you_mean(name, columns)}")
    if names.count(name) > 1:
        raise DataError(f"the first line of {file} names {names.count(name)} columns {name!r}: give each its own name")
    return names.index(name)
