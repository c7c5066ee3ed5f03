"""Token ids in Parquet shards, as written by `unmask tokenize` or otherwise; never whole in memory, never copied."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from unmask.corpora import Corpus, Document, sources
from unmask.corpora.remote import Remote, is_url
from unmask.errors import DataError, UnmaskError, UsageError, did_you_mean

IDS = "input_ids"
KEY = b"unmask"  # metadata key in a shard's file
PLAN, WHOLE = "tokenize.json", "tokens.json"  # what `unmask tokenize` writes first and last
EDGE = 1 << 16
MOST = 1 << 40  # maximum number of documents, tokens or bytes that a shard may declare


def holds_tokens(file: sources.File) -> bool:
    """Whether a Parquet file has lists of ids in the usual column, and no text."""
    try:
        with _Table(file, IDS) as table:
            return "text" not in table.schema_arrow.names
    except UnmaskError:  # the reader reports what is wrong
        return False


@dataclass(frozen=True)
class Shard:
    """A file of documents. tokens: their total number, without end-of-text."""

    file: sources.File
    documents: int
    tokens: int
    bytes: int | None = None  # bytes of the text, if the file declares them
    tokenizer: str | None = None  # its fingerprint, if declared


@dataclass(frozen=True, kw_only=True)
class Tokens(Corpus):
    """A Parquet file, a folder's, those of a pattern or a URL: a document a row, its ids in a column of lists.

    A folder written by `unmask tokenize` has parts: `train-*.parquet` and `valid-*.parquet`. Rows are cut from the
    shards as they are read (packing `wrap`). buffer: the number of shards to shuffle together and hold in memory.

    >>> Tokens(path="tokens/", buffer=8).shards("train")  # doctest: +SKIP
    """

    tokenized: ClassVar[bool] = True

    path: str
    field: str = IDS
    buffer: int = 4
    ended: bool = False  # whether the ids of each document already end in end-of-text

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise UsageError(f"the buffer must hold at least 1 shard, got {self.buffer}")

    def documents(self) -> Iterator[Document]:
        raise DataError(
            f"{self.path} holds token ids, not text: it can be trained on and measured; what needs text, such as a "
            "tokenizer to be trained, needs the texts"
        )

    def files(self, part: str = "all") -> list[sources.File]:
        """The shards of a part, sorted by path."""
        folder = Path(self.path).expanduser()
        if not is_url(self.path) and (folder / PLAN).exists() and not (folder / WHOLE).exists():
            raise DataError(f"{self.path} is not tokenized to its end: the same `unmask tokenize` goes on with it")
        files = sources.find(self.path, sources.PARQUET)
        parts = {file.name.split("-")[0] for file in files}
        if not parts <= {"train", "valid"}:
            return sources.one_split(self.path, files)
        if part == "all":
            return files
        return [file for file in files if file.name.startswith(f"{part}-")]

    def has_part(self, part: str) -> bool:
        """Whether the shards' names say which of them are held out."""
        files = sources.find(self.path, sources.PARQUET)
        return {file.name.split("-")[0] for file in files} <= {"train", "valid"} and bool(self.files(part))

    def shards(self, part: str = "all") -> list[Shard]:
        """The shards with their sizes: as declared in their metadata, otherwise counted by reading them."""
        return [self.shard(file) for file in self.files(part)]

    def shard(self, file: sources.File) -> Shard:
        with self._open(file) as table:
            metadata = (table.schema_arrow.metadata or {}).get(KEY)
            if metadata is not None:
                return _said(file, metadata, table.metadata.num_rows)
            lengths = [
                np.diff(_lists(batch.column(0), file, self.field).offsets.to_numpy())
                for batch in table.iter_batches(columns=[self.field])
            ]
        return Shard(file, sum(map(len, lengths)), int(sum(part.sum() for part in lengths)))

    def read(self, shard: Shard, eot_id: int) -> NDArray[np.int64]:
        """All ids of a shard concatenated, with end-of-text after each document."""
        chains = []
        with self._open(shard.file) as table:
            for batch in table.iter_batches(columns=[self.field], batch_size=1 << 14):
                lists = _lists(batch.column(0), shard.file, self.field)
                chains.append(_ended(lists, eot_id) if not self.ended else lists.flatten().to_numpy())
        return np.concatenate(chains) if chains else np.zeros(0, dtype=np.int64)

    def fingerprint(self) -> str:
        """A hash of each file's size and both its ends, where Parquet describes the rest; avoids reading all of it."""
        total = hashlib.sha256(json.dumps(["tokens", self.field, self.ended]).encode())
        for file in self.files():
            total.update(_ends_of(file) + file.name.split("-")[0].encode())  # its part
        return total.hexdigest()

    def _open(self, file: sources.File) -> Any:
        return _Table(file, self.field)


def _said(file: sources.File, metadata: bytes, rows: int) -> Shard:
    """The shard according to its metadata, which is untrusted."""
    try:
        said = json.loads(metadata)
        shard = Shard(file, said["documents"], said["tokens"], said["bytes"], said["tokenizer"])
        numbers = (shard.documents, shard.tokens, shard.bytes)
        good = all(type(number) is int and 0 <= number < MOST for number in numbers) and shard.documents == rows
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise DataError(f"{file} is damaged: what it says of its documents and tokens cannot be; tokenize again")
    return shard


class _Table:
    """An open Parquet file that has the column."""

    def __init__(self, file: sources.File, field: str) -> None:
        self.file, self.field = file, field
        self.raw = sources.opened(file)

    def __enter__(self) -> Any:
        arrow: Any = sources.optional("pyarrow", "pyarrow", "data", "reading Parquet")
        sources.optional("pyarrow.parquet", "pyarrow", "data", "reading Parquet")
        try:
            self.table = arrow.parquet.ParquetFile(self.raw.__enter__(), **sources.BOUNDED)
        except arrow.ArrowException as e:
            raise DataError(f"cannot read {self.file} as Parquet: {str(e).splitlines()[0]}") from None
        known = self.table.schema_arrow.names
        if self.field not in known:
            raise DataError(f"{self.file} has no column {self.field!r}; {did_you_mean(self.field, known)}")
        return self.table

    def __exit__(self, *error: Any) -> None:
        self.raw.__exit__(*error)


def _lists(column: Any, file: sources.File, field: str) -> Any:
    import pyarrow as arrow

    types = arrow.types
    if not (types.is_list(column.type) or types.is_large_list(column.type)) or not types.is_integer(
        column.type.value_type
    ):
        raise DataError(f"{file}: the column {field!r} holds no lists of whole numbers but {column.type}")
    if column.null_count or column.flatten().null_count:
        raise DataError(f"{file}: the column {field!r} has empty places (null), where every document needs its ids")
    return column


def _ended(lists: Any, eot_id: int) -> NDArray[np.int64]:
    """Append end-of-text to each list, in one pass."""
    ids, ends = lists.flatten().to_numpy(), lists.offsets.to_numpy()
    ends = ends[1:] - ends[0]
    chain = np.full(len(ids) + len(ends), eot_id, dtype=np.promote_types(ids.dtype, np.min_scalar_type(eot_id)))
    keep = np.ones(len(chain), dtype=bool)
    keep[ends + np.arange(len(ends))] = False
    chain[keep] = ids
    return chain


def _ends_of(file: sources.File) -> bytes:
    if isinstance(file, Remote):
        return file.version().encode()
    with Path(file).open("rb") as raw:
        head = raw.read(EDGE)
        size = raw.seek(0, 2)
        raw.seek(max(0, size - EDGE))
        return hashlib.sha256(size.to_bytes(8, "little") + head + raw.read(EDGE)).digest()
