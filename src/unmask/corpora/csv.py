"""CSV and TSV tables (also compressed): one document per row, its text in a column named in the header line."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unmask.corpora import Corpus, Document, sources
from unmask.corpora.labels import check_label
from unmask.corpora.records import Records
from unmask.errors import DataError, UsageError, did_you_mean

MAX_FIELD = 1 << 27  # characters; otherwise a quote that is never closed would make the whole file one text


@dataclass(frozen=True, kw_only=True)
class Csv(Records):
    """A CSV or TSV file, or a folder's, one document a row; blank lines are skipped.

    delimiter: a tab in files ending in .tsv or .tab, otherwise a comma. quoted: a field in double quotes may contain
    the delimiter, line breaks and (doubled) quotes; false: quotes are ordinary characters. only: keep only rows with
    these values, such as split=train; several values of one column are alternatives, several columns must all match.

    >>> Csv(path="reviews.csv.gz", field="review", label_field="sentiment").documents()  # doctest: +SKIP
    """

    endings = sources.TABLES
    choosing = ("only",)

    delimiter: str | None = None
    quoted: bool = True
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delimiter is not None and (self.delimiter != r"\t" and len(self.delimiter) != 1):
            raise UsageError(f"the delimiter must be one character, or \\t for a tab; got {self.delimiter!r}")
        if self.delimiter is not None and self.delimiter in '"\r\n':
            raise UsageError("the delimiter cannot be a quote or a line break: give a comma, a semicolon or \\t")
        if wrong := next((one for one in self.only if not one.partition("=")[0].strip() or "=" not in one), None):
            raise UsageError(f"only holds columns with their values, as split=train; got {wrong!r}")

    @property
    def wanted(self) -> dict[str, set[str]]:
        """The values that rows must have, by column.

        >>> Csv(path="a.csv", only=("split=train",)).wanted
        {'split': {'train'}}
        """
        wanted: dict[str, set[str]] = {}
        for one in self.only:
            column, _, value = one.partition("=")
            wanted.setdefault(column.strip(), set()).add(value.strip())
        return wanted

    def documents(self) -> Iterator[Document]:
        if not self.only:
            yield from super().documents()
            return
        found = False
        for file in self.files():
            for document in self.read(file):
                found = True
                yield document
        if not found:
            raise DataError(f"no row of {self.path} has {', '.join(self.only)}: look at its values, or name others")

    def check_beside(self, held_out: Corpus) -> None:
        """Rows of the same file may be trained on or held out, but not both."""
        if not isinstance(held_out, Csv) or not (self.only or held_out.only):
            return
        if sources.digest("", self.files()) != sources.digest("", held_out.files()):
            return
        ours, theirs = self.wanted, held_out.wanted
        if not any(ours[column].isdisjoint(theirs[column]) for column in ours.keys() & theirs.keys()):
            raise UsageError(
                f"data.train and data.valid read the same file {self.path} and may both hold a row: let `only` ask for "
                "different values of one column, as split=train and split=valid"
            )

    def fingerprint(self) -> str:
        files = self.files()
        options: list[Any] = ["csv", self.field, self.prompt_field, self.label_field, self.separator, self.quoted]
        options += [{"only": sorted(self.only)}] if self.only else []  # keeps older caches valid
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
        chosen = [(_column(file, name, names), values) for name, values in self.wanted.items()]
        for number, row in rows:
            where = f"{file}, line {number}"
            if len(row) != len(names):
                raise DataError(
                    f"{where} has {len(row)} columns, the first line {len(names)}: put a text that holds "
                    f"{self._delimiter(file)!r} in double quotes, or give another delimiter"
                )
            if any(row[at].strip() not in values for at, values in chosen):
                continue
            yield Document(
                row[text],
                "" if prompt is None else row[prompt] + self.separator,
                None if label is None else check_label(row[label], where),
            )

    def rows(self, file: sources.File) -> Iterator[tuple[int, list[str]]]:
        """The non-blank rows of one file, with the number of their first line, and the names of the columns."""
        csv.field_size_limit(
            max(csv.field_size_limit(), MAX_FIELD)
        )  # this limit is shared by all readers in the process, so it is never lowered
        lines = (line + "\n" for _, line in sources.lines(file))  # line breaks within quotes are part of a text
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
