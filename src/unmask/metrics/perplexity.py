"""Perplexity: exp of nats per token, from the objective's own bound of -log p or from the exact value.

Where the number is neither (a pseudo-likelihood) its name is pseudo-perplexity: no column of perplexities holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

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
    from unmask.objectives.draws import Draws

MOST_DRAWS = 4096  # maximum draws per row, for any precision
BELIEVED = (
    30  # degrees of freedom: an interval from fewer is narrow by chance now and then, and stops the draws too soon
)


class Estimate(Protocol):
    """What further draws make more precise: a bound, or a difference of two."""

    @property
    def draws_half(self) -> float: ...

    def with_more(self, other: Self) -> Self: ...

    def with_larger(self, other: Self) -> Self: ...


E = TypeVar("E", bound=Estimate)


@dataclass(frozen=True)
class Reading:
    """Rows as a model reads them: their number, the estimator, and their bound for any draws. once: nothing
    is drawn."""

    rows: int
    estimator: str
    once: bool
    bound: Callable[[Draws], Bound]


@dataclass(frozen=True, kw_only=True)
class Perplexity(Metric):
    """estimator: None: the objective's own. max_rows: rows spread evenly over the data; None: all.

    precision: draw until the half-width of the 95% interval of nats per token given the texts is at most this; starts
    with num_samples draws, or 8 if that is less. See `until_narrow`.
    """

    best_is: ClassVar[Literal["least", "most"]] = "least"

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
        """The perplexity; `Measurement.bound` also has nats per token and bits per byte.

        world: several processes share the batches, and each receives the same value as a single process would.
        """
        from unmask.objectives.draws import Draws

        reading = self.reading(model, data, seed=seed, world=world, progress=progress)
        draws = Draws.of(self.num_samples, reading.rows)
        if self.precision is None or reading.once:
            bound = reading.bound(draws)
        else:
            bound, draws = until_narrow(reading.bound, reading.rows, self.precision, at_least=self.num_samples)
        return self.measured(reading, bound, draws, bound.draws_half)

    def reading(
        self, model: Model, data: Rows, *, seed: int, world: World | None = None, progress: Progress | None = None
    ) -> Reading:
        """What this metric measures of a model on rows, before the number of draws is known."""
        from unmask.evaluation.by_text import text_numbers
        from unmask.evaluation.evaluate import chosen_rows, evaluate_rows

        estimator = self.estimator or model.objective.estimator(model.denoiser)
        how: dict[str, Any] = {"max_rows": self.max_rows, "batch": self.batch, "estimator": estimator}
        how |= {"world": world, "progress": progress, "seed": seed}

        def bound(draws: Draws) -> Bound:
            found = evaluate_rows(model.denoiser, model.objective, data, num_samples=draws, **how)
            return replace(found, of_B=of_B)

        indices = chosen_rows(data, self.max_rows)
        of_B = text_numbers(data, model.tokenizer, indices)
        return Reading(len(indices), estimator, model.objective.with_estimator(estimator).one_reading, bound)

    def measured(self, reading: Reading, bound: Bound, draws: Draws, half: float, of: str = "") -> Measurement:
        """The perplexity from these draws. half: the half-width that `precision` limits, if it is not the bound's own:
        that `of`."""
        drawn = 1 if reading.once else draws.num
        about: dict[str, Any] = {"rows": reading.rows, "estimator": reading.estimator, "draws_per_row": drawn}
        if self.precision is not None:
            reached = half <= self.precision or (reading.once and not of)
            about |= {"precision": self.precision} | ({"precision_of": of} if of else {})
            about |= {"precision_reached": reached}
        return measured_of(bound, about)


def until_narrow(measure: Callable[[Draws], E], rows: int, precision: float, *, at_least: int = 8) -> tuple[E, Draws]:
    """Draw until the interval given the texts is narrow enough; returns the bound (or other estimate) and its draws.

    Draws form as few groups as allow a reliable estimate of their spread, because fewer groups are larger: two if there
    are many rows. Groups double while that helps most, keeping the existing draws; then further groups are added as
    needed.
    """
    from unmask.objectives.draws import LARGEST, Draws

    groups, size = max(2, 1 + math.ceil(BELIEVED / rows)), 1
    while size < LARGEST and groups * size < max(8, at_least):
        size *= 2
    draws = Draws(max(groups, math.ceil(at_least / size)), size)
    bound = measure(draws)
    while precision < bound.draws_half < math.inf and draws.num < MOST_DRAWS:  # an infinite value does not improve
        if draws.size < LARGEST:
            draws = draws.doubled()
            bound = bound.with_larger(measure(draws))
        else:
            due = math.ceil(min(2.0, (bound.draws_half / precision) ** 2) * draws.groups)
            draws = draws.joined_by(max(1, due - draws.groups))
            bound = bound.with_more(measure(draws))
    return bound, draws


def measured_of(bound: Bound, protocol: Mapping[str, Any]) -> Measurement:
    """The perplexity of a bound, named according to its kind."""
    from unmask.evaluation.by_text import said
    from unmask.evaluation.measurement import Measurement

    return Measurement(
        name=bound.ppl_name,
        value=bound.ppl,
        ci95=_interval(*bound.ci95),
        n=bound.tokens,
        kind=bound.kind,
        bound=bound,
        protocol={"tokens": bound.tokens, "interval": said(bound.of_B, len(bound.tokens_B)), **protocol},
    )


def _interval(lo: float, hi: float) -> tuple[float, float] | None:
    return (math.exp(lo), math.exp(hi)) if math.isfinite(lo) and hi < 700 else None
