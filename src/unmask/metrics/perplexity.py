"""Perplexity: exp of nats per token, by the objective's own bound of -log p, or by its exact value.

Where the number is neither (a pseudo-likelihood) its name is pseudo-perplexity: no column of perplexities holds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unmask.errors import UsageError
from unmask.metrics import Metric
from unmask.registry import check_fields

if TYPE_CHECKING:
    from unmask.data.packing import Rows
    from unmask.distributed.world import World
    from unmask.evaluation.bound import Bound
    from unmask.evaluation.evaluate import Progress
    from unmask.evaluation.measurement import Measurement
    from unmask.model import Model

MOST_DRAWS = 4096  # of a row, however fine a precision is asked for
BELIEVED = 30  # degrees of freedom


@dataclass(frozen=True, kw_only=True)
class Perplexity(Metric):
    """estimator: None: the objective's own. max_rows: rows spread evenly over the data; None: all.

    precision: draws go on, twice as many each time, until the 95% interval of nats per token given the texts reaches no
    farther than this to each side; num_samples is what it begins with.
    """

    num_samples: int = 4
    precision: float | None = None
    estimator: str | None = None
    max_rows: int | None = None
    batch: int = 16

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("num_samples", "max_rows", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.precision is not None and not 0 < self.precision < math.inf:
            raise UsageError(f"precision is in nats per token, above 0; got {self.precision}")

    def measure(
        self,
        model: Model,
        data: Rows,
        *,
        seed: int,
        world: World | None = None,
        progress: Progress | None = None,
    ) -> Measurement:
        """The perplexity; `Measurement.bound` has nats per token and bits per byte, too.

        world: several processes share the batches, and each gets the number that one process gives.
        """
        from unmask.evaluation.bound import more_draws
        from unmask.evaluation.evaluate import evaluate_rows

        estimator = self.estimator or model.objective.estimator(model.denoiser)
        how: dict[str, Any] = {"max_rows": self.max_rows, "batch": self.batch, "estimator": estimator}
        how |= {"world": world, "progress": progress}
        draws = self.num_samples if self.precision is None else max(8, self.num_samples)
        bound = evaluate_rows(model.denoiser, model.objective, data, seed=seed, num_samples=draws, **how)
        one_reading = model.objective.with_estimator(estimator).one_reading
        while self.precision is not None and not one_reading and draws < MOST_DRAWS and self._wide(bound):
            other = seed + (draws << 64)  # seeds are of any size: no seed that a user gives meets it
            more = evaluate_rows(model.denoiser, model.objective, data, seed=other, num_samples=draws, **how)
            bound, draws = more_draws(bound, more), 2 * draws
        about = {"rows": len(bound.tokens_B), "estimator": estimator, "draws_per_row": 1 if one_reading else draws}
        if self.precision is not None:
            about |= {"precision": self.precision, "precision_reached": one_reading or not self._wide(bound)}
        return measured_of(bound, about)

    def _wide(self, bound: Bound) -> bool:
        assert self.precision is not None
        rows, columns = bound.draws_BS.shape
        lo, hi = bound.draws_ci95
        # An interval from a few numbers is narrow by chance now and then: who stops there stops too soon.
        return rows * (columns - 1) < BELIEVED or not (hi - lo) / 2 <= self.precision


def measured_of(bound: Bound, protocol: Mapping[str, Any]) -> Measurement:
    """The perplexity of a bound, called what it is."""
    from unmask.evaluation.measurement import Measurement

    return Measurement(
        name=bound.ppl_name,
        value=bound.ppl,
        ci95=_interval(*bound.ci95),
        n=bound.tokens,
        kind=bound.kind,
        bound=bound,
        protocol={"tokens": bound.tokens, **protocol},
    )


def _interval(lo: float, hi: float) -> tuple[float, float] | None:
    return (math.exp(lo), math.exp(hi)) if math.isfinite(lo) and hi < 700 else None
