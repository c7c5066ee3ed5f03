"""Folders that are created atomically, and built only once however many processes need them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unmask.errors import DataError

_EDGE = 1 << 20


def default_cache_dir() -> Path:
    """The cache folder: `UNMASK_CACHE`, otherwise `unmask` in the user's cache folder."""
    if folder := os.environ.get("UNMASK_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "unmask"
    except RuntimeError:
        raise DataError("no home folder to keep the token cache in; set data.cache or UNMASK_CACHE") from None


def cached(folder: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The manifest of folder/key; `build` creates the folder if it is missing or damaged.

    `build` writes files into the folder that it receives and returns the manifest; sizes and checksums are added to it.

    >>> cached(Path("cache"), "abc", lambda tmp: {"made": (tmp / "x").write_text("hi")})["made"]  # doctest: +SKIP
    2
    """
    final = folder / key
    if (manifest := _intact(final)) is not None:
        return manifest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{key}.lock") as alone:
            if (manifest := _intact(final)) is not None:  # another process built it while we waited
                return manifest
            if alone:
                for stale in folder.glob(f".{key}-*"):  # left by a killed builder: we hold the lock, so none is active
                    shutil.rmtree(stale, ignore_errors=True)
            return _build(final, build)
    except OSError as e:
        raise DataError(
            f"cannot write the token cache in {folder}: {e.strerror or e}; free space there or set data.cache"
        ) from None


def _build(final: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    work = final.parent / f".{final.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        work.mkdir()
        manifest = build(work)
        manifest["files"] = {path.name: _check(path) for path in sorted(work.iterdir())}
        text = json.dumps(manifest)
        (work / "manifest.json").write_text(text, encoding="utf-8")
        for path in work.iterdir():
            _sync(path)
        _sync(work)
        _install(work, final)
        _sync(final.parent)
        return dict(json.loads(text))  # exactly what a later reader gets, types included
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _install(work: Path, final: Path) -> None:
    """Rename into place; if an intact folder exists there by now (no lock on this file system), it is kept."""
    for _ in range(10):
        try:
            work.rename(final)
            return
        except OSError:
            if not final.exists():
                raise
            if _intact(final) is not None:
                return
            grave = final.parent / f".{final.name}-{os.getpid()}-{secrets.token_hex(4)}"
            with suppress(FileNotFoundError):
                final.rename(grave)  # moved away first, so that nobody sees it half removed
            if grave.is_dir():
                shutil.rmtree(grave, ignore_errors=True)
            else:
                grave.unlink(missing_ok=True)
    raise DataError(f"cannot put the token cache {final} in place: others keep changing it; set data.cache")


def _intact(final: Path) -> dict[str, Any] | None:
    """The manifest, if every file that it lists exists with its size and checksum."""
    try:
        manifest = json.loads((final / "manifest.json").read_text(encoding="utf-8"))
        files = manifest["files"]
        return manifest if all(_check(final / name) == check for name, check in files.items()) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _check(path: Path) -> list[int]:
    """Size, and a checksum of both ends: detects truncated and lost writes, at little cost even for large files."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_EDGE)
        file.seek(max(0, size - _EDGE))
        return [size, zlib.crc32(file.read(_EDGE), zlib.crc32(head))]


def _sync(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        if path.is_dir():
            return  # Windows cannot open folders, and they need no sync there
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold a lock that the kernel releases when its holder dies; False without lock support, where builders may
    collide."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:  # some network file systems
            os.close(handle)
            yield False
            return
        # The previous holder removed the file that it had locked: a lock on that file excludes nobody who comes
        # later.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
