"""The source code of the running Python's standard library: a real corpus that needs no download."""

from __future__ import annotations

import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unmask.corpora import Corpus, Document
from unmask.errors import DataError, UsageError

# Not the library itself: installed packages, its tests, two programs. Also no generated tables: many codecs come from
# one template would be held out and trained on at once, and make the validation look better than it is.
SKIPPED = frozenset(
    (
        *("site-packages", "dist-packages", "__pycache__", "lib-dynload"),
        *("test", "tests", "idle_test", "idlelib", "lib2to3"),
        *("encodings", "pydoc_data"),
    )
)


@dataclass(frozen=True, kw_only=True)
class Stdlib(Corpus):
    """Every module of the standard library, one document a file; files beyond `limit_mb` megabytes are left out.

    >>> next(Stdlib(limit_mb=0.1).documents()).text.startswith(("#", '"', "import", "from"))
    True
    """

    limit_mb: float | None = None

    def __post_init__(self) -> None:
        if self.limit_mb is not None and not self.limit_mb > 0:
            raise UsageError(f"limit_mb must be more than 0, got {self.limit_mb}")

    def documents(self) -> Iterator[Document]:
        left = float("inf") if self.limit_mb is None else self.limit_mb * 1e6
        any_documents = False
        for path in _sources():
            text = _source(path)
            size = len(text.encode("utf-8"))
            if not 0 < size <= left:
                continue
            left -= size
            any_documents = True
            yield Document(text)
        if not any_documents:
            raise DataError(
                f"no standard library source under {_folder()}"
                + (f" within limit_mb {self.limit_mb}; raise it" if self.limit_mb else "; use another corpus")
            )

    def fingerprint(self) -> str:
        total = hashlib.sha256(b"stdlib")
        for document in self.documents():
            total.update(hashlib.sha256(document.text.encode("utf-8")).digest())
        return total.hexdigest()


def _folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _sources() -> list[Path]:
    paths = []
    for root, folders, files in os.walk(_folder()):
        folders[:] = [name for name in folders if name not in SKIPPED]
        paths += [Path(root) / name for name in files if name.endswith(".py")]
    return sorted(paths, key=lambda path: path.relative_to(_folder()).as_posix())


def _source(path: Path) -> str:
    """The file's text in its declared encoding; empty if it cannot be read (a few are invalid on purpose)."""
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
        text.encode("utf-8")
    except (OSError, SyntaxError, UnicodeError):
        return ""
    return text
