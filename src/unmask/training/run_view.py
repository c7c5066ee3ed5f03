"""What a callback may read of its run, and request from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.config import RunConfig
    from unmask.model import Model
    from unmask.training.callbacks import Callback
    from unmask.training.state import RunState

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{0,99}")
_OWN = {
    "step",
    "note",
    "sample",
    "prompt",
    "label",
    "train_seconds",
}  # other names that are used in metrics.jsonl


class RunView:
    """A run as its callbacks see it, passed to `Callback.on_run`; its attributes cannot be set.

    Callbacks are called by the first process only, so no method does anything that requires all processes.

    >>> from unmask import Callback
    >>> class Patience(Callback):
    ...     def on_run(self, run):
    ...         self.run, self.best, self.waited = run, float("inf"), 0
    ...     def on_valid(self, step, bound):
    ...         self.waited = 0 if bound.nats_per_token < self.best else self.waited + 1
    ...         self.best = min(self.best, bound.nats_per_token)
    ...         self.run.log("waited", self.waited)
    ...         if self.waited == 3:
    ...             self.run.stop("no better for three validations")
    """

    def __init__(self, run: RunState, tell: Callback) -> None:
        self._run, self._tell = run, tell

    @property
    def step(self) -> int:
        """Steps done. On a GPU the newest report may be that of the previous step."""
        return self._run.step

    @property
    def train_seconds(self) -> float:
        """Seconds of training, including those before a resume, without validation, sampling and saving."""
        return self._run.clock.seconds

    @property
    def config(self) -> RunConfig:
        """The run's configuration; frozen."""
        return self._run.config

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest value of each metric: those of steps, `valid_...` of validations, and those that callbacks log."""
        return MappingProxyType(self._run.metrics)

    def model(self) -> Model:
        """A model with a copy of the current weights, which does not change while the run continues."""
        return self._run.copied_model(averaged=False)

    def averaged(self) -> Model:
        """`model` with the averaged weights, which are validated and saved; without averaging, the same as `model`."""
        return self._run.copied_model(averaged=True)

    def stop(self, reason: str) -> None:
        """End the run after this step as if it were the last: it is validated and saved, and no error is raised.

        On several processes the run ends one step later. `--resume` continues to the recipe's number of steps.
        """
        self._run.end_reason = self._run.end_reason or str(reason)

    def log(self, name: str, value: float) -> None:
        """Add a number to the metrics: all loggers get it, and the recipe's `best` can name it."""
        metrics = self._run.metrics
        own = name in _OWN or name.startswith("valid_") or (name in metrics and name not in self._run.logged)
        if own or not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot name a metric: use letters, digits and _, and no name of the run's own")
        number = float(value)
        self._run.logged.add(name)
        metrics[name] = number
        self._tell.on_log(self._run.step, name, number)


def is_better(value: float | None, best: float, best_is: str) -> bool:
    """Whether a metric's value is better than the best so far; None and non-finite values never are.

    >>> is_better(1.0, math.inf, "least"), is_better(math.nan, math.inf, "least"), is_better(2.0, 1.0, "most")
    (True, False, True)
    """
    if value is None or not math.isfinite(value):
        return False
    return value < best if best_is == "least" else value > best
