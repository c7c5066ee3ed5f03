"""The parts of a folder of texts, as JSON lines or Parquet: written atomically, and read back for checking."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from unmask.corpora.sources import optional
from unmask.storage.atomic import atomic_file, atomic_text

Format = Literal["jsonl", "parquet"]
Record = dict[str, Any]
ABOUT = b"unmask"  # key in a Parquet file's metadata for everything that determines the texts


def record_of(index: int, seed: int, prompt: str, text: str) -> Record:
    """A text as stored in its part; the digest shows whether it is still what was written.

    >>> sorted(record_of(0, 7, "a", "ab"))
    ['index', 'prompt', 'seed', 'sha256', 'text']
    """
    digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()
    return {"index": index, "seed": seed, "prompt": prompt, "text": text, "sha256": digest}


def part_name(number: int, format: Format) -> str:
    """
    >>> part_name(3, "parquet")
    'part-00003.parquet'
    """
    return f"part-{number:05d}.{format}"


def check_format(format: Format) -> None:
    """Refuse Parquet if pyarrow is missing.

    >>> check_format("jsonl")
    """
    if format == "parquet":
        _arrow()


def write_part(path: Path, records: Sequence[Record], format: Format, about: dict[str, Any]) -> None:
    """Write a part atomically. about: everything that determines the texts, stored in the metadata of Parquet files.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "part-00000.jsonl"
    >>> write_part(path, [record_of(0, 7, "a", "ab")], "jsonl", {})
    >>> first_wrong(path, "jsonl", 1, lambda at, text: record_of(at, 7, "a", text)) is None
    True
    """
    if format == "jsonl":
        atomic_text(path, "".join(map(_line, records)))
        return
    arrow = _arrow()
    schema = _schema(arrow).with_metadata({ABOUT: json.dumps(about).encode()})
    table = arrow.Table.from_pylist(list(records), schema=schema)
    with atomic_file(path) as temp:
        arrow.parquet.write_table(table, temp)


def first_wrong(path: Path, format: Format, count: int, expected: Callable[[int, str], Record]) -> int | None:
    """The first row, counted from 1, that differs from the expected one in a part of `count` texts; None if all agree.

    expected(i, text): the record of row i, from 0, if that is its text.
    """
    rows = _lines(path) if format == "jsonl" else _rows(path)
    for at in range(count):
        found = next(rows, None)
        try:
            if found is None or _line(found) != _line(expected(at, found["text"])):  # types included
                return at + 1
        except (KeyError, TypeError, AttributeError):
            return at + 1
    return count + 1 if next(rows, None) is not None else None


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def _lines(path: Path) -> Iterator[Any]:
    """The record of each line, if it has the form that `write_part` writes; otherwise something that is not a
    record."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
                yield record if _line(record).encode() == line else {}
            except (ValueError, RecursionError):
                yield {}


def _rows(path: Path) -> Iterator[Any]:
    arrow = _arrow()
    try:
        table = arrow.parquet.read_table(path, partitioning=None)
        yield from table.to_pylist() if table.schema.equals(_schema(arrow)) else [{}]
    except (OSError, arrow.ArrowException, UnicodeDecodeError):
        yield {}


def _schema(arrow: Any) -> Any:
    numbers = [(name, arrow.int64()) for name in ("index", "seed")]
    return arrow.schema([*numbers, *((name, arrow.string()) for name in ("prompt", "text", "sha256"))])


def _arrow() -> Any:
    optional("pyarrow.parquet", "pyarrow", "data", "writing Parquet")
    return optional("pyarrow", "pyarrow", "data", "writing Parquet")
