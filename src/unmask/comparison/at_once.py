"""Several trials at once: each is a separate process, so one thread waiting for each is enough here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from unmask.errors import Stopped

T = TypeVar("T")


def run_at_once(items: Iterable[T], run: Callable[[T], None], jobs: int, halted: threading.Event) -> None:
    """Call `run` with each item, `jobs` of them at a time, started in order; the first error is raised.

    The first error sets `halted`: `run` then starts nothing new and ends early, and all calls are awaited. A request to
    stop is raised for all items that it stopped, unless a more serious error occurred.

    >>> done = []
    >>> run_at_once([3, 1, 2], done.append, 1, threading.Event())
    >>> done
    [3, 1, 2]
    """
    if jobs == 1:
        for item in items:
            run(item)
        return
    with ThreadPoolExecutor(jobs, thread_name_prefix="trial") as pool:
        futures: list[Future[None]] = [pool.submit(run, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also reached by a second Ctrl-C
            if not all(future.done() and future.exception() is None for future in futures):
                halted.set()
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, Stopped):
            raise error
    if errors:
        raise Stopped(", ".join(dict.fromkeys(str(error) for error in errors if str(error))))
