"""Atomic writing of files and folders: they appear complete or not at all.

A writer works in `.NAME.tmp-PID-RANDOM`, syncs it, and renames it into place. An existing folder of that name is first
moved to `.NAME.old-PID-RANDOM`; if the writer is killed between the two renames, readers find the old folder there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from unmask.errors import UnmaskError, UsageError

_LEFT_BEHIND = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<pid>\d+)-[0-9a-f]{8}")
# What this process is writing now. A folder with our process id that is not among them was left by a dead process
# with
# the same id, which is common in containers.
_writing: set[str] = set()
_CHUNK = 1 << 24  # bytes per write call: large enough to be fast, small enough to notice a kill or a full disk soon


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A temporary folder that replaces `final` when the block succeeds, and is removed when it fails.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp()) / "model"
    >>> with atomic_folder(out) as folder:
    ...     _ = (folder / "config.json").write_text("{}")
    >>> [file.name for file in out.iterdir()]
    ['config.json']
    """
    final = Path(final).resolve()  # a link to a folder on another disk stays a link
    if final.exists() and not final.is_dir():
        raise UsageError(f"{final} is a file; give the name of a folder")
    temp = sibling(final, "tmp")
    _writing.add(temp.name)
    try:
        with one_line_errors(final):
            new = [place for place in (final.parent, *final.parent.parents) if not place.exists()]
            final.parent.mkdir(parents=True, exist_ok=True)
            for place in new:  # a folder is only as durable as its entry in its parent folder
                sync(place.parent)
            clean(final.parent, final.name)
            temp.mkdir()
            yield temp
            _sync_tree(temp)
            _swap(temp, final)
    finally:
        shutil.rmtree(temp, ignore_errors=True)  # already gone if all went well
        _writing.discard(temp.name)


def atomic_text(final: Path, text: str) -> None:
    """Write a small file atomically.

    >>> import tempfile
    >>> atomic_text(Path(tempfile.mkdtemp()) / "best", "step-00000250")
    """
    with atomic_file(final) as temp:
        write_file(temp, [text.encode("utf-8")])


@contextlib.contextmanager
def atomic_file(final: Path) -> Iterator[Path]:
    """A temporary path whose file replaces `final` when the block succeeds, and is removed when it fails.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with atomic_file(out) as new:
    ...     _ = new.write_text("whole")
    >>> out.read_text()
    'whole'
    """
    temp = sibling(final, "tmp")
    _writing.add(temp.name)
    try:
        with one_line_errors(final):
            clean(final.parent, final.name)
            yield temp
            sync(temp)
            os.replace(temp, final)
            sync(final.parent)
    finally:
        temp.unlink(missing_ok=True)
        _writing.discard(temp.name)


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file; returns its size and SHA-256, computed from the intended bytes rather than read back.

    >>> import tempfile
    >>> size, digest = write_file(Path(tempfile.mkdtemp()) / "state.json", [b"{", b"}"])
    >>> size, digest[:8]
    (2, '44136fa3')
    """
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                written = os.write(descriptor, rest[:_CHUNK])  # may write less than all of it
                if not written:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
                digest.update(rest[:written])
                size, rest = size + written, rest[written:]
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


def check_space(final: Path, needed: int) -> None:
    """Refuse to start writing more than the disk can hold.

    >>> check_space(Path("."), 1)
    """
    place = final.resolve()
    while not place.is_dir():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UnmaskError(
            f"disk full: {final} needs {needed:,} bytes and {free:,} are free; free space and run again; "
            "what is there is intact"
        )


def find_folder(final: Path) -> Path:
    """`final`, or the place where its previous version is if its writer was killed while replacing it.

    Changes nothing.

    >>> find_folder(Path("no/such/folder"))
    PosixPath('no/such/folder')
    """
    if final.exists() or not final.parent.is_dir():
        return final
    aside = [
        path for path, match in left_behind(final.parent) if match["name"] == final.name and match["kind"] == "old"
    ]
    return max(aside, key=lambda path: path.stat().st_mtime, default=final)


def sibling(final: Path, kind: str) -> Path:
    return final.with_name(f".{final.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


def _swap(temp: Path, final: Path) -> None:
    aside = sibling(final, "old")
    moved: list[tuple[Path, Path]] = []
    _writing.add(aside.name)
    try:
        for source, target in ((final, aside), (temp, final)):
            if source.exists():
                os.rename(source, target)
                moved.append((source, target))
        sync(final.parent)
    except BaseException:
        for source, target in reversed(moved):
            os.rename(target, source)
        raise
    finally:
        _writing.discard(aside.name)
    shutil.rmtree(aside, ignore_errors=True)  # only after the new one is durable


def sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for here, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(here, name))
        sync(Path(here))


@contextlib.contextmanager
def one_line_errors(final: Path) -> Iterator[None]:
    """Turn system errors on a file being written into one line that also says what happened to the file.

    >>> with one_line_errors(Path("runs/a")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    unmask.errors.UnmaskError: disk full while writing runs/a; free space and run again; nothing was left behind
    """
    previous = f"the previous {final.name} is intact" if final.exists() else "nothing was left behind"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UnmaskError(f"disk full while writing {final}; free space and run again; {previous}") from error
        raise UnmaskError(f"cannot write {final}: {error.strerror or error}; {previous}") from error


def left_behind(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    """Temporary files and folders of writers, alive or dead."""
    matches = ((path, _LEFT_BEHIND.fullmatch(path.name)) for path in sorted(folder.iterdir()))
    return [(path, match) for path, match in matches if match is not None]


def clean(folder: Path, name: str | None = None) -> None:
    """Complete or remove what dead writers left, for one name or for all."""
    for path, match in left_behind(folder):
        if (name is not None and match["name"] != name) or _is_live(path.name, int(match["pid"])):
            continue
        final = folder / match["name"]
        if match["kind"] == "old" and not final.exists():
            os.rename(path, final)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_live(name: str, pid: int) -> bool:
    if pid == os.getpid():
        return name in _writing
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
