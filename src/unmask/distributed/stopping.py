"""Stop requests: signals that ask a process to finish its current step instead of ending it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Treat SIGTERM, SIGUSR1 (SLURM's warning) and the first Ctrl-C as requests: the step is finished and saved.

    A second Ctrl-C interrupts at once.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    signals = [s for name in ("SIGTERM", "SIGINT", "SIGUSR1") if (s := getattr(signal, name, None)) is not None]
    old = {s: signal.getsignal(s) for s in signals}

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for s in old:
        signal.signal(s, ask)
    try:
        yield asked.is_set
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)
