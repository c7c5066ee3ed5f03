"""Bootstrap over texts: how far a number of a whole set would move with other texts of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unmask.rng import row_keys, uniform

RESAMPLES = 1000
Floats = NDArray[np.float64]


def bootstrap_ci95(
    stats_NK: NDArray[Any], number: Callable[[Floats], float], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """A 95% interval (percentiles) of `number`, a function of the sums of K statistics over texts; None for one text.

    Resamples are keyed by the seed: the same texts have the same interval, and two models' outputs for the same texts
    are resampled alike.

    >>> bootstrap_ci95(np.array([[1, 1], [1, 1]]), lambda total_K: float(total_K[0] / total_K[1]))
    (1.0, 1.0)
    """
    num = len(stats_NK)
    if num < 2:
        return None
    stats_NK = np.asarray(stats_NK, dtype=np.float64)
    position_N = torch.arange(num)
    numbers = []
    for key in row_keys(seed, torch.arange(resamples)):
        drawn_N = (uniform(key, position_N).double() * num).long().numpy()
        numbers.append(number(stats_NK[drawn_N].sum(axis=0)))
    low, high = np.quantile(numbers, (0.025, 0.975))
    return float(low), float(high)
