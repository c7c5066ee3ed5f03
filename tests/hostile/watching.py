"""Watches what Python does while a stranger's folder is read: what is opened, imported, executed or unpickled."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unmask.storage.tensor_file

# What reading a folder has no business doing, whatever the folder says.
FORBIDDEN = (
    "exec",
    "compile",
    "import",
    "pickle.",
    "marshal.",
    "subprocess.",
    "socket.",
    "urllib.",
    "ctypes.",
    "shutil.",
)
FORBIDDEN += ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.remove", "os.rename", "os.mkdir")
FORBIDDEN += ("os.symlink", "os.link", "os.chmod", "os.truncate", "os.putenv", "builtins.input")

_heard: list[tuple[str, tuple[Any, ...]]] | None = None
_hooked = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _heard is None or not (event == "open" or event.startswith(FORBIDDEN)):
        return
    caller = sys._getframe(1)
    if event in ("compile", "exec") and caller.f_code.co_filename == typing.__file__:
        return  # the annotations of our own dataclasses are text, which typing evaluates
    _heard.append((event, args))


@contextlib.contextmanager
def watched(folder: Path, seconds: int = 20, most_bytes: float = 300e6) -> Iterator[None]:
    """Nothing but the folder's own files is opened, nothing is executed, and it costs little time and memory."""
    global _heard, _hooked
    if not _hooked:
        sys.addaudithook(_hook)  # for good: there is no way to take one away
        _hooked = True
    real = unmask.storage.tensor_file.safe_open

    def noted(path: Any, **options: Any) -> Any:  # opens below Python, where no hook hears it
        if _heard is not None:
            _heard.append(("open", (path, "r", 0)))
        return real(path, **options)

    def too_long(*_: object) -> None:
        raise TimeoutError(f"{folder} took more than {seconds} seconds")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    unmask.storage.tensor_file.safe_open = noted  # type: ignore[assignment]
    _heard = heard = []
    try:
        yield
    finally:
        _heard = None
        unmask.storage.tensor_file.safe_open = real
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    inside = str(folder.resolve()) + os.sep
    for event, args in heard:
        if event != "open":
            pytest.fail(f"{event}{args}"[:300])
        assert not isinstance(args[0], int), args
        place = os.path.realpath(os.fsdecode(args[0]))
        assert place.startswith(inside), f"opened {place}"
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < most_bytes
