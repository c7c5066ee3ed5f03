"""Perplexity: exp of nats per token, by the objective's own bound of -log p, or by its exact value.

Where the number is neither (a pseudo-likelihood) its name is pseudo-perplexity: no column of perplexities holds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unmask.errors import UsageError
from unmask.metrics import Metric
from unmask.registry import check_fields

if TYPE_CHECKING:
    from unmask.data.packing import Rows
    from unmask.distributed.world import World
    from unmask.evaluation.evaluate import Progress
    from unmask.evaluation.measurement import Measurement
    from unmask.model import Model


@dataclass(frozen=True, kw_only=True)
class Perplexity(Metric):
    """estimator: None: the objective's own. max_rows: rows spread evenly over the data; None: all."""

    num_samples: int = 4
    estimator: str | None = None
    max_rows: int | None = None
    batch: int = 16

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("num_samples", "max_rows", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")

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
        from unmask.evaluation.evaluate import evaluate_rows
        from unmask.evaluation.measurement import Measurement

        estimator = self.estimator or model.objective.estimator(model.denoiser)
        bound = evaluate_rows(
            model.denoiser,
            model.objective,
            data,
            seed=seed,
            num_samples=self.num_samples,
            max_rows=self.max_rows,
            batch=self.batch,
            estimator=estimator,
            world=world,
            progress=progress,
        )
        return Measurement(
            name=bound.ppl_name,
            value=bound.ppl,
            ci95=_interval(*bound.ci95),
            n=bound.tokens,
            kind=bound.kind,
            bound=bound,
            protocol={
                "rows": len(bound.tokens_B),
                "tokens": bound.tokens,
                "estimator": estimator,
                "draws_per_row": 1 if model.objective.with_estimator(estimator).one_reading else self.num_samples,
            },
        )


def _interval(lo: float, hi: float) -> tuple[float, float] | None:
    return (math.exp(lo), math.exp(hi)) if math.isfinite(lo) and hi < 700 else None
