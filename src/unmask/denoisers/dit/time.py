"""A number that a network is conditioned on, as a vector."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TimeEmbedding(nn.Module):
    """A scalar → sinusoids → two-layer network."""

    def __init__(self, dim: int, num_frequencies: int = 128) -> None:
        super().__init__()
        self.num_frequencies = num_frequencies
        self.mlp_in = nn.Linear(2 * num_frequencies, dim)
        self.mlp_out = nn.Linear(dim, dim)

    def forward(self, signal: Tensor) -> Tensor:
        ramp = torch.arange(self.num_frequencies, device=signal.device, dtype=torch.float32) / self.num_frequencies
        angle = signal.float()[..., None] * torch.exp(-math.log(10_000) * ramp)
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.mlp_in.weight.dtype)
        return self.mlp_out(F.silu(self.mlp_in(waves)))  # type: ignore[no-any-return]


def signal_of(conditioning: str, level: Tensor) -> Tensor:
    """The input of the time embedding, computed from the noise level 1 - alpha."""
    if conditioning == "sigma":
        # Published nets were trained with alpha(1) = 1e-3, so sigma never exceeded -log 1e-3.
        return -torch.log1p(-level.clamp(max=1 - 1e-3))
    return 1000 * level
