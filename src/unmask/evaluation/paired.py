"""How far two systems are apart, and whether that can be seen: intervals of differences on the same texts and seeds.

Systems are measured on the same texts with the same keys, so what makes a text hard is in both and leaves the
difference. Two things are drawn: the texts, which all seeds share, and the seeds. Each has a standard error of its own
and a half-width by Student's t; the two half-widths add as squares, which is never too narrow (`tests/numerics`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unmask.evaluation.measurement import ratio_error, student_975

Verdict = Literal["visible", "not visible", "one seed"]

# How a difference stands to the difference of what is measured, by the kinds of both sides: an upper bound minus an
# exact value is an upper bound; of two bounds the difference bounds nothing.
GAP_SIGN = {("exact", "exact"): "=", ("upper bound", "exact"): "≤", ("exact", "upper bound"): "≥"}


def seen(ci95: Sequence[float] | None) -> Literal["visible", "not visible"]:
    """Whether a difference can be told from 0: its interval does not hold it. Without an interval nothing can.

    >>> seen((0.1, 0.3)), seen((-0.1, 0.3)), seen(None)
    ('visible', 'not visible', 'not visible')
    """
    return "not visible" if ci95 is None or not (ci95[0] > 0 or ci95[1] < 0) else "visible"


@dataclass(frozen=True)
class SeedNoise:
    """How much the nats per token of one system differ from seed to seed: a standard deviation, and from how many."""

    deviation: float
    freedom: int


@dataclass(frozen=True)
class Interval:
    """A value, in nats per token or whatever is measured, with its 95% interval.

    texts_half, seeds_half: the half-widths of which the interval is made; None: there is too little to tell.
    """

    value: float
    texts_half: float | None
    seeds_half: float | None
    seeds_from: Literal["paired seeds", "noise of other systems", "nothing"]

    @property
    def half(self) -> float | None:
        if self.texts_half is None:
            return None
        return math.hypot(self.texts_half, self.seeds_half or 0.0)

    @property
    def ci95(self) -> tuple[float, float] | None:
        return None if self.half is None else (self.value - self.half, self.value + self.half)

    @property
    def verdict(self) -> Verdict:
        """Whether the value can be told from 0. Of one seed alone nobody knows what another seed would give.

        >>> Interval(0.1, 0.05, None, "nothing").verdict, Interval(0.1, 0.05, 0.02, "paired seeds").verdict
        ('one seed', 'visible')
        """
        found = seen(self.ci95)
        return "one seed" if found == "visible" and self.seeds_half is None else found


def seed_noise(levels: Sequence[Sequence[float]]) -> SeedNoise | None:
    """The noise of seeds, pooled over the systems that have several; None where none has.

    >>> seed_noise([[1.0, 3.0], [5.0], [2.0, 2.0]])
    SeedNoise(deviation=1.0, freedom=2)
    """
    squares, freedom = 0.0, 0
    for level in levels:
        if len(level) > 1:
            mean = sum(level) / len(level)
            squares += sum((value - mean) ** 2 for value in level)
            freedom += len(level) - 1
    return SeedNoise(math.sqrt(squares / freedom), freedom) if freedom else None


def level(nats: Mapping[int, Tensor], tokens_B: Tensor, noise: SeedNoise | None = None) -> Interval:
    """A system's nats per token: the mean over its seeds. nats: of each seed the nats [B] of every text.

    >>> level({0: torch.tensor([2.0, 2.0])}, torch.tensor([1, 1])).ci95
    (2.0, 2.0)
    """
    return gap(nats, {}, tokens_B, noise)


def gap(
    ours: Mapping[int, Tensor], theirs: Mapping[int, Tensor], tokens_B: Tensor, noise: SeedNoise | None = None
) -> Interval:
    """ours - theirs in nats per token, in the mean over seeds.

    With two seeds or more in common only those count, each paired with itself. Else the seeds' part is the noise of
    seeds that other systems show, where there is any. theirs empty: the value itself.

    >>> a, b = torch.tensor([3.0, 5.0]), torch.tensor([2.0, 4.0])
    >>> gap({0: a}, {0: b}, torch.tensor([1, 1])).ci95
    (1.0, 1.0)
    """
    shared = sorted(ours.keys() & theirs.keys()) if theirs else sorted(ours)
    if len(shared) > 1:
        mine = torch.stack([ours[seed].double() for seed in shared])
        d_SB = mine - torch.stack([theirs[seed].double() for seed in shared]) if theirs else mine
        per_seed = (d_SB.sum(dim=1) / tokens_B.sum()).tolist()
        paired = seed_noise([per_seed])
        assert paired is not None
        seeds_half = student_975(paired.freedom) * paired.deviation / math.sqrt(len(shared))
        return _interval(d_SB.mean(dim=0), tokens_B, seeds_half, "paired seeds")
    d_B = _mean(ours) - (_mean(theirs) if theirs else 0.0)
    if noise is None:
        return _interval(d_B, tokens_B, None, "nothing")
    both = math.sqrt(sum(1 / len(side) for side in (ours, theirs) if side))
    half = student_975(noise.freedom) * noise.deviation * both
    return _interval(d_B, tokens_B, half, "noise of other systems")


def slope(nats: Mapping[int, Tensor], tokens_B: Tensor) -> tuple[Interval, Interval]:
    """How a bound in T steps depends on T: nats per token = a + b / T by least squares; a, where T is endless, and b.

    nats: of each T those of every text, by the same weights and keys: both are sums of them, so that their intervals
    are over texts.

    >>> a, b = slope({T: torch.tensor([3.0 + 2 / T] * 2) for T in (1, 2, 4)}, torch.tensor([1, 1]))
    >>> round(a.value, 6), round(b.value, 6)
    (3.0, 2.0)
    """
    steps = sorted(nats)
    X_K2 = torch.tensor([[1.0, 1 / T] for T in steps], dtype=torch.float64)
    fit_2B = torch.linalg.pinv(X_K2) @ torch.stack([nats[T].double() for T in steps])
    return _interval(fit_2B[0], tokens_B, None, "nothing"), _interval(fit_2B[1], tokens_B, None, "nothing")


def _mean(nats: Mapping[int, Tensor]) -> Tensor:
    return torch.stack([nats_B.double() for nats_B in nats.values()]).mean(dim=0)


def _interval(
    d_B: Tensor,
    tokens_B: Tensor,
    seeds_half: float | None,
    seeds_from: Literal["paired seeds", "noise of other systems", "nothing"],
) -> Interval:
    texts = len(tokens_B)
    texts_half = student_975(texts - 1) * ratio_error(d_B, tokens_B) if texts > 1 else None
    return Interval(float(d_B.sum()) / int(tokens_B.sum()), texts_half, seeds_half, seeds_from)
