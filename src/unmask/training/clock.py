"""How long a run has trained: what bounds are compared by, whatever else the run does between its steps."""

from __future__ import annotations

import time


class Clock:
    """Seconds of training. It stands while the run validates, samples and saves.

    >>> clock = Clock()
    >>> clock.seconds
    0.0
    >>> clock.go()
    >>> clock.stop()
    >>> clock.seconds == clock.seconds > 0
    True
    """

    def __init__(self, before: float = 0.0) -> None:
        self._before = before  # counted already, also by the processes that this one continues
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    def go(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """What a device was handed counts where it is waited for: read its last numbers first."""
        self._before, self._since = self.seconds, None
