"""A noise schedule with parameters: the module that `Noise.build` creates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from unmask.noise.base import Noise


class LearnedNoise(nn.Module, Noise):
    """A `Noise` whose alpha(t), alpha'(t) and inverse depend on learned parameters.

    For all parameter values alpha must decrease strictly and have exact ends. alpha and dalpha are differentiated with
    respect to the parameters and t (`variance_gradient` in objectives/terms.py). Parameters need at least one axis,
    since scalars cannot be sharded. Times are float64 and may be on the host while the parameters are on a GPU: move
    the parameter to `t.device`, not t to the parameter, so that masks are drawn on the batch's device.

    >>> import torch
    >>> class Power(LearnedNoise):  # 1 - t^k, k = e^p
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.p = nn.Parameter(torch.zeros(1))
    ...     def alpha(self, t):
    ...         return 1 - t ** self.p.exp().to(t.device)
    ...     def dalpha(self, t):
    ...         k = self.p.exp().to(t.device)
    ...         return -k * t ** (k - 1)
    ...     def inverse(self, alpha):
    ...         return (1 - alpha) ** (-self.p).exp().to(alpha.device)
    >>> Power().weight(torch.tensor([0.5])).requires_grad
    True
    """

    room = None  # type: ignore[assignment]  # no plug-in: that is the description, whose `build` makes it


@dataclass(frozen=True)
class Detached(Noise):
    """A learned schedule with its current parameters, without gradients; results are on the argument's device."""

    learned: LearnedNoise

    def alpha(self, t: Tensor) -> Tensor:
        return self.learned.alpha(t).detach().to(t.device)

    def dalpha(self, t: Tensor) -> Tensor:
        return self.learned.dalpha(t).detach().to(t.device)

    def inverse(self, alpha: Tensor) -> Tensor:
        return self.learned.inverse(alpha).detach().to(alpha.device)

    def level(self, t: Tensor) -> Tensor:
        return self.learned.level(t).detach().to(t.device)
