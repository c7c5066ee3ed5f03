"""What a callback may see of the run it belongs to, and ask of it."""

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
}  # what else stands in metrics.jsonl under a name of its own


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
        """Steps done. On a GPU the newest report may be of the step before."""
        return self._run.step

    @property
    def train_seconds(self) -> float:
        """Seconds that the run has trained, also before it was resumed: validating, sampling and saving not counted."""
        return self._run.clock.seconds

    @property
    def config(self) -> RunConfig:
        """What is run; frozen."""
        return self._run.config

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest number under each name: those of steps, `valid_...` of validations, and what callbacks log."""
        return MappingProxyType(self._run.metrics)

    def model(self) -> Model:
        """A model with the weights as they are now: a copy, which stays as it is while the run goes on."""
        return self._run.copied_model(averaged=False)

    def averaged(self) -> Model:
        """`model` with the averaged weights, those that are validated and saved; without averaging the same as it."""
        return self._run.copied_model(averaged=True)

    def stop(self, reason: str) -> None:
        """End the run after this step as if it had been its last: validated, saved, and no error.

        On several processes it is the step after. `--resume` goes on to the steps that the recipe asks for.
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
    """Whether a metric's value is better than the best so far; none, and one that is not finite, never is.

    >>> is_better(1.0, math.inf, "least"), is_better(math.nan, math.inf, "least"), is_better(2.0, 1.0, "most")
    (True, False, True)
    """
    if value is None or not math.isfinite(value):
        return False
    return value < best if best_is == "least" else value > best
