"""sigma grows linearly in t, rescaled so that both ends are exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.errors import UsageError
from unmask.noise._sigma import SigmaNoise


@dataclass(frozen=True, kw_only=True)
class Linear(SigmaNoise):
    """sigma(t) = sigma_min + t (sigma_max - sigma_min), alpha = exp(-sigma) rescaled to exact ends."""

    sigma_min: float = 0.0
    sigma_max: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.sigma_min < self.sigma_max:
            raise UsageError(
                "linear noise needs 0 <= sigma_min < sigma_max, got {sigma_min} and {sigma_max}",
                sigma_min=self.sigma_min,
                sigma_max=self.sigma_max,
            )

    def rise(self, t: Tensor) -> Tensor:
        return t * (self.sigma_max - self.sigma_min)

    def dsigma(self, t: Tensor) -> Tensor:
        return torch.full_like(t, self.sigma_max - self.sigma_min)

    def rise_inverse(self, rise: Tensor) -> Tensor:
        return rise / (self.sigma_max - self.sigma_min)
