"""A schedule with parameters, as somebody outside the package writes one: alpha(t) = 1 - w t^a - (1 - w) t^b."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unmask.noise import Noise, room
from unmask.noise.learned import LearnedNoise


@dataclass(frozen=True, kw_only=True)
class LearnedPower(Noise):
    """As a recipe describes it: the two powers at the start, mixed in equal parts."""

    low: float = 1.0
    high: float = 2.0

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - (t**self.low + t**self.high) / 2

    def dalpha(self, t: Tensor) -> Tensor:
        return -(self.low * t ** (self.low - 1) + self.high * t ** (self.high - 1)) / 2

    def inverse(self, alpha: Tensor) -> Tensor:
        return bisected(self, alpha)

    def build(self) -> LearnedNoise:
        return Powers(self.low, self.high)


class Powers(LearnedNoise):
    """The powers and their mixture as parameters: log a, log b, and the logit of w."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.log_powers = nn.Parameter(torch.tensor([low, high]).log())
        self.mixture = nn.Parameter(torch.zeros(1))

    def _mixed(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.log_powers.exp().to(t.device)
        return a, b, torch.sigmoid(self.mixture.to(t.device))

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - self.level(t)

    def level(self, t: Tensor) -> Tensor:
        a, b, w = self._mixed(t)
        return w * t**a + (1 - w) * t**b

    def dalpha(self, t: Tensor) -> Tensor:
        a, b, w = self._mixed(t)
        return -(w * a * t ** (a - 1) + (1 - w) * b * t ** (b - 1))

    def inverse(self, alpha: Tensor) -> Tensor:
        return bisected(self, alpha)


@torch.no_grad()
def bisected(noise: Noise, alpha: Tensor) -> Tensor:
    """The time of a schedule that has no closed form for it."""
    lo, hi = torch.zeros_like(alpha), torch.ones_like(alpha)
    for _ in range(60):
        middle = (lo + hi) / 2
        later = noise.alpha(middle) > alpha
        lo, hi = torch.where(later, middle, lo), torch.where(later, hi, middle)
    return (lo + hi) / 2


def install(patch: Any = setattr) -> None:
    """Make it a plug-in of this process by an entry point, as a package of its own would have."""
    point = importlib.metadata.EntryPoint("learned_power", f"{__name__}:LearnedPower", room.package)
    real = importlib.metadata.entry_points

    def entry_points(**wanted: str) -> Any:
        return (point,) if wanted == {"group": room.package} else real(**wanted)

    patch(importlib.metadata, "entry_points", entry_points)
