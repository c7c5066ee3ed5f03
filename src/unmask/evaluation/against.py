"""Two models on the same texts: the difference of their likelihoods, paired by text and by draw.

Both are measured with the same rows, keys and draws. So the difficulty of a text and the choice of masked tokens affect
both and cancel in the difference. Models with different tokenizers are paired where a row of each holds the same text.
They are compared in bits per byte, because their tokens are not comparable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import torch

from unmask.data.packing import Rows
from unmask.data.rows import Ints
from unmask.data.tokenizers import Tokenizer
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.evaluation.by_text import summed, text_numbers
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
    """The first model's value minus the second's: below 0 the first model is better.

    interval: over texts, including the noise of each text's draws. draws_half: half-width of the 95% interval given the
    texts; 0 if nothing is drawn, NaN after a single draw. kinds: what the two values are. note: a sentence on anything
    else in which the two measurements differ.
    """

    unit: Unit
    interval: Interval
    draws_half: float
    kinds: tuple[Kind, Kind]
    note: str = ""

    @property
    def value(self) -> float:
        return self.interval.value

    @property
    def visible(self) -> bool:
        """Whether the difference can be told from 0 on texts like these; it says nothing about other training seeds."""
        return seen(self.interval.ci95) == "visible"

    @property
    def sign(self) -> str:
        """How the value relates to the difference of the measured quantities: see `GAP_SIGN`."""
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
        } | ({"note": self.note} if self.note else {})


def difference(ours: Bound, theirs: Bound, unit: Unit, count_B: torch.Tensor | None = None) -> Difference:
    """The difference of two bounds of the same texts with the same draws. count_B: the bytes of each text, for bits.

    >>> tokens_B = torch.tensor([1, 1])
    >>> one, two = (Bound(draws_BS=torch.tensor([[x, x + 1], [x, x + 3]]), tokens_B=tokens_B) for x in (2.0, 1.0))
    >>> difference(one, two, "nats per token").summary()["ci95_given_texts"]
    [1.0, 1.0]
    """
    return Pair(ours, theirs, Shared(unit, count_B)).difference


@dataclass(frozen=True)
class Shared:
    """What rows of two models have in common, and the unit for comparing them.

    count_B: the bytes of each text, for bits. texts: if a text may span several rows, the text number of each row, for
    each of the two models. note: see `Difference`.
    """

    unit: Unit = "nats per token"
    count_B: torch.Tensor | None = None
    texts: tuple[torch.Tensor, torch.Tensor] | None = None
    note: str = ""


def shared_by(ours: tuple[Rows, Tokenizer], theirs: tuple[Rows, Tokenizer], max_rows: int | None = None) -> Shared:
    """How two models can be compared on these rows: row by row, or text by text if their tokens differ.

    Rows that do not hold the same texts are refused.

    >>> shared_by((rows, model.tokenizer), (rows, model.tokenizer)).unit  # doctest: +SKIP
    'nats per token'
    """
    (rows, tokenizer), (other_rows, other) = ours, theirs
    indices, other_indices = chosen_rows(rows, max_rows), chosen_rows(other_rows, max_rows)
    if tokenizer.fingerprint() == other.fingerprint():
        pairs = zip_longest(rows.scored(indices), other_rows.scored(other_indices))
        for number, (x, y) in enumerate(pairs, 1):
            if x is None or y is None or x.tolist() != y.tolist():
                raise _unlike(f"row {number}", "the models pad and frame texts differently", rows)
        of_B = text_numbers(rows, tokenizer, indices)
        return Shared() if of_B is None else Shared(texts=(of_B, of_B))
    of_B, other_of_B = _texts_of(_Parts(rows, tokenizer, indices), _Parts(other_rows, other, other_indices))
    count = torch.from_numpy(rows.bytes_of(indices))
    count_B = torch.zeros(int(of_B.max()) + 1, dtype=count.dtype).index_add(0, of_B, count)
    return Shared("bits per byte", count_B, (of_B, other_of_B), _ends_note(tokenizer, other))


def _unlike(what: str, reason: str, rows: Rows) -> UsageError:
    hint = "compare on whole texts that both windows can hold, "
    hint += "with --packing pad" if rows.report.policy != "pad" else "all of them, or in longer rows (--length)"
    return UsageError(f"{what} is not the same for both models, since {reason}: {hint}")


def _ends_note(tokenizer: Tokenizer, other: Tokenizer) -> str:
    if tokenizer.ends_texts == other.ends_texts:
        return ""
    ends, none = ("first", "second") if tokenizer.ends_texts else ("second", "first")
    return f"Of the {ends} model the end of a text is a token that counts, of the {none} one it is not"


class _Parts:
    """The rows of a set as parts, each a text or the beginning of one: its tokens, its rows and its bytes.

    open: whether a text may end in any part. Rows of whole texts end in end-of-text if the vocabulary learns one.
    """

    def __init__(self, rows: Rows, tokenizer: Tokenizer, indices: Ints) -> None:
        self.rows, self.tokenizer = rows, tokenizer
        whole = rows.report.policy == "pad" and not rows.report.cut_tokens
        self.open = whole and not tokenizer.ends_texts
        self.parts: list[tuple[list[int], int, int]] = []
        ids, num, size = list[int](), 0, 0
        for row, num_bytes in zip(rows.scored(indices), rows.bytes_of(indices).tolist(), strict=True):
            ids += [token for token in row.tolist() if token != tokenizer.eot_id]
            num, size = num + 1, size + num_bytes
            if not whole or self.open or (len(row) and row[-1] == tokenizer.eot_id):
                self.parts.append((ids, num, size))
                ids, num, size = [], 0, 0
        self.parts += [(ids, num, size)] if num else []


def _texts_of(ours: _Parts, theirs: _Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """The text number of each row; a text is the smallest group of parts that holds the same in both models.

    Bytes say which model's part has to be continued, so each text is decoded once, however many rows it has.
    """
    sides = (ours, theirs)
    at, number = [0, 0], 0
    of: tuple[list[int], list[int]] = ([], [])
    while any(at[i] < len(side.parts) for i, side in enumerate(sides)):
        unlike = _unlike(f"text {number + 1}", "the models' tokens differ, and cut it in other places", ours.rows)
        ids: tuple[list[int], list[int]] = ([], [])
        held, due = [0, 0], [0, 1]
        while due:
            for i in due:
                if at[i] == len(sides[i].parts) or (ids[i] and not sides[i].open):
                    raise unlike
                more, num, size = sides[i].parts[at[i]]
                at[i] += 1
                held[i] += size
                ids[i].extend(more)
                of[i].extend([number] * num)
            due = [] if held[0] == held[1] else [0 if held[0] < held[1] else 1]
        if ours.tokenizer.decode(ids[0]) != theirs.tokenizer.decode(ids[1]):
            raise unlike
        number += 1
    return torch.tensor(of[0]), torch.tensor(of[1])


@dataclass(frozen=True)
class Other:
    """The model to compare with, and rows of the same texts."""

    model: Model
    rows: Rows
    shared: Shared

    @classmethod
    def of(cls, model: Model, rows: Rows, own: tuple[Rows, Tokenizer], max_rows: int | None = None) -> Other:
        """own: the rows that the first model is measured on, and its tokenizer. Rows of other texts are refused.

        >>> Other.of(model, rows, (rows, model.tokenizer)).shared.unit  # doctest: +SKIP
        'nats per token'
        """
        shared = shared_by(own, (rows, model.tokenizer), max_rows)
        return cls(model, rows.classed(model.labels) if model.denoiser.num_classes else rows, shared)


@dataclass(frozen=True)
class Pair:
    """Two bounds of the same texts and draws; more draws make the interval of their difference narrower.

    once: which of the two reads each text only once, because it draws nothing.
    """

    ours: Bound
    theirs: Bound
    shared: Shared = Shared()
    once: tuple[bool, bool] = (False, False)

    @property
    def difference(self) -> Difference:
        ours, theirs = self._by_text()
        scale, unit = _scale(self.shared.unit), self.shared.unit
        nats = {0: ours.nats_B.double() * scale}, {0: theirs.nats_B.double() * scale}
        interval = gap(*nats, ours.tokens_B if self.shared.count_B is None else self.shared.count_B)
        return Difference(unit, interval, self.draws_half, self.kinds, self.shared.note)

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        kinds = (self.ours.kind, self.theirs.kind)
        _check_kinds(kinds)
        return kinds

    @property
    def draws_half(self) -> float:
        """Half-width of the 95% interval of the difference given the texts.

        Draws of different rows are independent, so the rows of one text stay apart wherever both models have the same.
        """
        ours, theirs = (self.ours, self.theirs) if self.shared.count_B is None else self._by_text()
        draws_BS = (ours.draws_BS.double() - theirs.draws_BS.double()) * _scale(self.shared.unit)
        kind: Kind = "exact" if set(self.kinds) == {"exact"} or all(self.once) else "upper bound"
        count_B = ours.tokens_B if self.shared.count_B is None else self.shared.count_B
        return Bound(draws_BS=draws_BS, tokens_B=count_B, kind=kind).draws_half

    def _by_text(self) -> tuple[Bound, Bound]:
        """The bounds with one row per text."""
        if self.shared.texts is None:
            return self.ours, self.theirs
        ours, theirs = (summed(*of) for of in zip((self.ours, self.theirs), self.shared.texts, strict=True))
        return ours, theirs

    def with_more(self, pair: Pair) -> Pair:
        ours, theirs = self.ours.with_more(pair.ours), self.theirs.with_more(pair.theirs)
        return self._of(ours, theirs)

    def with_larger(self, pair: Pair) -> Pair:
        ours, theirs = self.ours.with_larger(pair.ours), self.theirs.with_larger(pair.theirs)
        return self._of(ours, theirs)

    def _of(self, ours: Bound, theirs: Bound) -> Pair:
        return replace(self, ours=self.ours if self.once[0] else ours, theirs=self.theirs if self.once[1] else theirs)


def _check_kinds(kinds: Sequence[Kind]) -> None:
    if list(kinds).count("pseudo") == 1:
        raise UsageError("a pseudo-likelihood is no bound: it can be compared with another pseudo-likelihood alone")


def metrics_of(models: tuple[Model, Model], metric: Perplexity) -> tuple[Perplexity, Perplexity]:
    """The metric for each model: an estimator applies to the model that has a bound if the other has an exact value."""
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

    `precision` of the metric applies to the difference, in its unit. What the two models have in common cancels, so
    this takes fewer draws than two bounds with intervals of that width.

    >>> ours, theirs, apart = evaluate_against(model, rows, Other.of(other, rows, (rows, model.tokenizer)),
    ...     Perplexity(precision=0.01))  # doctest: +SKIP
    >>> apart.visible  # doctest: +SKIP
    True
    """
    how: dict[str, Any] = {"seed": seed, "world": world, "progress": progress}
    rows = rows.classed(model.labels) if model.denoiser.num_classes else rows
    mine, others = metrics_of((model, other.model), metric)
    ours, theirs = mine.reading(model, rows, **how), others.reading(other.model, other.rows, **how)
    both = (model, ours), (other.model, theirs)
    _check_kinds([each.objective.with_estimator(reading.estimator).kind for each, reading in both])  # before reading
    once = ours.once, theirs.once
    read: dict[int, Bound] = {}  # of a model that draws nothing, and so reads the rows only once

    def bound(number: int, draws: Draws) -> Bound:
        reading = (ours, theirs)[number]
        if not reading.once:
            return reading.bound(draws)
        if number not in read:
            read[number] = reading.bound(draws)
        return read[number]

    def measure(draws: Draws) -> Pair:
        return Pair(bound(0, draws), bound(1, draws), other.shared, once)

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
