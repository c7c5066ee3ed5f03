"""The DiT's training pass on a GPU, for networks that are told no level: between two matrix products stands one kernel.

Nothing but those few kernels is compiled, so a run begins at once, and rows of any length share them. Lines are flat,
[M, D], with padding or without. What a branch adds to the residual stream is added by the next norm's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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
    *affines, final = _affines(net, c)
    pending = Pending()
    for i, block in enumerate(net.layers):
        how = (block, x, pending, affines[i], last if i == len(net.layers) - 1 else see)
        x, pending = checkpoint(_run, *how, use_reentrant=False) if net.checkpoint_activations else _run(*how)
    return pending.add_to(x, final[0], net.dropout if net.training else 0.0)[1]


class Affine(NamedTuple):
    """What a branch does to numbers besides its products, the same for all lines: the norm's weight and shift, and the
    gate of what it adds. None: no shift, no gate."""

    weight: Tensor
    shift: Tensor | None = None
    gate: Tensor | None = None


def _affines(net: DiTNetwork, c: Tensor | None) -> list[tuple[Affine, ...]]:
    """Of every block's two branches, and of the last norm; all modulations in one product."""
    norms = [(block.norm1.weight, block.norm2.weight) for block in net.layers]
    if c is None or net.modulation is None:
        return [*(tuple(map(Affine, pair)) for pair in norms), (Affine(net.norm.weight),)]
    modulations = [block.modulation for block in net.layers if block.modulation is not None]
    bias_N1C, weight_NCK = (
        torch.stack([m.bias for m in modulations])[:, None],
        torch.stack([m.weight for m in modulations]),
    )
    with torch.autocast(c.device.type, enabled=False):
        c_N1K = c.to(weight_NCK)[None].expand(len(modulations), -1, -1)
        shift, scale, gate = (
            torch.baddbmm(bias_N1C, c_N1K, weight_NCK.mT).view(len(modulations), 2, 3, -1).unbind(dim=2)
        )
        weight = torch.stack([w for pair in norms for w in pair]).view(scale.shape) * (1 + scale)
        last_shift, last_scale = net.modulation(c.to(weight))[0].chunk(2)
    parts = [t.flatten(0, 1).unbind() for t in (weight, shift, gate)]
    branches = [Affine(*three) for three in zip(*parts, strict=True)]
    final = Affine(net.norm.weight * (1 + last_scale), last_shift)
    return [*zip(branches[::2], branches[1::2], strict=True), (final,)]


class Pending(NamedTuple):
    """A branch that is still to be added to the residual stream: its product, the product's bias, its gate."""

    y: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None

    def add_to(self, x: Tensor, affine: Affine, dropout: float) -> tuple[Tensor, Tensor]:
        """The stream with the branch, and its norm."""
        how = {"bias_D": self.bias, "gate_D": self.gate, "shift_D": affine.shift}
        return add_norm(x, self.y, affine.weight, **how, dropout=dropout)


def _run(
    block: Block, x: Tensor, pending: Pending, affines: tuple[Affine, ...], see: Attention
) -> tuple[Tensor, Pending]:
    stream = TrainingStream(block, x, pending, affines)
    run_block(block, stream, see)
    return stream.x, stream.pending


class TrainingStream:
    """The residual stream x_MD, and the branch that is still to be added to it."""

    def __init__(self, block: Block, x: Tensor, pending: Pending, affines: tuple[Affine, ...]) -> None:
        self.x, self.pending, self.affines = x, pending, affines
        self.dropout = block.dropout if block.training else 0.0

    def norm(self, norm: Norm, branch: int) -> Tensor:
        self.x, h = self.pending.add_to(self.x, self.affines[branch], self.dropout)
        self.pending = Pending()
        return h

    def hidden(self, linear: nn.Linear, h: Tensor) -> Tensor:
        return linear_gelu(h, linear.weight, linear.bias)

    def keep(self, keep: Keep) -> None:
        self.x = keep.of(self.x)

    def add(self, linear: nn.Linear, h: Tensor, branch: int) -> None:
        self.pending = Pending(F.linear(h, linear.weight), linear.bias, self.affines[branch].gate)


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
