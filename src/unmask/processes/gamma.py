"""Schedules of Gaussian noise: gamma(t) = log(sigma² / alpha²), alpha² = sigmoid(-gamma), sigma² = sigmoid(gamma).

SNR = e^{-gamma}. Unlike alpha(t) of masks the ends are not exact: at t = 0 a little noise is left, at t = 1 a little of
the text, and the bound includes both (reconstruction and prior). Variational Diffusion Models, Kingma et al. 2021,
arXiv 2107.00630, has the learned schedule; Diffusion-LM, arXiv 2205.14217, the square root; Nichol and Dhariwal 2021,
arXiv 2102.09672, the cosine, which SSD-LM uses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unmask.devices import put_like


class Gamma(ABC):
    """Increasing gamma(t), its derivative, and the level in [0, 1] on which the network is conditioned."""

    @abstractmethod
    def gamma(self, t: Tensor) -> Tensor:
        """log(sigma² / alpha²), differentiable in the learned parameters."""

    @abstractmethod
    def rate(self, t: Tensor) -> Tensor:
        """gamma'(t), also differentiable."""

    def level(self, t: Tensor) -> Tensor:
        """The level on which the network is conditioned: by default t itself, as in the published networks."""
        return t

    def of_level(self, level: Tensor) -> Tensor:
        """gamma at the time that has this level."""
        return self.gamma(level)


@dataclass(frozen=True)
class Sqrt(Gamma):
    """alpha² = 1 - sqrt(t + offset), at least `least` (Diffusion-LM).

    The published code clips beta at 0.999 instead, which gives alpha² = 2e-7 after its 2000 steps.

    >>> Sqrt().gamma(torch.tensor(0.25)).sigmoid()
    tensor(0.5001)
    """

    offset: float = 1e-4
    least: float = 2e-7

    def _sigma2(self, t: Tensor) -> Tensor:
        return torch.sqrt(t + self.offset)

    def gamma(self, t: Tensor) -> Tensor:
        sigma2 = self._sigma2(t).clamp(max=1 - self.least)
        # The floor again: in float32 the largest sigma² is less exact than its logarithm.
        return sigma2.log() - torch.log1p(-sigma2).clamp(min=math.log(self.least))

    def rate(self, t: Tensor) -> Tensor:
        sigma2 = self._sigma2(t)
        within = sigma2.clamp(max=1 - self.least)
        return torch.where(sigma2 < 1 - self.least, 1 / (2 * within**2 * (1 - within)), 0.0)


@dataclass(frozen=True)
class Cosine(Gamma):
    """alpha = cos(pi/2 (t + offset) / (1 + offset)), with alpha² at least `least`; the paper's offset is 0.008.

    >>> Cosine(offset=0.0).gamma(torch.tensor(0.5)).sigmoid()
    tensor(0.5000)
    """

    offset: float = 0.008
    least: float = 1e-10

    def _angle(self, t: Tensor) -> Tensor:
        most = math.acos(math.sqrt(self.least))
        return (math.pi / 2 * (t + self.offset) / (1 + self.offset)).clamp(max=most)

    def gamma(self, t: Tensor) -> Tensor:
        return 2 * torch.tan(self._angle(t)).log()

    def rate(self, t: Tensor) -> Tensor:
        angle = self._angle(t)
        slope = math.pi / (1 + self.offset) / (angle.sin() * angle.cos())
        return torch.where(angle < math.acos(math.sqrt(self.least)), slope, 0.0)


class LearnedGamma(nn.Module, Gamma):
    """gamma_0 + (gamma_1 - gamma_0) level(t): learned ends, and a learned piecewise linear curve between them.

    The bound in continuous time depends on the ends only; the curve determines the variance of its estimate. The
    network is conditioned on level(t), which is gamma rescaled to [0, 1].

    >>> LearnedGamma(-3.0, 6.0).gamma(torch.tensor([0.0, 0.5, 1.0])).tolist()
    [-3.0, 1.5, 6.0]
    """

    PIECES = 32

    def __init__(self, first: float, last: float) -> None:
        super().__init__()
        self.first_1 = nn.Parameter(torch.tensor([first]))
        self.log_width_1 = nn.Parameter(torch.tensor([last - first]).log())
        self.pieces_M = nn.Parameter(torch.zeros(self.PIECES))

    def ends(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """gamma_0 and gamma_1 - gamma_0, in the type and on the device of `like`."""
        return put_like(self.first_1, like)[0], put_like(self.log_width_1, like)[0].exp()

    def curve(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """level(t), which rises from 0 to 1, and its derivative."""
        share_M = torch.softmax(put_like(self.pieces_M, t), dim=0)
        place = t * self.PIECES
        piece = place.floor().clamp(0, self.PIECES - 1)
        before_M = share_M.cumsum(0) - share_M
        share = share_M[piece.long()]
        return before_M[piece.long()] + share * (place - piece), self.PIECES * share

    def gamma(self, t: Tensor) -> Tensor:
        first, width = self.ends(t)
        return first + width * self.curve(t)[0]

    def rate(self, t: Tensor) -> Tensor:
        return self.ends(t)[1] * self.curve(t)[1]

    def level(self, t: Tensor) -> Tensor:
        return self.curve(t)[0].detach()

    def of_level(self, level: Tensor) -> Tensor:
        first, width = self.ends(level)
        return first + width * level
