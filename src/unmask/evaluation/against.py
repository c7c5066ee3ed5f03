"""Two models on the same texts: how far their likelihoods are apart, paired text by text and draw by draw.

Both are measured with the same rows, keys and draws, so that what makes a text hard, and which of its tokens are
masked, is in both and leaves the difference. Models that spell texts in different tokens see the same only where a row
of each holds the same text; they are compared in bits per byte, since a token of one is not a token of the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import torch

from unmask.data.packing import Rows
from unmask.data.tokenizers import Tokenizer
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.evaluation.evaluate import chosen_rows, with_protocol
from unmask.evaluation.measurement import Measurement
from unmask.evaluation.paired import GAP_SIGN, Interval, gap, seen
from unmask.metrics.perplexity import Perplexity, until_narrow
from unmask.objectives.base import Kind
from unmask.objectives.draws import Draws

if TYPE_CHECKING:
    from unmask.distributed.world import World
    from unmask.evaluation.evaluate import Progress
    from unmask.model import Model

Unit = Literal["nats per token", "bits per byte"]


@dataclass(frozen=True)
class Difference:
    """The first model's value less the second's: below 0 the first one knows the texts better.

    interval: over texts, each with the noise of its own draws. draws_half: how far the 95% interval given the texts
    reaches to each side; 0 where nothing was drawn. kinds: what the two values are.
    """

    unit: Unit
    interval: Interval
    draws_half: float
    kinds: tuple[Kind, Kind]

    @property
    def value(self) -> float:
        return self.interval.value

    @property
    def visible(self) -> bool:
        """Whether it can be told from 0 on texts like these; of other training seeds nothing is known."""
        return seen(self.interval.ci95) == "visible"

    @property
    def sign(self) -> str:
        """How it stands to the difference of what is measured: see `GAP_SIGN`."""
        return GAP_SIGN.get(self.kinds, "≈")

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON, which has neither NaN nor infinity."""
        given = (self.value - self.draws_half, self.value + self.draws_half)
        return {
            "unit": self.unit,
            "sign": self.sign,
            "value": _finite(self.value),
            "ci95": _finite(self.interval.ci95),
            "ci95_given_texts": _finite(given),
            "visible": self.visible,
            "kinds": list(self.kinds),
        }


def difference(ours: Bound, theirs: Bound, unit: Unit, count_B: torch.Tensor | None = None) -> Difference:
    """How far two bounds of the same texts are apart, of the same draws. count_B: the bytes of each text, for bits.

    >>> tokens_B = torch.tensor([1, 1])
    >>> one, two = (Bound(draws_BS=torch.tensor([[x, x + 1], [x, x + 3]]), tokens_B=tokens_B) for x in (2.0, 1.0))
    >>> difference(one, two, "nats per token").summary()["ci95_given_texts"]
    [1.0, 1.0]
    """
    pair = Pair(ours, theirs, unit, count_B)
    scale = _scale(unit)
    nats = {0: ours.nats_B.double() * scale}, {0: theirs.nats_B.double() * scale}
    return Difference(unit, gap(*nats, pair.counts_B), pair.draws_half, pair.kinds)


def unit_of(
    ours: tuple[Rows, Tokenizer], theirs: tuple[Rows, Tokenizer], max_rows: int | None = None
) -> tuple[Unit, torch.Tensor | None]:
    """In what two models can be compared on these rows, with the bytes of each row where it is in bits per byte.

    Rows that do not hold the same are refused with a sentence.

    >>> unit_of((rows, model.tokenizer), (rows, model.tokenizer))  # doctest: +SKIP
    ('nats per token', None)
    """
    (rows, tokenizer), (other_rows, other) = ours, theirs
    same = tokenizer.fingerprint() == other.fingerprint()
    indices, other_indices = chosen_rows(rows, max_rows), chosen_rows(other_rows, max_rows)
    pairs = zip_longest(rows.scored(indices), other_rows.scored(other_indices))
    for number, (x, y) in enumerate(pairs, 1):
        if x is None or y is None:
            equal = False
        elif same:
            equal = x.tolist() == y.tolist()
        else:
            texts = [
                spells.decode([token for token in row.tolist() if token != spells.eot_id])
                for spells, row in ((tokenizer, x), (other, y))
            ]
            equal = texts[0] == texts[1]
        if not equal:
            reason = "the models pad and frame texts differently" if same else "the models' tokens differ"
            raise UsageError(
                f"row {number} does not hold the same text for both models, since {reason}: compare on whole texts "
                "that both windows can hold, with --packing pad"
            )
    if same:
        return "nats per token", None
    return "bits per byte", torch.from_numpy(rows.bytes_of(indices))


@dataclass(frozen=True)
class Other:
    """The model that another one is measured against, with rows of the same texts; see `unit_of`."""

    model: Model
    rows: Rows
    unit: Unit
    count_B: torch.Tensor | None

    @classmethod
    def of(cls, model: Model, rows: Rows, own: tuple[Rows, Tokenizer], max_rows: int | None = None) -> Other:
        """own: the rows that the first model is measured on, and how it spells them. Rows of other texts are refused.

        >>> Other.of(model, rows, (rows, model.tokenizer)).unit  # doctest: +SKIP
        'nats per token'
        """
        unit, count_B = unit_of(own, (rows, model.tokenizer), max_rows)
        return cls(model, rows.classed(model.labels) if model.denoiser.num_classes else rows, unit, count_B)


@dataclass(frozen=True)
class Pair:
    """Two bounds of the same texts and draws, whose difference more draws make narrower. count_B: as in `difference`.

    once: which of the two reads its texts once, with nothing drawn.
    """

    ours: Bound
    theirs: Bound
    unit: Unit = "nats per token"
    count_B: torch.Tensor | None = None
    once: tuple[bool, bool] = (False, False)

    @property
    def difference(self) -> Difference:
        return difference(self.ours, self.theirs, self.unit, self.count_B)

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        kinds = (self.ours.kind, self.theirs.kind)
        if kinds.count("pseudo") == 1:
            raise UsageError("a pseudo-likelihood is no bound: it can be compared with another pseudo-likelihood alone")
        return kinds

    @property
    def counts_B(self) -> torch.Tensor:
        return self.ours.tokens_B if self.count_B is None else self.count_B

    @property
    def draws_half(self) -> float:
        """How far the 95% interval of the difference given the texts reaches to each side."""
        draws_BS = (self.ours.draws_BS.double() - self.theirs.draws_BS.double()) * _scale(self.unit)
        kind: Kind = "exact" if set(self.kinds) == {"exact"} else "upper bound"
        return Bound(draws_BS=draws_BS, tokens_B=self.counts_B, kind=kind).draws_half

    def with_more(self, pair: Pair) -> Pair:
        ours, theirs = self.ours.with_more(pair.ours), self.theirs.with_more(pair.theirs)
        return self._of(ours, theirs)

    def with_larger(self, pair: Pair) -> Pair:
        ours, theirs = self.ours.with_larger(pair.ours), self.theirs.with_larger(pair.theirs)
        return self._of(ours, theirs)

    def _of(self, ours: Bound, theirs: Bound) -> Pair:
        return replace(self, ours=self.ours if self.once[0] else ours, theirs=self.theirs if self.once[1] else theirs)


def metrics_of(models: tuple[Model, Model], metric: Perplexity) -> tuple[Perplexity, Perplexity]:
    """The metric of each: an estimator is of the one that has a bound, where the other has an exact value."""
    exact = [model.objective.kind == "exact" for model in models]
    own = (replace(metric, estimator=None) if known and not all(exact) else metric for known in exact)
    first, second = own
    return first, second


def evaluate_against(
    model: Model,
    rows: Rows,
    other: Other,
    metric: Perplexity,
    *,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
    world: World | None = None,
    progress: Progress | None = None,
) -> tuple[Measurement, Measurement, Difference]:
    """Both models' perplexities on the same rows and draws, and their difference.

    `precision` of the metric is of the difference, in its unit: what the two have in common cancels, so it takes fewer
    draws than two bounds that are each as narrow.

    >>> ours, theirs, apart = evaluate_against(model, rows, Other.of(other, rows, (rows, model.tokenizer)),
    ...     Perplexity(precision=0.01))  # doctest: +SKIP
    >>> apart.visible  # doctest: +SKIP
    True
    """
    how: dict[str, Any] = {"seed": seed, "world": world, "progress": progress}
    rows = rows.classed(model.labels) if model.denoiser.num_classes else rows
    mine, others = metrics_of((model, other.model), metric)
    ours, theirs = mine.reading(model, rows, **how), others.reading(other.model, other.rows, **how)
    once = ours.once, theirs.once
    read: dict[int, Bound] = {}  # of a model of which nothing is drawn, the one time that it reads

    def bound(number: int, draws: Draws) -> Bound:
        reading = (ours, theirs)[number]
        if not reading.once:
            return reading.bound(draws)
        if number not in read:
            read[number] = reading.bound(draws)
        return read[number]

    def measure(draws: Draws) -> Pair:
        return Pair(bound(0, draws), bound(1, draws), other.unit, other.count_B, once)

    if metric.precision is None or all(once):
        draws = Draws.of(metric.num_samples, ours.rows)
        pair = measure(draws)
    else:
        pair, draws = until_narrow(measure, ours.rows, metric.precision, at_least=metric.num_samples)
    apart, of = pair.difference, "the difference"
    first = metric.measured(ours, pair.ours, draws, apart.draws_half, of)
    second = metric.measured(theirs, pair.theirs, draws, apart.draws_half, of)
    kept: dict[str, Any] = {"seed": seed, "about": about or {}}
    return (
        with_protocol(first, mine, model, rows, **kept),
        with_protocol(second, others, other.model, other.rows, **kept),
        apart,
    )


def _scale(unit: Unit) -> float:
    return 1 / math.log(2) if unit == "bits per byte" else 1.0


def _finite(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return list(value) if all(map(math.isfinite, value)) else None
    return value if math.isfinite(value) else None
