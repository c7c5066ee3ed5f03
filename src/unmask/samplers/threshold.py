"""All positions whose likeliest token has probability `threshold` or more, and always the most confident one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from unmask.errors import UsageError
from unmask.samplers.adaptive import CappedSampler


@dataclass(frozen=True, kw_only=True)
class Threshold(CappedSampler):
    """Order: everything sure enough together, else the surest. Calls: at most min(steps, L), or L.

    No law is claimed. At threshold=0 everything opens in one call, the one-step chain; with random=1 and a threshold
    that nothing reaches, the order is uniformly random.
    """

    law: ClassVar[str] = "no law claimed; threshold=0: that of the one-step chain"
    cost: ClassVar[str] = "at most min(steps, L), L without steps; fewer the surer the model is"

    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold <= 1:
            raise UsageError("threshold is a probability in [0, 1], got {threshold}", threshold=self.threshold)

    def score(self, log_p_NI: Tensor) -> Tensor:
        return log_p_NI.amax(dim=-1)

    def wanted(self, score_RK: Tensor, place_RK: Tensor) -> Tensor:
        return score_RK >= (math.log(self.threshold) if self.threshold else -math.inf)
