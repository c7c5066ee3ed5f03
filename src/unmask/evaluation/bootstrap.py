"""Bootstrap over texts: how much a number of a whole set would vary with other texts of the same kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unmask.rng import row_keys, uniform

RESAMPLES = 1000
FEWEST = 10  # texts: ten are covered nine times in ten, two only half the time, so fewer have no interval
KEPT = 1 << 24  # drawn numbers to keep, 64 MiB; larger sets are drawn again for each statistic
AT_ONCE = 1 << 22
Floats = NDArray[np.float64]


def bootstrap_ci95(
    stats_NK: NDArray[Any], number: Callable[[Floats], float], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """A 95% percentile interval of `number`, a function of the sums of K statistics over texts; None for fewer than
    ten texts.

    Resamples are keyed by the seed: the same texts always have the same interval, and two models' outputs for the same
    texts are resampled in the same way.

    >>> bootstrap_ci95(np.ones((10, 2)), lambda total_K: float(total_K[0] / total_K[1]))
    (1.0, 1.0)
    """
    num = len(stats_NK)
    if num < FEWEST:
        return None
    stats_NK = np.asarray(stats_NK, dtype=np.float64)
    numbers = [number(stats_NK[drawn_N].sum(axis=0)) for some_SN in _drawn(num, seed, resamples) for drawn_N in some_SN]
    low, high = np.quantile(numbers, (0.025, 0.975))
    return float(low), float(high)


@dataclass(frozen=True)
class Sums:
    """A number that is a function of sums over a set's texts. over: the indices of the texts it covers; None: all."""

    stats_NK: NDArray[Any]
    number: Callable[[Floats], float]
    over: tuple[int, ...] | None = None

    @classmethod
    def of(cls, stats_NK: NDArray[Any], number: Callable[[Floats], float], over: Sequence[int] | None = None) -> Sums:
        return cls(np.asarray(stats_NK, dtype=np.float64), number, None if over is None else tuple(over))

    @property
    def value(self) -> float:
        return self.number(self.stats_NK.sum(axis=0))

    def ci95(self, *, seed: int = 0) -> tuple[float, float] | None:
        """See `bootstrap_ci95`."""
        return bootstrap_ci95(self.stats_NK, self.number, seed=seed)


def paired_ci95(ours: Sums, theirs: Sums, *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """A 95% interval of ours - theirs for the same texts; None if the two cover different texts, or fewer than ten.

    Each resample takes the same texts from both, so the difficulty of a text cancels.

    >>> right = Sums.of(np.arange(10.0)[:, None], lambda total_K: float(total_K[0]))
    >>> paired_ci95(right, right)
    (0.0, 0.0)
    """
    if ours.over != theirs.over or len(ours.stats_NK) != len(theirs.stats_NK):
        return None
    split = ours.stats_NK.shape[1]
    both_NK = np.concatenate([ours.stats_NK, theirs.stats_NK], axis=1)
    return bootstrap_ci95(
        both_NK,
        lambda total_K: ours.number(total_K[:split]) - theirs.number(total_K[split:]),
        seed=seed,
        resamples=resamples,
    )


def resampled_counts(num: int, *, seed: int = 0, resamples: int = RESAMPLES) -> Iterator[NDArray[np.float32]]:
    """[S, N] how often each of `num` texts occurs in each resample of `bootstrap_ci95`.

    Yields a few resamples at a time, so that memory does not grow with their number.

    >>> [counts_SN.sum(axis=1).tolist() for counts_SN in resampled_counts(3, resamples=2)]
    [[3.0, 3.0]]
    """
    for some_SN in _drawn(num, seed, resamples):
        counts = [np.bincount(drawn_N, minlength=num).astype(np.float32) for drawn_N in some_SN]
        yield np.stack(counts)


def _drawn(num: int, seed: int, resamples: int) -> Iterator[NDArray[np.int32]]:
    """[S, N] the texts of each resample, a few resamples at a time."""
    return iter(_kept(num, seed, resamples) if num * resamples <= KEPT else _draw(num, seed, resamples))


@functools.lru_cache(maxsize=2)
def _kept(num: int, seed: int, resamples: int) -> list[NDArray[np.int32]]:
    """Cached, because all statistics of a set share the same resamples."""
    return list(_draw(num, seed, resamples))


def _draw(num: int, seed: int, resamples: int) -> Iterator[NDArray[np.int32]]:
    position_N = torch.arange(num)
    for some_S1 in torch.split(row_keys(seed, torch.arange(resamples))[:, None], max(1, AT_ONCE // num)):
        yield (uniform(some_S1, position_N).double() * num).int().numpy()
