"""Files of documents: listed in a fixed order, decompressed while reading, never whole in memory."""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import hashlib
import importlib
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, BinaryIO, cast

from unmask.corpora import Corpus
from unmask.corpora.remote import MAGIC, Remote, find_remote, is_url, reaching
from unmask.errors import DataError, MissingExtraError, UnmaskError

COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
JSONL = (".jsonl", ".ndjson", ".json")
WRITTEN = "generate.json"  # metadata that `unmask generate --out` writes next to its texts; not a document
PARQUET = (".parquet",)
HELD_OUT = ("valid", "validation", "val", "dev")
_BARE = re.compile(r"^([A-Za-z][\w+.-]*:)?/+")
_SPLIT = re.compile(r"(train|test|" + "|".join(HELD_OUT) + r")([-_]?\d[\w-]*)?", re.IGNORECASE)
FASTA = (".fa", ".fasta", ".fna")
TABLES = (".csv", ".tsv", ".tab")
_CHUNK = 1 << 20
# For pyarrow's readers, which otherwise keep row groups that they have read: memory would grow with the file.
BOUNDED: dict[str, Any] = {"pre_buffer": False, "buffer_size": _CHUNK}

File = Path | Remote


def from_path(path: str) -> Corpus:
    """The corpus in a file, a folder, a pattern or a URL, by its ending: JSON lines, Parquet, CSV, TSV or FASTA,
    otherwise text.

    If a text file has lines `<|endoftext|>` in its first megabyte, these separate the documents.

    >>> from_path("stories/train.txt.xz")  # doctest: +SKIP
    Text(path='stories/train.txt.xz', separator='<|endoftext|>')
    """
    from unmask.corpora.csv import Csv
    from unmask.corpora.fasta import Fasta
    from unmask.corpora.jsonl import Jsonl
    from unmask.corpora.parquet import Parquet
    from unmask.corpora.text import Text
    from unmask.corpora.tokens import PLAN, Tokens, holds_tokens

    if not is_url(path) and (Path(path).expanduser() / PLAN).exists():
        return Tokens(path=path)
    endings = {ending(file) for file in files_of(path)}
    kinds: dict[str, tuple[tuple[str, ...], Callable[..., Corpus]]] = {
        "Parquet": (PARQUET, Parquet),
        "JSON lines": (JSONL, Jsonl),
        "CSV": (TABLES, Csv),
    }
    if endings <= set(FASTA):
        return Fasta(path=path)
    present = [kind for kind, (known, _) in kinds.items() if endings & set(known)]
    if len(present) > 1:
        raise DataError(f"the folder {path} holds both {present[0]} and {present[1]}; name the files of one kind")
    if present == ["Parquet"] and holds_tokens(find(path, PARQUET)[0]):
        return Tokens(path=path)
    if present:
        return kinds[present[0]][1](path=path)
    text = Text(path=path)
    first = next(iter(chunks(text.files()[0])), b"")
    separator = "<|endoftext|>"
    return Text(path=path, separator=separator) if separator.encode() in first.splitlines() else text


def existing(path: str) -> Path:
    """The path, if it exists."""
    where = Path(path).expanduser()
    if not where.exists():
        hint = (
            "check the path: was it moved?" if os.path.isabs(path) else "check the path, seen from the current folder"
        )
        raise DataError(f"no such file or folder: {path}; {hint}")
    return where


def ending(path: File) -> str:
    """The ending that determines the format, without that of the compression.

    >>> ending(Path("a/b.JSONL.xz"))
    '.jsonl'
    """
    inner = Path(path.stem).suffix if path.suffix.lower() in COMPRESSED else path.suffix
    return inner.lower()


def walk(folder: Path) -> Iterator[Path]:
    """Every file below the folder, except hidden ones."""
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root) / name for name in files if not name.startswith("."))


def files_of(path: str) -> list[File]:
    """The file itself, every file of a folder, or the matches of a pattern such as `part-*.parquet`, sorted by path;
    the same for a URL."""
    if is_url(path):
        found = [file for file in find_remote(path) if not file.name.startswith(".")]
        if not found:
            raise DataError(f"no such file or folder: {path}, or it holds nothing; check the URL")
        return list(found)
    where = Path(path).expanduser()
    if any(c in path for c in MAGIC) and not where.exists():
        met = [Path(one) for one in sorted(glob.glob(str(where), recursive=True))]
        if not (files := [file for file in met if file.is_file()]):
            raise DataError(f"no file is like {path}; check the pattern, seen from the current folder")
        return list(files)
    if not existing(path).is_dir():
        return [where]
    below = sorted(walk(where), key=lambda file: file.relative_to(where).as_posix())
    return list(below)


def find(path: str, endings: Iterable[str]) -> list[File]:
    """The file itself, whatever its ending; in a folder, a pattern or a URL, the files with these endings."""
    files, wanted = files_of(path), set(endings)
    if len(files) == 1 and PurePosixPath(path).name == files[0].name:
        return files
    files = [file for file in files if ending(file) in wanted and not _written_beside(file)]
    if not files:
        where = path if is_url(path) or any(c in path for c in MAGIC) else f"the folder {path}"
        raise DataError(f"{where} holds no file ending in {' '.join(sorted(wanted))}, plain or compressed")
    return files


def one_split(path: str, files: list[File]) -> list[File]:
    """The files of a folder; refused if their names belong to several splits, which are never meant together.

    >>> one_split("texts", [Path("texts/train.jsonl"), Path("texts/test.jsonl")])
    Traceback (most recent call last):
    unmask.errors.DataError: texts holds several splits (test, train): name the files of one, such as texts/train.jsonl
    """
    if any(c in path for c in MAGIC):  # a pattern is an explicit choice
        return files
    places = dict(reversed([place for file in files if (place := _split_of(path, file))]))
    if len({"valid" if split in HELD_OUT else split for split in places}) > 1:
        named = ", ".join(sorted(places))
        wanted = places.get("train", places[min(places)])
        raise DataError(f"{path} holds several splits ({named}): name the files of one, such as {wanted}")
    return files


def _split_of(path: str, file: File) -> tuple[str, str] | None:
    """The split that a name below the folder indicates (train-00000-of-00002, valid/0), and a pattern for only its
    files."""
    base = path.rstrip("/")
    if isinstance(file, Remote):  # stores spell their URLs differently
        below = _BARE.sub("", file.path).removeprefix(_BARE.sub("", base)).strip("/")
    else:
        below = file.as_posix().removeprefix(Path(base).expanduser().as_posix()).strip("/")
    *folders, name = below.split("/")
    stem, _, endings = name.partition(".")
    if word := _SPLIT.fullmatch(stem):
        alone = name if word[1] == stem else f"{word[1]}*.{endings}"
        return word[1].lower(), "/".join([base, *folders, alone])
    for k, folder in enumerate(folders):
        if word := _SPLIT.fullmatch(folder):
            return word[1].lower(), "/".join([base, *folders[: k + 1], "**"])
    return None


def _written_beside(file: File) -> bool:
    return isinstance(file, Path) and file.name == WRITTEN and any(file.parent.glob("part-*"))


@contextmanager
def opened(file: File) -> Iterator[BinaryIO]:
    """The file's raw bytes, for readers that seek."""
    with _one_line_errors(file), file.open("rb") as raw:
        yield raw


def chunks(path: File) -> Iterator[bytes]:
    """The content in pieces of about a megabyte, decompressed according to the file's ending."""
    with _one_line_errors(path):
        suffix = path.suffix.lower()
        if suffix == ".zst":
            yield from _zst_chunks(path)
            return
        openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
        with path.open("rb") as raw, cast(BinaryIO, openers.get(suffix, lambda raw, mode: raw)(raw, "rb")) as file:
            while chunk := file.read(_CHUNK):
                yield chunk


def _zst_chunks(path: File) -> Iterator[bytes]:
    zstandard = optional("zstandard", "zstandard", "data", f"reading {path.name}")
    # Object by object, not as a stream: the stream reader accepts a truncated file as complete.
    frame = zstandard.ZstdDecompressor().decompressobj()
    begun = False
    with path.open("rb") as file:
        while data := file.read(_CHUNK // 16):  # small pieces, because one byte may decompress to very many
            while data:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                begun = True
                try:
                    text = frame.decompress(data)
                except zstandard.ZstdError as e:
                    raise DataError(f"{path} is damaged: {e}") from None
                if text:
                    yield text
                data = frame.unused_data if frame.eof else b""
    if begun and not frame.eof:
        raise EOFError("the compressed data ends too early")


def text_chunks(path: File) -> Iterator[str]:
    """The file's text in pieces, with its line ends unchanged."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    for chunk in chunks(path):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk)
        except UnicodeDecodeError as e:
            raise _not_utf8(path, f"byte {done - pending + e.start}") from None
        done += len(chunk)
        if text:
            yield text
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _not_utf8(path, "its end, inside a character") from None


def lines(path: File) -> Iterator[tuple[int, str]]:
    """The file's lines without line ends, numbered from 1."""
    number, parts = 0, list[bytes]()
    for chunk in chunks(path):
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            parts.append(piece)
            number += 1
            yield number, _line(path, number, b"".join(parts))
            parts = []
        parts.append(rest)
    if last := b"".join(parts):
        yield number + 1, _line(path, number + 1, last)


def _line(path: File, number: int, line: bytes) -> str:
    try:
        return (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8")
    except UnicodeDecodeError:
        raise _not_utf8(path, f"line {number}") from None


def digest(options: object, files: Iterable[File]) -> str:
    """A hash of the reading options and of the files' content, in order; names and locations do not count.

    For a file at a URL, what its store reports about the content is hashed: tag, or time and size.
    """
    total = hashlib.sha256(json.dumps(options).encode())
    for path in files:
        content = hashlib.sha256()
        if isinstance(path, Remote):  # what the store reports, instead of the whole content over a network
            content.update(path.version().encode())
        else:
            with _one_line_errors(path), path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    content.update(chunk)
        compression = path.suffix.lower() if path.suffix.lower() in COMPRESSED else ""
        total.update(compression.encode() + b"\0" + content.digest())
    return total.hexdigest()


def optional(module: str, package: str, extra: str, what: str) -> ModuleType:
    """Import an optional dependency when it is needed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(package, extra, what) from None


def is_empty(path: str) -> DataError:
    """The error message for a source without documents."""
    return DataError(f"{path} is empty: there is nothing to read in it")


def _not_utf8(path: File, where: str) -> DataError:
    return DataError(f"{path} is not UTF-8 text at {where}; convert it, e.g. with iconv -f latin1 -t utf-8")


@contextmanager
def _one_line_errors(path: File) -> Iterator[None]:
    if isinstance(path, Remote):
        with reaching(path.url):
            yield
        return
    try:
        yield
    except UnmaskError:
        raise
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as e:
        raise DataError(f"{path} is damaged: {e}; fetch it again") from None
    except OSError as e:
        # bz2 reports damage as an OSError without a number.
        raise DataError(f"cannot read {path}: {e.strerror or e}") from None
