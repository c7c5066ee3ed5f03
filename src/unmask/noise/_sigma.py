"""Schedules defined by sigma(t) = -log alpha(t), rescaled so that alpha(0)=1 and alpha(1)=0 exactly.

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
    """A schedule given by sigma(t); subclasses define its rise above sigma_min, its derivative and its inverse."""

    sigma_min: float
    sigma_max: float

    @abstractmethod
    def rise(self, t: Tensor) -> Tensor:
        """sigma(t) - sigma_min, without cancellation at small t."""

    @abstractmethod
    def dsigma(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def rise_inverse(self, rise: Tensor) -> Tensor: ...

    @property
    def _whole(self) -> float:
        """sigma(1) - sigma(0)."""
        return self.sigma_max - self.sigma_min

    @property
    def _span(self) -> float:
        return -math.expm1(-self._whole)

    def alpha(self, t: Tensor) -> Tensor:
        # Differences of exponentials by expm1: no cancellation at the ends, no overflow for a large sigma.
        rise = self.rise(t)
        alpha = torch.exp(-rise) * -torch.expm1(rise - self._whole) / self._span
        return torch.where(t > 0, torch.where(t < 1, alpha, 0.0), 1.0)  # exact ends, whatever sigma rounds to

    def dalpha(self, t: Tensor) -> Tensor:
        return -self.dsigma(t) * torch.exp(-self.rise(t)) / self._span

    def inverse(self, alpha: Tensor) -> Tensor:
        return self.rise_inverse(-torch.log(alpha * self._span + math.exp(-self._whole)))

    def level(self, t: Tensor) -> Tensor:
        return -torch.expm1(-self.rise(t)) / self._span
