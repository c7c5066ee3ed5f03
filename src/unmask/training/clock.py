"""The training time of a run, by which bounds are compared, without everything else that the run does."""

from __future__ import annotations

import time


class Clock:
    """Counts seconds of training; it is stopped while the run validates, samples and saves.

    >>> clock = Clock()
    >>> clock.seconds
    0.0
    >>> clock.go()
    >>> clock.stop()
    >>> clock.seconds == clock.seconds > 0
    True
    """

    def __init__(self, before: float = 0.0) -> None:
        self._before = before  # counted before, including the runs that this one resumes
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    def go(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop counting. Queued device work counts only if it is waited for, so read the last step's numbers first."""
        self._before, self._since = self.seconds, None
