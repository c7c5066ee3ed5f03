"""One writer for a run's folder: a lock that the system releases when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from unmask.distributed.world import World
from unmask.errors import UnmaskError, UsageError
from unmask.storage.atomic import one_line_errors
from unmask.storage.untrusted import printable

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"  # in a run's folder, while a process writes there
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_held: set[int] = set()  # descriptors: a fork's child must not keep a dead parent's lock


@contextlib.contextmanager
def one_writer(folder: Path, world: World) -> Iterator[str]:
    """Hold the lock of the run's folder, or raise an error that names its holder; yields a message, "" for none.

    The first process holds it for all processes. The lock file is removed afterwards, and so is a folder that was
    created only for it.

    >>> import tempfile
    >>> with one_writer(Path(tempfile.mkdtemp()) / "run", World()) as note:
    ...     note
    ''
    """
    locks: list[tuple[int, list[Path]]] = []

    def take() -> str:
        new = [place for place in (folder, *folder.parents) if not place.exists()]
        try:
            with one_line_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                descriptor, note = _take(folder)
        except UnmaskError:
            _remove_empty(new)
            raise
        locks.append((descriptor, new))
        _held.add(descriptor)
        return note

    try:
        yield world.from_first(take)
    finally:
        for descriptor, new in locks:
            with contextlib.suppress(OSError):
                os.unlink(folder / LOCK)  # while it is held: see `_take`
            _held.discard(descriptor)
            os.close(descriptor)
            _remove_empty(new)


def _remove_empty(new: list[Path]) -> None:
    with contextlib.suppress(OSError):  # if the run has begun, they are not empty
        for place in new:
            place.rmdir()


def _take(folder: Path) -> tuple[int, str]:
    path, note = folder / LOCK, ""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _lock(descriptor)
        except BlockingIOError:
            holder = os.read(descriptor, 1000)
            os.close(descriptor)
            raise UsageError(_refusal(folder, holder)) from None
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            note = f"the file system of {folder} has no locks: see to it that no second run writes there"
        # The previous holder may have removed the file after we opened it; the lock would then protect nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)
    now = datetime.datetime.now().astimezone().isoformat(" ", timespec="seconds")
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode())
    except OSError:
        os.unlink(path)
        os.close(descriptor)
        raise
    return descriptor, note


def _lock(descriptor: int) -> None:
    """Take the lock, or raise BlockingIOError immediately if another process has it."""
    if sys.platform == "win32":
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # a byte far from those that name the holder
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            raise BlockingIOError from None
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _refusal(folder: Path, holder: bytes) -> str:
    who = "another process"
    with contextlib.suppress(ValueError, LookupError, TypeError):
        note = json.loads(holder)
        who = f"process {int(note['pid'])} on {printable(note['host'], 80)}, since {printable(note['since'], 40)}"
    return f"{folder} is being written by {who}; wait for it, stop it, or give another --out"


def _let_go() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
