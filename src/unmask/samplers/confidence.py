"""Most confident first, by the probability of the likeliest token; `tokens` per call or all in `steps` calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from unmask.samplers.adaptive import CountedSampler


@dataclass(frozen=True, kw_only=True)
class Confidence(CountedSampler):
    """Order: the largest top probability first. Calls: min(steps, L), or L / tokens.

    No law is claimed, but at random=1 with one token a call, which is the law of a uniformly random order.
    """

    law: ClassVar[str] = "no law claimed; random=1 with one token a call: that of a uniformly random order"
    cost: ClassVar[str] = "min(steps, L), or ceil(L / tokens)"

    def score(self, log_p_NI: Tensor) -> Tensor:
        return log_p_NI.amax(dim=-1)
