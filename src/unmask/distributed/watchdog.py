"""Reports which process a hung group is waiting for, and ends the wait."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any


class Watchdog:
    """Each process counts its collective operations and posts the count, which reveals stragglers.

    A collective that hangs cannot be interrupted, so the process ends with a line that says which process is missing.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.count = 0
        self.armed = False  # reading a corpus may take arbitrarily long, steps may not
        self.moved = time.monotonic()
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last post of a rank, and when it was first seen
        self._asked = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unmask-watchdog", daemon=True)

    def tick(self) -> None:
        """Count a collective operation that is about to begin."""
        self.count += 1
        self.moved = time.monotonic()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        every = min(5.0, max(0.2, self.timeout / 10))
        posts = 0
        reached = time.monotonic()
        while not self._stop.wait(every):
            posts += 1
            problem = ""
            try:
                self.store.set(f"unmask/{self.rank}", json.dumps([self.count, posts]))
                reached = time.monotonic()
                if self.armed and reached - self.moved > self.timeout:
                    problem = self._stragglers(3 * every)
            except (RuntimeError, OSError):  # the process that holds the store may be gone, which torchrun handles
                now = time.monotonic()
                if self.armed and now - max(reached, self.moved) > self.timeout:
                    problem = "the process that keeps the group's store cannot be reached"
            if problem:
                sys.stderr.write(f"unmask: rank {self.rank}: no progress for {self.timeout:.0f} s; {problem}\n")
                sys.stderr.flush()
                os._exit(1)

    def _stragglers(self, silence: float) -> str:
        """The processes that are behind this one or have stopped posting; called repeatedly once the group is late."""
        missing = []
        now = time.monotonic()
        for rank in range(self.size):
            key = f"unmask/{rank}"
            if rank == self.rank:
                continue
            if not self.store.check([key]):
                missing.append(f"rank {rank} never came")
                continue
            post = self.store.get(key)
            last, since = self._heard.get(rank, (b"", now))
            if post != last:
                since = now
            self._heard[rank] = (post, since)
            if now - since > silence:
                missing.append(f"rank {rank} is missing and gives no sign of life")
            elif json.loads(post)[0] < self.count and self._asked > 3:
                missing.append(f"rank {rank} is missing, though alive")
        self._asked += 1
        return "; ".join(missing)
