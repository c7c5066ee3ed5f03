"""Lowest entropy first, as many per call as keep the error of drawing them independently within `gamma` nats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from unmask.errors import UsageError
from unmask.samplers.adaptive import CappedSampler, entropy


@dataclass(frozen=True, kw_only=True)
class EntropyBounded(CappedSampler):
    """Order: the lowest entropy first. Calls: at most min(steps, L), or L.

    Drawing tokens independently ignores their dependence. The error is the divergence between their joint distribution
    and the product of its marginals, which is at most the sum of the entropies without the largest. The longest prefix
    of the order whose sum is at most gamma opens, at least one position. gamma=0 opens one position per call, or
    several if all but one are certain.
    """

    law: ClassVar[str] = "no law claimed; each call within gamma nats of drawing the same positions jointly"
    cost: ClassVar[str] = "at most min(steps, L), L without steps; fewer the surer the model is"

    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma >= 0 or math.isnan(self.gamma):
            raise UsageError("gamma is a bound in nats, 0 or more; got {gamma}", gamma=self.gamma)

    def score(self, log_p_NI: Tensor) -> Tensor:
        return -entropy(log_p_NI)

    def wanted(self, score_RK: Tensor, place_RK: Tensor) -> Tensor:
        entropy_RK = -score_RK.gather(1, place_RK.argsort(dim=1))  # in order; inf for padding, at the end
        lost_RK = entropy_RK.cumsum(dim=1) - entropy_RK.cummax(dim=1).values  # grows along the order
        return (lost_RK <= self.gamma).gather(1, place_RK)
