"""alpha = cos(pi t / 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.noise import Noise


@dataclass(frozen=True, kw_only=True)
class Cosine(Noise):
    """alpha(t) = cos(pi t / 2): few masks for a long while, many at the end."""

    def alpha(self, t: Tensor) -> Tensor:
        # sin of the complement is exactly 0 at t=1, where cos would leave 6e-17.
        return torch.sin(math.pi / 2 * (1 - t))

    def dalpha(self, t: Tensor) -> Tensor:
        return -math.pi / 2 * torch.sin(math.pi / 2 * t)

    def inverse(self, alpha: Tensor) -> Tensor:
        return 2 / math.pi * torch.acos(alpha)

    def level(self, t: Tensor) -> Tensor:
        return 2 * torch.sin(math.pi / 4 * t) ** 2
