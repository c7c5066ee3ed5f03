"""Differences between systems and their intervals, from the same texts and seeds.

Systems are measured on the same texts with the same keys, so the difficulty of a text cancels in the difference. Two
things are sampled: the texts, which all seeds share, and the seeds. Each contributes a standard error and a half-width
from Student's t; the squares of the two half-widths add up, which is never too narrow (`tests/numerics`).
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

# How a difference of two values relates to the difference of the measured quantities, by the kinds of both values: an
# upper bound minus an exact value is an upper bound; the difference of two bounds bounds nothing.
GAP_SIGN = {("exact", "exact"): "=", ("upper bound", "exact"): "≤", ("exact", "upper bound"): "≥"}


def seen(ci95: Sequence[float] | None) -> Literal["visible", "not visible"]:
    """Whether a difference can be told from 0, which means that its interval excludes 0.

    Without an interval it cannot.

    >>> seen((0.1, 0.3)), seen((-0.1, 0.3)), seen(None)
    ('visible', 'not visible', 'not visible')
    """
    return "not visible" if ci95 is None or not (ci95[0] > 0 or ci95[1] < 0) else "visible"


@dataclass(frozen=True)
class SeedNoise:
    """The variation of one system's nats per token from seed to seed: a standard deviation and its degrees of
    freedom."""

    deviation: float
    freedom: int


@dataclass(frozen=True)
class Interval:
    """A value, such as nats per token, with its 95% interval.

    texts_half, seeds_half: the two half-widths that form the interval; None if there is too little data.
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
        """Whether the value can be told from 0. From a single seed nothing can be said about other seeds.

        >>> Interval(0.1, 0.05, None, "nothing").verdict, Interval(0.1, 0.05, 0.02, "paired seeds").verdict
        ('one seed', 'visible')
        """
        found = seen(self.ci95)
        return "one seed" if found == "visible" and self.seeds_half is None else found


def seed_noise(levels: Sequence[Sequence[float]]) -> SeedNoise | None:
    """The noise between seeds, pooled over the systems that have several; None if none has.

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
    """A system's nats per token, averaged over its seeds. nats: for each seed the nats [B] of every text.

    >>> level({0: torch.tensor([2.0, 2.0])}, torch.tensor([1, 1])).ci95
    (2.0, 2.0)
    """
    return gap(nats, {}, tokens_B, noise)


def gap(
    ours: Mapping[int, Tensor], theirs: Mapping[int, Tensor], tokens_B: Tensor, noise: SeedNoise | None = None
) -> Interval:
    """ours - theirs in nats per token, averaged over seeds.

    If both have at least two seeds in common, only those are used, as pairs. Otherwise the seeds' part is the noise
    between seeds of other systems, if there is any. If theirs is empty, the value itself is measured.

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
    """How a bound in T steps depends on T: least-squares fit of nats per token = a + b / T; returns a, the limit, and
    b.

    nats: for each T the nats of every text, from the same weights and keys. Both coefficients are sums of them, so
    their intervals are over texts.

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
