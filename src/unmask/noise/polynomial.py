"""alpha = 1 - t^k."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unmask.errors import UsageError
from unmask.noise import Noise


@dataclass(frozen=True, kw_only=True)
class Polynomial(Noise):
    """alpha(t) = 1 - t^power; power 1 is log-linear, larger powers keep more tokens visible."""

    power: float = 2.0

    def __post_init__(self) -> None:
        if not self.power > 0:
            raise UsageError("polynomial noise needs power > 0, got {power}", power=self.power)

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t**self.power

    def dalpha(self, t: Tensor) -> Tensor:
        return -self.power * t ** (self.power - 1)

    def inverse(self, alpha: Tensor) -> Tensor:
        return (1 - alpha) ** (1 / self.power)

    def level(self, t: Tensor) -> Tensor:
        return t**self.power
