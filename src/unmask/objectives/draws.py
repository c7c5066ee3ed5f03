"""The keys and times at which a bound is estimated: the draws of a row, in groups that are spread evenly over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.data.batch import DRAW_TIME
from unmask.devices import widest
from unmask.rng import fold, uniform

if TYPE_CHECKING:
    from unmask.objectives import Objective

LARGEST = 16  # draws per group: beyond this, the variance comes from which tokens are masked, not from how many


@dataclass(frozen=True)
class Draws:
    """The draws of a row: `groups` of `size` each, whose times are spread evenly inside a group.

    Groups are independent of each other, so their spread gives the error of the estimate; larger groups reduce the
    variance of the estimate itself. first_group, first: earlier draws are skipped, because they are done already.
    """

    groups: int
    size: int
    first_group: int = 0
    first: int = 0

    @classmethod
    def of(cls, num_samples: int, rows: int = 1) -> Draws:
        """`num_samples` draws in the largest groups that still allow a confidence interval.

        There are at least two groups per row, and if few rows are measured together, at least half as many groups over
        all rows as a group has draws.

        >>> Draws.of(4), Draws.of(16)
        (Draws(groups=2, size=2, first_group=0, first=0), Draws(groups=4, size=4, first_group=0, first=0))
        >>> Draws.of(32, rows=100)
        Draws(groups=2, size=16, first_group=0, first=0)
        """
        for size in range(min(LARGEST, num_samples // 2), 1, -1):
            groups, rest = divmod(num_samples, size)
            if not rest and size <= 2 * rows * groups:
                return cls(groups, size)
        return cls(num_samples, 1)

    @property
    def num(self) -> int:
        """The number of draws per row, skipped ones included."""
        return self.groups * self.size

    def doubled(self) -> Draws:
        """The draws that make each group twice as large: times in the middle between the existing ones."""
        return Draws(self.groups, 2 * self.size, first=self.size)

    def joined_by(self, more: int) -> Draws:
        """The draws of `more` additional groups."""
        return Draws(self.groups + more, self.size, first_group=self.groups)


def draws_of(objective: Objective, key_B: Tensor, num_samples: int | Draws) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The keys and times of an objective's estimates; a single draw if the value is deterministic (a likelihood)."""
    if objective.one_reading:
        return iter([[(key_B, torch.ones(key_B.shape, dtype=widest(key_B.device), device=key_B.device))]])
    return bound_draws(key_B, num_samples)


def bound_draws(key_B: Tensor, num_samples: int | Draws) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The draws of a bound, group by group: the keys and times of the rows.

    >>> [len(group) for group in bound_draws(torch.tensor([1]), 16)]
    [4, 4, 4, 4]
    """
    draws = Draws.of(num_samples) if isinstance(num_samples, int) else num_samples
    places = _spread(draws.size)
    for g in range(draws.first_group, draws.groups):
        u_B = uniform(fold(key_B, g), DRAW_TIME)
        yield [(fold(key_B, g, j + 1), 1 - (u_B + places[j]) % 1) for j in range(draws.first, draws.size)]


def _spread(size: int) -> list[float]:
    """0, 1/size, 2/size ..., ordered so that a group that doubles its size keeps the draws that it has.

    >>> _spread(4)
    [0.0, 0.5, 0.25, 0.75]
    """
    if size % 2:
        return [j / size for j in range(size)]
    half = _spread(size // 2)
    return half + [place + 1 / size for place in half]
