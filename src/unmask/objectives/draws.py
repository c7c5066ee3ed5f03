"""Which keys and times a bound is estimated at: the draws of a row, in groups that are spread evenly over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.data.batch import DRAW_TIME
from unmask.rng import fold, uniform

if TYPE_CHECKING:
    from unmask.objectives import Objective


def draws_of(objective: Objective, key_B: Tensor, num_samples: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The keys and times of an objective's estimates; where nothing is random, as of a likelihood, one reading."""
    if objective.one_reading:
        return iter([[(key_B, torch.ones(key_B.shape, dtype=torch.float64, device=key_B.device))]])
    return bound_draws(key_B, num_samples)


def bound_draws(key_B: Tensor, num_samples: int, strata: int | None = None) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The draws of a bound, in groups of `strata`: the rows' keys and times of each.

    Times are spread evenly inside a group of a row's draws; groups and rows are independent of each other. None: four,
    where that leaves two groups, since one has no spread.

    >>> [len(group) for group in bound_draws(torch.tensor([1]), 16)]
    [4, 4, 4, 4]
    """
    if strata is None:
        strata = 4 if num_samples % 4 == 0 and num_samples >= 8 else 1
    for g in range(num_samples // strata):
        u_B = uniform(fold(key_B, g), DRAW_TIME)
        yield [(fold(key_B, g, j + 1), 1 - (u_B + j / strata) % 1) for j in range(strata)]
