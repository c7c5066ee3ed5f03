"""Noise schedules: alpha(t), the probability that a token is still visible at time t (t=0 clean, t=1 all masked)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from unmask.registry import Room

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.noise.learned import LearnedNoise

room = Room("unmask.noise", base="Noise", helpers=("learned",))


class Noise(ABC):
    """alpha falls strictly from alpha(0)=1 to alpha(1)=0; both ends are exact.

    >>> import torch, unmask
    >>> unmask.noise.LogLinear().alpha(torch.tensor([0.0, 0.25, 1.0])).tolist()
    [1.0, 0.75, 0.0]
    """

    room: ClassVar[Room] = room

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Probability that a token is still visible at time t."""

    @abstractmethod
    def dalpha(self, t: Tensor) -> Tensor:
        """alpha'(t), never positive."""

    @abstractmethod
    def inverse(self, alpha: Tensor) -> Tensor:
        """The time at which alpha(t) has this value."""

    def level(self, t: Tensor) -> Tensor:
        """1 - alpha(t), the masking rate; schedules override it where the subtraction would cancel at small t."""
        return 1 - self.alpha(t)

    def weight(self, t: Tensor) -> Tensor:
        """-alpha'/(1-alpha): the weight of the masked-token loss in continuous time."""
        return -self.dalpha(t) / self.level(t)

    def build(self) -> LearnedNoise | None:
        """Create the schedule as a module with freshly initialised parameters; None if it has no parameters.

        This object remains the description stored in recipes and model folders. An objective registers the module under
        the name `noise` in the module that its own `build` returns.
        """
        return None
