"""Rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]


def rotary(head_dim: int, positions_BL: Tensor | None, length: int, device: torch.device, dtype: torch.dtype) -> Rope:
    """cos and sin of the rotary angles, [1 or B, 1, L, head_dim/2], in float32 or better; shared by all blocks."""
    inv_freq = 10_000 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    return turned(inv_freq, positions_BL, length, dtype)


def turned(inv_freq: Tensor, positions_BL: Tensor | None, length: int, dtype: torch.dtype) -> Rope:
    """`rotary` by frequencies of one's own, [head_dim/2] radians a position."""
    dtype = torch.promote_types(dtype, torch.float32)
    if positions_BL is None:
        positions_BL = torch.arange(length, device=inv_freq.device)[None]
    angle = positions_BL[:, None, :, None].float() * inv_freq
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BHLK: Tensor, rope: Rope) -> Tensor:
    """Half-split rotary embedding: the first half of the head is the real part, the second the imaginary."""
    cos, sin = rope
    a, b = x_BHLK.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x_BHLK.dtype)


def tables(rope: Rope) -> Rope:
    """[L, head_dim/2] each, for rows that all begin at position 0."""
    return rope[0][0, 0], rope[1][0, 0]


def rope_at(rope: Rope, at_BK: Tensor) -> Rope:
    def pick(table: Tensor) -> Tensor:
        return torch.take_along_dim(table[:, 0], at_BK[..., None], dim=1).unsqueeze(1)

    return pick(rope[0]), pick(rope[1])


def rope_of(rope: Rope, position_M: Tensor) -> Rope:
    """[M, 1, head_dim/2] each, for a flat list of positions."""
    cos, sin = tables(rope)
    return cos[position_M, None], sin[position_M, None]
