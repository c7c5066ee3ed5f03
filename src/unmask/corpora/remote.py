"""Files behind a URL that fsspec knows (s3://, gs://, hf://, https://, memory://), read as local files are."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from unmask.errors import DataError, MissingExtraError, UnmaskError

MAGIC = "*?["  # what makes a path a pattern


def is_url(path: str) -> bool:
    """Whether it names something behind a protocol.

    >>> is_url("s3://bucket/part-0.parquet"), is_url("data/part-0.parquet"), is_url("C:/data")
    (True, False, False)
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path) is not None


@dataclass(frozen=True)
class Remote:
    """One file behind a URL; it has as much of a Path as readers of corpora need."""

    url: str
    system: Any = field(repr=False, compare=False)  # fsspec's
    path: str = field(repr=False)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.path).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    def open(self, mode: str = "rb") -> BinaryIO:
        return cast(BinaryIO, self.system.open(self.path, mode))

    def version(self) -> str:
        """What the store says of the file's content: its tag or time and size. Nothing of it is read."""
        with reaching(self.url):
            return str(self.system.ukey(self.path))

    def __str__(self) -> str:
        return self.url


def find_remote(url: str) -> list[Remote]:
    """What a URL names: the file, all files below a folder, or those that a pattern meets; in the order of their paths.

    >>> import fsspec
    >>> _ = fsspec.filesystem("memory").pipe({"/a/2.txt": b"two", "/a/1.txt": b"one"})
    >>> [file.name for file in find_remote("memory://a/*.txt")]
    ['1.txt', '2.txt']
    """
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError:
        raise MissingExtraError("fsspec", "data", f"reading {url}") from None
    with reaching(url):
        system, path = core.url_to_fs(url)
        if any(c in path for c in MAGIC):
            paths = [found for found in system.glob(path) if system.isfile(found)]
        else:
            paths = system.find(path) if system.isdir(path) else [path] if system.exists(path) else []
        return [Remote(system.unstrip_protocol(found), system, found) for found in sorted(paths)]


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """What goes wrong on the way there, in one sentence."""
    try:
        yield
    except UnmaskError:
        raise
    except ImportError as e:  # s3fs, gcsfs and the like: fsspec says which
        raise DataError(f"cannot reach {url}: {e}") from None
    except Exception as e:  # each store's client raises what its layers do; none of it is ours to tell apart
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise DataError(f"cannot read {url}: {reason}") from None
