"""Schedules given by sigma(t) = -log alpha(t), rescaled so that alpha(0)=1 and alpha(1)=0 exactly.

alpha(t) = (e^-sigma(t) - e^-sigma(1)) / (e^-sigma(0) - e^-sigma(1)). Without the rescaling alpha(1) > 0,
and the prior term KL(q(z_1|x) || all masks) would be infinite.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from unmask.noise import Noise


class SigmaNoise(Noise):
    """A schedule linear or geometric in sigma; subclasses give its rise above sigma_min, derivative and inverse."""

    sigma_min: float
    sigma_max: float

    @abstractmethod
    def rise(self, t: Tensor) -> Tensor:
        """sigma(t) - sigma_min, without the subtraction, which would cancel at small t."""

    def sigma(self, t: Tensor) -> Tensor:
        return self.sigma_min + self.rise(t)

    @abstractmethod
    def dsigma(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def sigma_inverse(self, sigma: Tensor) -> Tensor: ...

    @property
    def _span(self) -> float:
        return math.exp(-self.sigma_min) * -math.expm1(self.sigma_min - self.sigma_max)

    def alpha(self, t: Tensor) -> Tensor:
        # expm1 keeps the small difference at t near 1, where both exponentials are nearly equal.
        alpha = math.exp(-self.sigma_max) * torch.expm1(self.sigma_max - self.sigma(t)) / self._span
        return torch.where(t > 0, torch.where(t < 1, alpha, 0.0), 1.0)  # exact ends, whatever sigma rounds to

    def dalpha(self, t: Tensor) -> Tensor:
        return -self.dsigma(t) * torch.exp(-self.sigma(t)) / self._span

    def inverse(self, alpha: Tensor) -> Tensor:
        return self.sigma_inverse(-torch.log(math.exp(-self.sigma_max) + alpha * self._span))

    def level(self, t: Tensor) -> Tensor:
        return math.exp(-self.sigma_min) * -torch.expm1(-self.rise(t)) / self._span
