"""alpha = 1 - t: the masking rate is the time itself (the paper's default)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.noise import Noise


@dataclass(frozen=True, kw_only=True)
class LogLinear(Noise):
    """alpha(t) = 1 - t; linear in alpha, so log-linear in sigma = -log alpha."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def dalpha(self, t: Tensor) -> Tensor:
        return -torch.ones_like(t)

    def inverse(self, alpha: Tensor) -> Tensor:
        return 1 - alpha

    def level(self, t: Tensor) -> Tensor:
        return t
