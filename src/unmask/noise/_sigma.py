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
    """A schedule linear or geometric in sigma; subclasses give sigma, its derivative and its inverse."""

    sigma_min: float
    sigma_max: float

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def dsigma(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def sigma_inverse(self, sigma: Tensor) -> Tensor: ...

    @property
    def _span(self) -> float:
        return math.exp(-self.sigma_min) * -math.expm1(self.sigma_min - self.sigma_max)

    def alpha(self, t: Tensor) -> Tensor:
        # expm1 keeps the small difference at t near 1, where both exponentials are nearly equal.
        return math.exp(-self.sigma_max) * torch.expm1(self.sigma_max - self.sigma(t)) / self._span

    def dalpha(self, t: Tensor) -> Tensor:
        return -self.dsigma(t) * torch.exp(-self.sigma(t)) / self._span

    def inverse(self, alpha: Tensor) -> Tensor:
        return self.sigma_inverse(-torch.log(math.exp(-self.sigma_max) + alpha * self._span))

    def level(self, t: Tensor) -> Tensor:
        return math.exp(-self.sigma_min) * -torch.expm1(self.sigma_min - self.sigma(t)) / self._span
