"""Mutual exclusion in order of arrival, for threads that share the work."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A fair lock: whoever releases it cannot take it again before those who already wait.

    >>> turns = Turns()
    >>> with turns:
    ...     turns.give_way()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._line: deque[threading.Event] = deque()

    def acquire(self) -> None:
        """Wait for the lock."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._line.append(mine)
        mine.wait()  # the releasing thread hands it over

    def release(self) -> None:
        """Release it to the thread that has waited longest."""
        with self._lock:
            if self._line:
                self._line.popleft().set()
            else:
                self._taken = False

    def give_way(self) -> None:
        """Let those who wait go first, then wait after them."""
        with self._lock:
            nobody = not self._line
        if not nobody:
            self.release()
            self.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
