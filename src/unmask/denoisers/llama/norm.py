"""RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / root mean square of x, times a weight; no mean is taken off, nothing added."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        # Of two precisions torch takes a slow way; the mean is summed in float32 at least, whatever x is. Autocast may
        # answer in float32, which the products and attention after it would only convert again.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)
