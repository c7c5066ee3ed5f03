"""Start a command in several processes on this machine, as torchrun does, and report one line and one exit code."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from dataclasses import fields
from pathlib import Path
from typing import Any

from unmask.errors import PeerError, Stopped, UsageError

NOTES = "UNMASK_LAUNCH_NOTES"  # the file for a started process's final message


def launch(words: list[str], *, nproc: int, max_restarts: int = 0) -> None:
    """Run `unmask WORDS` in `nproc` processes; return when all are done, or raise the error of the first that failed.

    >>> launch(["train", "demo"], nproc=2)  # doctest: +SKIP
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if nproc < 1 or max_restarts < 0:
        raise UsageError(f"--nproc must be at least 1 and --max-restarts 0 or more, got {nproc} and {max_restarts}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # reported in one line below
    options: dict[str, Any] = {
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "max_restarts": max_restarts,
        "signals_to_handle": "SIGTERM,SIGINT,SIGUSR1",
        "shutdown_timeout": 600,  # a save may take a while
    }
    known = {field.name for field in fields(LaunchConfig)}
    config = LaunchConfig(1, 1, nproc, **{k: v for k, v in options.items() if k in known})
    with tempfile.TemporaryDirectory(prefix="unmask-") as notes, _environment(NOTES, notes):
        try:
            elastic_launch(config, sys.executable)("-m", "unmask", *words)
        except SignalException:
            raise _ending(Path(notes), {}) from None
        except ChildFailedError as e:
            raise _ending(Path(notes), {rank: failure.exitcode for rank, failure in e.failures.items()}) from None


def leave_note(code: int, message: str) -> bool:
    """Leave the final message of a started process for its launcher; False if there is no launcher or it has gone."""
    if NOTES not in os.environ:
        return False
    try:
        Path(os.environ[NOTES], os.environ.get("RANK", "0")).write_text(json.dumps([code, message]), encoding="utf-8")
    except OSError:
        return False
    return True


def _ending(notes: Path, codes: dict[int, int]) -> Exception:
    """The error to report for processes that ended with these exit codes and notes."""
    said: dict[int, tuple[int, str]] = {}
    for path in sorted(notes.iterdir()):
        with contextlib.suppress(ValueError):
            said[int(path.name)] = tuple(json.loads(path.read_text(encoding="utf-8")))
    stopped = [message for code, message in said.values() if code == Stopped.exit_code]
    if stopped and all(code in (0, Stopped.exit_code, -signal.SIGTERM) for code in codes.values()):
        return Stopped(stopped[0])
    # Killed processes are reported first; processes that only lost a peer add nothing.
    for rank, code in sorted(codes.items()):
        if code < 0 and code != -signal.SIGTERM:
            return PeerError(f"rank {rank} was killed by {signal.Signals(-code).name}; the others were ended")
    only_lost = all("another process is gone" in message for _, message in said.values())
    for rank, code in sorted(codes.items()):
        if only_lost and code > 0 and rank not in said:
            return PeerError(f"rank {rank} ended with exit code {code}; see its own message")
    for rank, (code, message) in sorted(said.items(), key=lambda item: "another process is gone" in item[1][1]):
        error = UsageError if code == UsageError.exit_code else PeerError
        return error(message if error is UsageError else f"rank {rank}: {message.removeprefix(f'rank {rank}: ')}")
    if not codes:
        return PeerError("stopped by a signal before the processes had begun; nothing is lost")
    return PeerError(f"rank {min(codes)} ended with exit code {codes[min(codes)]}")


@contextlib.contextmanager
def _environment(name: str, value: str) -> Any:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
