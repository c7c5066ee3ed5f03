"""sigma grows geometrically in t, rescaled so that both ends are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.errors import UsageError
from unmask.noise._sigma import SigmaNoise


@dataclass(frozen=True, kw_only=True)
class Geometric(SigmaNoise):
    """sigma(t) = sigma_min^(1-t) sigma_max^t, alpha = exp(-sigma) rescaled to exact ends."""

    sigma_min: float = 1e-3
    sigma_max: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max:
            raise UsageError(
                "geometric noise needs 0 < sigma_min < sigma_max, got {sigma_min}, {sigma_max}",
                sigma_min=self.sigma_min,
                sigma_max=self.sigma_max,
            )

    def rise(self, t: Tensor) -> Tensor:
        return self.sigma_min * torch.expm1(t * math.log(self.sigma_max / self.sigma_min))

    def dsigma(self, t: Tensor) -> Tensor:
        return (self.sigma_min + self.rise(t)) * math.log(self.sigma_max / self.sigma_min)

    def rise_inverse(self, rise: Tensor) -> Tensor:
        return torch.log1p(rise / self.sigma_min) / math.log(self.sigma_max / self.sigma_min)
