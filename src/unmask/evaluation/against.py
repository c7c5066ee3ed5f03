"""Two models on the same texts: how far their likelihoods are apart, paired text by text and draw by draw.

Both are measured with the same rows, keys and draws, so that what makes a text hard, and which of its tokens are
masked, is in both and leaves the difference. Models that spell texts in different tokens see the same only where a row
of each holds the same text; they are compared in bits per byte, since a token of one is not a token of the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch

from unmask.data.packing import Rows
from unmask.data.tokenizers import Tokenizer
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.evaluation.evaluate import chosen_rows
from unmask.evaluation.paired import Interval, gap
from unmask.objectives.base import Kind

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
        return self.interval.half is not None and abs(self.value) > self.interval.half

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON, which has neither NaN nor infinity."""
        given = (self.value - self.draws_half, self.value + self.draws_half)
        return {
            "unit": self.unit,
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
    kinds = (ours.kind, theirs.kind)
    if kinds.count("pseudo") == 1:
        raise UsageError("a pseudo-likelihood is no bound: it can be compared with another pseudo-likelihood alone")
    if count_B is None:
        count_B = ours.tokens_B
    scale = 1 / math.log(2) if unit == "bits per byte" else 1.0
    draws_BS = (ours.draws_BS.double() - theirs.draws_BS.double()) * scale
    apart = Bound(draws_BS=draws_BS, tokens_B=count_B, kind="exact" if set(kinds) == {"exact"} else "upper bound")
    interval = gap({0: ours.nats_B.double() * scale}, {0: theirs.nats_B.double() * scale}, count_B)
    return Difference(unit, interval, apart.draws_half, kinds)


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


def _finite(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return list(value) if all(map(math.isfinite, value)) else None
    return value if math.isfinite(value) else None
