"""Files at a URL that fsspec supports (s3://, gs://, hf://, https://, memory://), read like local files."""

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
    """Whether the path is a URL with a protocol.

    >>> is_url("s3://bucket/part-0.parquet"), is_url("data/part-0.parquet"), is_url("C:/data")
    (True, False, False)
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path) is not None


@dataclass(frozen=True)
class Remote:
    """One file at a URL, with the part of Path's interface that readers of corpora need."""

    url: str
    system: Any = field(repr=False, compare=False)  # the fsspec file system
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
        """What the store reports about the file's content: its tag, or time and size. The content is not read."""
        with reaching(self.url):
            return str(self.system.ukey(self.path))

    def __str__(self) -> str:
        return self.url


def find_remote(url: str) -> list[Remote]:
    """The files that a URL names: the file itself, all files below a folder, or those that match a pattern; sorted by
    path.

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
    """Turn errors of access into one sentence."""
    try:
        yield
    except UnmaskError:
        raise
    except ImportError as e:  # a missing s3fs, gcsfs or similar: fsspec names it
        raise DataError(f"cannot reach {url}: {e}") from None
    except Exception as e:  # the stores' clients raise exceptions of many kinds
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise DataError(f"cannot read {url}: {reason}") from None
