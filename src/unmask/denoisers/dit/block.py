"""A block of the DiT: attention and MLP. This file defines what it computes; drivers define how each part runs."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask import kernels
from unmask.denoisers.dit.attention import QKV, Attention, First
from unmask.denoisers.dit.dropout import hashed_dropout
from unmask.denoisers.dit.lines import Keep, Lines
from unmask.denoisers.dit.norm import Norm

Values = Literal["own", "first", "mixed"]  # first: kept for the later blocks, which mix them in


def whose_values(value_residual: bool, blocks: int) -> list[Values]:
    """Which values each block reads.

    >>> whose_values(True, 3)
    ['first', 'mixed', 'mixed']
    """
    later: list[Values] = ["mixed"] * (blocks - 1)
    return ["first", *later] if value_residual else ["own"] * blocks


class Stream(Protocol):
    """The residual stream: how it is normed and modulated, and how a branch is gated and added to it."""

    def norm(self, norm: Norm, branch: int) -> Tensor:
        """The input of branch 0 (attention) or 1 (MLP): the normed stream, shifted and scaled by adaLN."""

    def hidden(self, linear: nn.Linear, h: Tensor) -> Tensor:
        """The MLP's hidden layer, gelu(linear(h))."""

    def keep(self, keep: Keep) -> None:
        """Keep only these lines from here on."""

    def add(self, linear: nn.Linear, h: Tensor, branch: int) -> None:
        """x += gate x linear(h)"""


def run_block(block: Block, stream: Stream, see: Attention) -> None:
    """x += out(attention(norm1(x))), then x += mlp_out(gelu(mlp_in(norm2(x))))."""
    run_branches(block, stream, attend(block, stream, see), see.keep)


def attend(block: Block, stream: Stream, see: Attention) -> Tensor:
    """The output of attention at each position, or at those that it keeps."""
    q, k, v = see.project(block, stream.norm(block.norm1, 0))
    return see.look(q, k, block.mixed(v, see.first))


def run_branches(block: Block, stream: Stream, a: Tensor, keep: Keep | None) -> None:
    """Add the output of attention, and then that of the MLP, to the stream."""
    if keep is not None:
        stream.keep(keep)
    stream.add(block.out, a, 0)
    stream.add(block.mlp_out, stream.hidden(block.mlp_in, stream.norm(block.norm2, 1)), 1)


class Block(nn.Module):
    """Attention and MLP, each pre-normed; with conditioning, adaLN shifts, scales and gates both."""

    def __init__(
        self, hidden: int, heads: int, cond_dim: int, dropout: float, qk_norm: bool, values: Values = "own"
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.qk_norm, self.values = heads, dropout, qk_norm, values
        self.norm1 = Norm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = Norm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)
        self.modulation = nn.Linear(cond_dim, 6 * hidden) if cond_dim else None
        self.value_share = nn.Parameter(torch.full((1,), 0.5)) if values == "mixed" else None

    def forward(self, x: Tensor, c: Tensor | None, see: Attention) -> Tensor:
        stream = PlainStream(self, x, c, see.lines)
        run_block(self, stream, see)
        return stream.x

    def normed(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        """Queries and keys [..., head_dim] with qk_norm. A rotation keeps lengths, so it may come before or after."""
        if not self.qk_norm:
            return q, k, v
        q, k = (F.rms_norm(x, x.shape[-1:], eps=1e-6) for x in (q, k))
        return q, k, v

    def mixed(self, v: Tensor, first: First) -> Tensor:
        """The values that attention reads: this block's, or a learned mixture with those of the first block."""
        if self.values == "first":
            first.v = v
        if self.value_share is None:
            return v
        assert first.v is not None
        if not kernels.fit(v) or torch.compiler.is_compiling():
            return torch.lerp(v, first.v, self.value_share.to(v.dtype))
        from unmask.kernels.mix_values import mix_values

        # [B, heads, L, head_dim] transposed to contiguous lines, or [lines, heads, head_dim]
        v, kept = (t.transpose(1, 2) if t.ndim == 4 else t for t in (v, first.v))
        v_MD, kept_MD = (t.flatten(-2).flatten(0, -2) for t in (v, kept))
        mixed_MD, kept_MD = mix_values(v_MD, kept_MD, self.value_share)
        mixed, kept = mixed_MD.view(v.shape), kept_MD.view(v.shape)
        mixed, first.v = (t.transpose(1, 2) if t.ndim == 4 else t for t in (mixed, kept))
        return mixed

    def split_heads(self, y_BLD: Tensor) -> Tensor:
        """[B, L, D] → [B, heads, L, head_dim]"""
        return y_BLD.view(*y_BLD.shape[:2], self.heads, -1).transpose(1, 2)


class PlainStream:
    """The stream in plain torch, differentiable: for training, and wherever there are no kernels."""

    def __init__(self, block: Block, x: Tensor, c: Tensor | None, lines: Lines) -> None:
        self.block, self.x, self.c = block, x, c
        self.modulation = self._modulation(lines)

    def _modulation(self, lines: Lines) -> tuple[Tensor, ...] | None:
        """Shift, scale and gate of both branches for each line; None without adaLN."""
        if self.block.modulation is None or self.c is None:
            return None
        return lines.spread(self.block.modulation(self.c)).chunk(6, dim=-1)

    def norm(self, norm: Norm, branch: int) -> Tensor:
        h: Tensor = norm(self.x)
        if self.modulation is None:
            return h
        shift, scale, _ = self.modulation[3 * branch : 3 * branch + 3]
        return h * (1 + scale) + shift

    def hidden(self, linear: nn.Linear, h: Tensor) -> Tensor:
        return F.gelu(linear(h), approximate="tanh")

    def keep(self, keep: Keep) -> None:
        self.x, self.modulation = keep.of(self.x), self._modulation(keep.lines)

    def add(self, linear: nn.Linear, h: Tensor, branch: int) -> None:
        y = self._drop(linear(h))
        self.x = self.x + (y if self.modulation is None else y * self.modulation[3 * branch + 2])

    def _drop(self, x: Tensor) -> Tensor:
        block = self.block
        if block.training and block.dropout and torch.compiler.is_compiling():
            return hashed_dropout(x, block.dropout)
        return F.dropout(x, block.dropout, block.training)
