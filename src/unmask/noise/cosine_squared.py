"""alpha = cos^2(pi t / 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.noise import Noise


@dataclass(frozen=True, kw_only=True)
class CosineSquared(Noise):
    """alpha(t) = cos(pi t / 2)^2: slow at both ends, fast in the middle."""

    def alpha(self, t: Tensor) -> Tensor:
        return torch.sin(math.pi / 2 * (1 - t)) ** 2

    def dalpha(self, t: Tensor) -> Tensor:
        return -math.pi / 2 * torch.sin(math.pi * t)

    def inverse(self, alpha: Tensor) -> Tensor:
        return 2 / math.pi * torch.acos(torch.sqrt(alpha))

    def level(self, t: Tensor) -> Tensor:
        return torch.sin(math.pi / 2 * t) ** 2
