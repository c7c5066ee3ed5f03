"""Monitors a training run for non-finite numbers and jumps of the loss."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from unmask.errors import NonFiniteError


class Guard:
    """Checks the numbers of every step.

    A step with non-finite numbers has not changed the weights. It stops the run or, if so configured, is skipped,
    reported and counted.

    >>> guard = Guard("skip", limit=1)
    >>> guard.look(7, math.nan, 1.0, np.arange(4), Path("run"))[0]
    'loss nan at step 7, batch of rows 0, 1, 2, 3: skipped, 1 of at most 1'
    """

    DECAY, WARM_UP, DEVIATIONS = 0.98, 50, 6.0

    def __init__(self, on_nonfinite: Literal["stop", "skip"], limit: int, kept: str = "checkpoints") -> None:
        self.on_nonfinite, self.limit = on_nonfinite, limit
        self.kept = kept  # what the folder holds, for messages
        self.skipped = 0
        self.count, self.mean, self.variance = 0, 0.0, 0.0

    def look(self, step: int, loss: float, grad_norm: float, rows: np.ndarray, folder: Path) -> tuple[str, bool]:
        """The message about the step ("" for none), and whether the step counts."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self._nonfinite(step, loss, grad_norm, rows, folder), False
        return self._spike(step, loss, rows), True

    def _nonfinite(self, step: int, loss: float, grad_norm: float, rows: np.ndarray, folder: Path) -> str:
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm}"
        where = f"{what} at step {step}, batch of rows {_short(rows)}"
        intact = f"the weights are untouched and the {self.kept} in {folder} are intact"
        if self.on_nonfinite == "stop":
            raise NonFiniteError(f"{where}; {intact}: lower optim.lr, or look at the rows")
        self.skipped += 1
        if self.skipped > self.limit:
            raise NonFiniteError(f"{where}, after {self.limit} skipped ones; {intact}: lower optim.lr")
        return f"{where}: skipped, {self.skipped} of at most {self.limit}"

    def _spike(self, step: int, loss: float, rows: np.ndarray) -> str:
        """A message if the loss is far above its running mean; larger losses enter the mean clipped to that limit."""
        self.count += 1
        most = self.mean + self.DEVIATIONS * math.sqrt(self.variance)
        high = self.count > self.WARM_UP and loss > most
        step_size = max(1 - self.DECAY, 1 / self.count)
        away = (most if high else loss) - self.mean
        self.mean += step_size * away
        self.variance = (1 - step_size) * (self.variance + step_size * away**2)
        return f"loss {loss:.4g} at step {step} is far above its mean {self.mean:.4g}: rows {_short(rows)}" * high


def _short(rows: np.ndarray) -> str:
    listed = ", ".join(map(str, rows[:4].tolist()))
    return f"{listed}, … ({len(rows)} in all)" if len(rows) > 4 else listed


@contextlib.contextmanager
def steady_gc() -> Iterator[None]:
    """Disable automatic garbage collection: existing objects are frozen, new ones are freed by reference counting."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
