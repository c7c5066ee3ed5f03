"""Parquet tables: one document per row, its text in a column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unmask.corpora import Document, sources
from unmask.corpora.labels import check_label
from unmask.corpora.records import Records
from unmask.errors import DataError, did_you_mean

AT_ONCE = 1 << 22  # bytes of rows in memory


@dataclass(frozen=True, kw_only=True)
class Parquet(Records):
    """A Parquet file, or a folder's, one document a row, read a batch of rows at a time.

    >>> Parquet(path="shards/", field="content").documents()  # doctest: +SKIP
    """

    endings = sources.PARQUET

    def read(self, file: sources.File) -> Iterator[Document]:
        arrow = sources.optional("pyarrow", "pyarrow", "data", "reading Parquet")
        sources.optional("pyarrow.parquet", "pyarrow", "data", "reading Parquet")
        try:
            yield from self._rows(arrow, file)
        except (OSError, arrow.ArrowException) as e:
            raise DataError(f"cannot read {file} as Parquet: {str(e).splitlines()[0]}") from None

    def _rows(self, arrow: object, file: sources.File) -> Iterator[Document]:
        texts = [self.field] if self.prompt_field is None else [self.field, self.prompt_field]
        names = list(dict.fromkeys(texts if self.label_field is None else [*texts, self.label_field]))
        with sources.opened(file) as raw, arrow.parquet.ParquetFile(raw, **sources.BOUNDED) as table:  # type: ignore[attr-defined]
            known = table.schema_arrow.names
            for name in names:
                if name not in known:
                    raise DataError(f"{file} has no column {name!r}; {did_you_mean(name, known)}")
            row = 0
            for batch in table.iter_batches(batch_size=_rows_at_once(table.metadata), columns=names):
                for values in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                    row += 1
                    by_name = dict(zip(names, values, strict=True))
                    for name in texts:
                        if not isinstance(by_name[name], str):
                            raise DataError(
                                f"{file}, row {row}: {name!r} is no text but {type(by_name[name]).__name__}"
                            )
                    prompt = "" if self.prompt_field is None else by_name[self.prompt_field] + self.separator
                    label = None if self.label_field is None else by_name[self.label_field]
                    yield Document(by_name[self.field], prompt, check_label(label, f"{file}, row {row}"))


def _rows_at_once(about: Any) -> int:
    """The number of rows that fill about `AT_ONCE` bytes, according to the file's metadata: a document may be
    a novel."""
    total = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    return int(max(1, min(1024, AT_ONCE * about.num_rows // max(1, total))))
