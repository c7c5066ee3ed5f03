"""The DiT's training pass on a GPU: between two matrix products stands one kernel.

Nothing but those few kernels is compiled, so a run begins at once, and rows of any length share them. Lines are flat,
[M, D], with padding or without. What a branch adds to the residual stream is added by the next norm's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.denoisers.dit.attention import QKV, Attention, First, merge_heads
from unmask.denoisers.dit.block import Block, attend, run_branches
from unmask.denoisers.dit.lines import Keep, Lines
from unmask.denoisers.dit.norm import Norm
from unmask.denoisers.ragged import Ragged, ragged_attention
from unmask.kernels.add_norm import add_norm
from unmask.kernels.linear_gelu import linear_gelu
from unmask.kernels.rope_norm import rope_norm

if TYPE_CHECKING:
    from unmask.denoisers.dit import DiTNetwork


def fused_training_trunk(
    net: DiTNetwork,
    z: Tensor,
    flat_N: Tensor,
    c: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    back: int = 0,
    rows: Ragged | None = None,
) -> Tensor:
    """h_ND at the flat positions, of z [B, L] (or vectors [B, L, E]), or with `rows` of z_M without padding.

    After the last block's attention only those positions are computed. c [1 or B, C] is the input of adaLN. In the
    first `back` rows no position sees later ones.
    """
    x = net.embed(z)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    see: Full | InRows
    if rows is None:
        see = Full(net.rope_table(z.shape[1]), len(z), causal, mask, back)
        x, row_N = x.flatten(0, 1), flat_N // z.shape[1]
    else:
        see, row_N = InRows(net.rope_table(rows.shape[1]), rows, causal), rows.row_M[flat_N]
    layers, keep = net.layers, Keep(Lines(row_N=row_N), flat_N)
    modulations = _modulations(net, c)
    run = _checkpointed if net.checkpoint_activations else _plainly

    def to_last_attention(x: Tensor, *modulations: Tensor) -> tuple[Tensor, Tensor]:
        """The stream before the last block's branches, and what its attention reads: all that has a fixed shape."""
        affines, pending = _affines(layers, modulations), Pending()
        for block, own in zip(layers[:-1], affines, strict=False):
            x, pending = run(_block, block, x, pending, own, see)
        x, a = run(_attention, layers[-1], x, pending, affines[-1], see)
        return x, a

    plain = mask is None and rows is None and not net.checkpoint_activations
    if net.recorder is not None and plain and torch.is_grad_enabled():
        how = (len(z), causal, back, net.training, torch.is_autocast_enabled(x.device.type))
        x, a = net.recorder(to_last_attention, (x, *modulations), net.blocks, how)
    else:
        x, a = to_last_attention(x, *modulations)
    (own,) = _affines(layers[-1:], tuple(t[-2:] for t in modulations))
    last: tuple[Tensor, Pending] = run(_rest, layers[-1], x, a, own, keep)
    x, pending = last
    _, h_ND = pending.add_to(x, _final(net, c).spread(keep.lines), net.dropout if net.training else 0.0)
    return h_ND


def _plainly(part: Callable[..., Any], *inputs: Any) -> Any:
    return part(*inputs)


def _checkpointed(part: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(part, *inputs, use_reentrant=False)


class Affine(NamedTuple):
    """What a branch does to numbers besides its products: the norm's weight and shift, and the gate of what it adds,
    [D], or [B, D] where each row has its own. None: no shift, no gate."""

    weight: Tensor
    shift: Tensor | None = None
    gate: Tensor | None = None

    def spread(self, lines: Lines) -> Affine:
        """For a flat list of lines."""
        if self.weight.ndim == 1:
            return self
        return Affine(*(None if t is None else lines.spread(t) for t in self))  # type: ignore[arg-type]


def _modulations(net: DiTNetwork, c: Tensor | None) -> tuple[Tensor, ...]:
    """Weight, shift and gate [branches, B, D] of all blocks' branches, in one product; nothing without adaLN."""
    modulations = [block.modulation for block in net.layers if block.modulation is not None]
    if c is None or not modulations:
        return ()
    N, B, D = len(modulations), len(c), net.width
    bias_N1W, weight_NWC = (torch.stack([getattr(m, name) for m in modulations]) for name in ("bias", "weight"))
    norms = torch.stack([norm.weight for block in net.layers for norm in (block.norm1, block.norm2)])
    with torch.autocast(c.device.type, enabled=False):
        c_NBC = c.to(weight_NWC)[None].expand(N, -1, -1)
        mod = torch.baddbmm(bias_N1W[:, None], c_NBC, weight_NWC.mT).view(N, B, 2, 3, D)
        shift, scale, gate = (t.flatten(0, 1) for t in mod.transpose(1, 2).unbind(dim=3))
        return norms[:, None] * (1 + scale), shift, gate


def _affines(layers: list[Block], modulations: tuple[Tensor, ...]) -> list[tuple[Affine, ...]]:
    """Of each block's two branches."""
    if not modulations:
        return [(Affine(block.norm1.weight), Affine(block.norm2.weight)) for block in layers]
    branches = [Affine(*three) for three in zip(*(t.unbind() for t in modulations), strict=True)]
    return list(zip(branches[::2], branches[1::2], strict=True))


def _final(net: DiTNetwork, c: Tensor | None) -> Affine:
    """Of the last norm."""
    if c is None or net.modulation is None:
        return Affine(net.norm.weight)
    with torch.autocast(c.device.type, enabled=False):
        shift, scale = net.modulation(c.to(net.norm.weight)).chunk(2, dim=-1)
        return Affine(net.norm.weight * (1 + scale), shift)


class Pending(NamedTuple):
    """A branch that is still to be added to the residual stream: its product, the product's bias, its gate."""

    y: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None

    def add_to(self, x: Tensor, affine: Affine, dropout: float) -> tuple[Tensor, Tensor]:
        """The stream with the branch, and its norm."""
        how = {"bias_D": self.bias, "gate_D": self.gate, "shift_D": affine.shift}
        return add_norm(x, self.y, affine.weight, **how, dropout=dropout)


def _block(
    block: Block, x: Tensor, pending: Pending, affines: tuple[Affine, ...], see: Attention
) -> tuple[Tensor, Pending]:
    x, a = _attention(block, x, pending, affines, see)
    return _rest(block, x, a, affines, None)


def _attention(
    block: Block, x: Tensor, pending: Pending, affines: tuple[Affine, ...], see: Attention
) -> tuple[Tensor, Tensor]:
    stream = TrainingStream(block, x, pending, affines)
    a = attend(block, stream, see)
    return stream.x, a


def _rest(block: Block, x: Tensor, a: Tensor, affines: tuple[Affine, ...], keep: Keep | None) -> tuple[Tensor, Pending]:
    stream = TrainingStream(block, x, Pending(), affines)
    if keep is not None:
        a = keep.of(a)
    run_branches(block, stream, a, keep)
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
        self.affines = tuple(affine.spread(keep.lines) for affine in self.affines)

    def add(self, linear: nn.Linear, h: Tensor, branch: int) -> None:
        self.pending = Pending(F.linear(h, linear.weight), linear.bias, self.affines[branch].gate)


@dataclass(frozen=True)
class Full:
    """Rows of one length, [B x L, D]."""

    table: tuple[Tensor, Tensor]
    batch: int
    causal: bool
    mask: Tensor | None
    back: int = 0
    keep: Keep | None = None
    lines: Lines = Lines()
    first: First = field(default_factory=First)

    def project(self, block: Block, h: Tensor) -> QKV:
        parts = rope_norm(block.qkv(h), *self.table, heads=block.heads, rows=self.batch, norm=block.qk_norm)
        q, k, v = (y_BLHK.transpose(1, 2) for y_BLHK in parts)
        return q, k, v

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.back:
            # split in one go: so is the gradient put together
            sizes = [self.back, len(q) - self.back]
            pairs = zip(*(torch.split(t, sizes) for t in (q, k, v)), (True, self.causal), strict=True)
            read = [F.scaled_dot_product_attention(q, k, v, is_causal=causal) for q, k, v, causal in pairs]
            return torch.cat([merge_heads(o) for o in read]).flatten(0, 1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.causal)
        return merge_heads(o).flatten(0, 1)


@dataclass(frozen=True)
class InRows:
    """Rows end to end without padding, [M, D]."""

    table: tuple[Tensor, Tensor]
    rows: Ragged
    causal: bool
    keep: Keep | None = None
    lines: Lines = Lines()
    first: First = field(default_factory=First)

    def project(self, block: Block, h: Tensor) -> QKV:
        position_M = self.rows.position_M
        parts = rope_norm(
            block.qkv(h), *self.table, heads=block.heads, rows=1, norm=block.qk_norm, position_M=position_M
        )
        q, k, v = (y_1MHK[0] for y_1MHK in parts)
        return q, k, v

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ragged_attention(q, k, v, self.rows, causal=self.causal).flatten(1)
