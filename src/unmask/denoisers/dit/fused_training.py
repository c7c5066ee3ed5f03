"""The DiT's training pass on a GPU, for networks that are told no level: between two matrix products stands one kernel.

Nothing but those few kernels is compiled, so a run begins at once, and rows of any length share them. Lines are flat,
[M, D], with padding or without. What a branch adds to the residual stream is added by the next norm's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.denoisers.dit.attention import QKV, Attention, merge_heads
from unmask.denoisers.dit.block import Block, run_block
from unmask.denoisers.dit.lines import Keep, Lines
from unmask.denoisers.dit.norm import Norm
from unmask.denoisers.ragged import Ragged, ragged_attention
from unmask.kernels.add_norm import add_norm
from unmask.kernels.linear_gelu import linear_gelu
from unmask.kernels.rope_norm import rope_norm

if TYPE_CHECKING:
    from unmask.denoisers.dit import DiTNetwork


def fused_training_trunk(net: DiTNetwork, z: Tensor, flat_N: Tensor, rows: Ragged | None = None) -> Tensor:
    """h_ND at the flat positions, of z [B, L] (or vectors [B, L, E]), or with `rows` of z_M without padding.

    After the last block's attention only those positions go on.
    """
    x = net.embed(z)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    c = net.condition(z, None)
    see: Full | InRows
    if rows is None:
        see = Full(net.rope_table(z.shape[1]), len(z), net.causal)
        x = x.flatten(0, 1)
    else:
        see = InRows(net.rope_table(rows.shape[1]), rows, net.causal)
    last = see.keeping(Keep(Lines(), flat_N))
    pending: Branch = (None, None)
    for i, block in enumerate(net.layers):
        now = last if i == len(net.layers) - 1 else see
        if net.checkpoint_activations:
            x, pending = checkpoint(_run, block, x, pending, c, now, use_reentrant=False)
        else:
            x, pending = _run(block, x, pending, c, now)
    shift, scale = (None, None) if net.modulation is None or c is None else net.modulation(c)[0].float().chunk(2)
    y, bias = pending
    how = {"bias_D": bias, "shift_D": shift}
    return add_norm(x, y, _scaled(net.norm.weight, scale), **how, dropout=net.dropout if net.training else 0.0)[1]


Branch = tuple[Tensor | None, Tensor | None]  # a product y_MD and its bias, still to be added


def _run(block: Block, x: Tensor, pending: Branch, c: Tensor | None, see: Attention) -> tuple[Tensor, Branch]:
    stream = TrainingStream(block, x, pending, c)
    run_block(block, stream, see)
    return stream.x, stream.pending


class TrainingStream:
    """The residual stream x_MD, and the branch that is still to be added to it.

    One condition for all lines is part of the weights: a norm's scale and a branch's gate are factors of them.
    """

    def __init__(self, block: Block, x: Tensor, pending: Branch, c: Tensor | None) -> None:
        self.x, self.pending = x, pending
        self.dropout = block.dropout if block.training else 0.0
        self.modulation: tuple[Tensor | None, ...] = (None,) * 6
        if block.modulation is not None and c is not None:
            self.modulation = block.modulation(c)[0].float().chunk(6)

    def norm(self, norm: Norm, branch: int) -> Tensor:
        shift, scale = self.modulation[3 * branch : 3 * branch + 2]
        y, bias = self.pending
        how = {"bias_D": bias, "shift_D": shift}
        self.x, h = add_norm(self.x, y, _scaled(norm.weight, scale), **how, dropout=self.dropout)
        self.pending = (None, None)
        return h

    def hidden(self, linear: nn.Linear, h: Tensor) -> Tensor:
        return linear_gelu(h, linear.weight, linear.bias)

    def keep(self, keep: Keep) -> None:
        self.x = keep.of(self.x)

    def add(self, linear: nn.Linear, h: Tensor, branch: int) -> None:
        gate = self.modulation[3 * branch + 2]
        if gate is None:
            self.pending = F.linear(h, linear.weight), linear.bias
        else:
            bias = None if linear.bias is None else gate * linear.bias
            self.pending = F.linear(h, gate[:, None] * linear.weight), bias


def _scaled(weight_D: Tensor, scale_D: Tensor | None) -> Tensor:
    return weight_D if scale_D is None else weight_D * (1 + scale_D)


@dataclass(frozen=True)
class Full:
    """Rows of one length, [B x L, D]."""

    table: tuple[Tensor, Tensor]
    batch: int
    causal: bool
    keep: Keep | None = None
    lines: Lines = Lines()

    def keeping(self, keep: Keep) -> Full:
        return Full(self.table, self.batch, self.causal, keep)

    def project(self, block: Block, h: Tensor) -> QKV:
        parts = rope_norm(block.qkv(h), *self.table, heads=block.heads, rows=self.batch, norm=block.qk_norm)
        q, k, v = (y_BLHK.transpose(1, 2) for y_BLHK in parts)
        return q, k, v

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a = merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)).flatten(0, 1)
        return a if self.keep is None else self.keep.of(a)


@dataclass(frozen=True)
class InRows:
    """Rows end to end without padding, [M, D]."""

    table: tuple[Tensor, Tensor]
    rows: Ragged
    causal: bool
    keep: Keep | None = None
    lines: Lines = Lines()

    def keeping(self, keep: Keep) -> InRows:
        return InRows(self.table, self.rows, self.causal, keep)

    def project(self, block: Block, h: Tensor) -> QKV:
        position_M = self.rows.position_M
        parts = rope_norm(
            block.qkv(h), *self.table, heads=block.heads, rows=1, norm=block.qk_norm, position_M=position_M
        )
        q, k, v = (y_1MHK[0] for y_1MHK in parts)
        return q, k, v

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a = ragged_attention(q, k, v, self.rows, causal=self.causal).flatten(1)
        return a if self.keep is None else self.keep.of(a)
