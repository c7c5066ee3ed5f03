"""A block of the Llama-like denoiser: attention with grouped keys and values, and SwiGLU, each pre-normed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from unmask.denoisers.llama.norm import RMSNorm

if TYPE_CHECKING:
    from unmask.denoisers.llama.attention import Attention


@dataclass(frozen=True)
class Dims:
    """The sizes of a network, all decided. groups: of query heads, each of which shares one head of keys and values."""

    hidden: int
    blocks: int
    heads: int
    groups: int
    head_dim: int
    inner: int


class Block(nn.Module):
    """x += out(attention(norm1(x))), then x += down(silu(gate) * up), where gate and up are maps of norm2(x)."""

    def __init__(
        self, dims: Dims, *, eps: float, qkv_bias: bool, out_bias: bool, mlp_bias: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = dims.heads, dims.groups, dims.head_dim
        self.norm1 = RMSNorm(dims.hidden, eps)
        self.q = nn.Linear(dims.hidden, dims.heads * dims.head_dim, bias=qkv_bias)
        self.kv = nn.Linear(dims.hidden, 2 * dims.groups * dims.head_dim, bias=qkv_bias)
        self.q_norm = RMSNorm(dims.head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(dims.head_dim, eps) if qk_norm else None
        self.out = nn.Linear(dims.heads * dims.head_dim, dims.hidden, bias=out_bias)
        self.norm2 = RMSNorm(dims.hidden, eps)
        self.gate_up = nn.Linear(dims.hidden, 2 * dims.inner, bias=mlp_bias)
        self.down = nn.Linear(dims.inner, dims.hidden, bias=mlp_bias)

    def forward(self, x: Tensor, see: Attention) -> Tensor:
        a = see.look(self, self.norm1(x))
        x = see.kept(x) + self.out(a)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        y: Tensor = x + self.down(F.silu(gate) * up)
        return y

    def queries(self, h: Tensor) -> Tensor:
        """[..., heads, head_dim] of the normed stream, not yet rotated."""
        q: Tensor = self.q(h).unflatten(-1, (self.heads, self.head_dim))
        return q if self.q_norm is None else self.q_norm(q)

    def keys_values(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """[..., groups, head_dim] each, the keys not yet rotated."""
        k, v = self.kv(h).unflatten(-1, (2, self.groups, self.head_dim)).unbind(-3)
        return (k if self.k_norm is None else self.k_norm(k)), v
