"""The DiT's forward pass for use, not for training, on a GPU: the same numbers with about eight launches a block.

Between two matrix products stands one kernel. Biases, GELU and the residual sum ride along in the products.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.denoisers.dit.attention import KV, QKV, First, mask_at, merge_heads
from unmask.denoisers.dit.block import Block, run_block
from unmask.denoisers.dit.lines import Keep, Lines
from unmask.denoisers.dit.norm import Norm
from unmask.kernels.residual_norm import residual_norm
from unmask.kernels.rope import rope_

if TYPE_CHECKING:
    from unmask.denoisers.dit import DiTNetwork


def fused_trunk(
    net: DiTNetwork,
    z: Tensor,
    level_B: Tensor | None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    cond: Tensor | None = None,
    at_BK: Tensor | None = None,
) -> Tensor:
    """h_BLD, or h_BKD at `at_BK`: there, the last block asks with those positions alone."""
    B, L = z.shape[:2]
    x_BLD = net.embed(z)
    if z.is_floating_point():
        x_BLD = x_BLD.clone()  # the stream is added to in place
    stream = FusedStream(net.constants(z, level_B, cond), x_BLD.flatten(0, 1), L)
    see = Full(net.rope_table(L), B, mask, causal)
    last = len(net.layers) - 1
    for i, block in enumerate(net.layers):
        stream.block = i
        if i == last and at_BK is not None:
            run_block(block, stream, AtPositions.of(see, at_BK, L))
        else:
            run_block(block, stream, see)
    return stream.finish(net).view(B, -1, stream.x.shape[1])


def fused_decode(net: DiTNetwork, ids_B: Tensor, position_1: Tensor, kv: list[KV], stop: int) -> Tensor:
    """h_BD of one position of a causal network, its number on the device; keys and values go into the cache.

    The cache is read up to `stop` and masked after the position, so that one capture serves many positions.
    """
    B = len(ids_B)
    stream = FusedStream(net.constants(ids_B, None), net.embed(ids_B), 1)
    table = net.rope_table(kv[0][0].shape[2])
    mask = (torch.arange(stop, device=ids_B.device) <= position_1)[None, None, None]
    see = Full(table, B, mask, causal=False, position_M=position_1.repeat(B))
    for i, (block, block_kv) in enumerate(zip(net.layers, kv, strict=True)):
        stream.block = i
        run_block(block, stream, Captured(see, block_kv, position_1, stop))
    return stream.finish(net)


@dataclass
class Full:
    """Every position of [B x L, D] at once; position_M: where each line stands, if not in order."""

    table: tuple[Tensor, Tensor]
    batch: int
    mask: Tensor | None
    causal: bool
    position_M: Tensor | None = None
    keep: Keep | None = None
    lines: Lines = Lines()
    first: First = field(default_factory=First)

    def project(self, block: Block, h: Tensor) -> QKV:
        qkv = F.linear(h, block.qkv.weight)
        rope_(qkv, *self.table, 2 * block.heads, length=len(h) // self.batch, position_M=self.position_M)
        q, k, v = (_split_heads(y, self.batch, block.heads) for y in qkv.chunk(3, dim=-1))
        return block.normed(q, k, v)

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.causal)
        return merge_heads(o).flatten(0, 1)


@dataclass
class AtPositions:
    """Queries at the asked positions, keys and values everywhere; only those positions go on."""

    table: tuple[Tensor, Tensor]
    mask: Tensor | None
    at_BK: Tensor
    keep: Keep
    first: First
    lines: Lines = Lines()

    @classmethod
    def of(cls, see: Full, at_BK: Tensor, length: int) -> AtPositions:
        B = len(at_BK)
        offset = torch.arange(0, B * length, length, device=at_BK.device)[:, None]
        flat_M = (at_BK if B == 1 else at_BK + offset).reshape(-1)
        mask = mask_at(see.mask, at_BK, length, see.causal)
        return cls(see.table, mask, at_BK, Keep(Lines(at_BK=at_BK), flat_M), see.first)

    def project(self, block: Block, h: Tensor) -> QKV:
        B, D, heads = len(self.at_BK), h.shape[1], block.heads
        length = len(h) // B
        w_q, w_kv = block.qkv.weight[:D], block.qkv.weight[D:]
        assert self.keep.take_N is not None
        q_MD = F.linear(h.index_select(0, self.keep.take_N), w_q)
        rope_(q_MD, *self.table, heads, length=length, position_M=self.at_BK.reshape(-1))
        kv = F.linear(h, w_kv)
        rope_(kv, *self.table, heads, length=length)
        k, v = (_split_heads(y, B, heads) for y in kv.chunk(2, dim=-1))
        return block.normed(_split_heads(q_MD, B, heads), k, v)

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)).flatten(0, 1)


@dataclass
class Captured:
    """One position a row, its number on the device, with a cache that is read up to `stop`."""

    full: Full
    kv: KV
    position_1: Tensor
    stop: int
    keep: Keep | None = None
    lines: Lines = Lines()

    @property
    def first(self) -> First:
        return self.full.first

    def project(self, block: Block, h: Tensor) -> QKV:
        return self.full.project(block, h)

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.kv
        keys.index_copy_(2, self.position_1, k)
        values.index_copy_(2, self.position_1, v)
        return self.full.look(q, keys[:, :, : self.stop], values[:, :, : self.stop])


def _split_heads(y_MD: Tensor, batch: int, heads: int) -> Tensor:
    """[B x L, D] → [B, heads, L, head_dim]"""
    M, D = y_MD.shape
    return y_MD.view(batch, M // batch, heads, D // heads).transpose(1, 2)


class Constants:
    """The parts of the forward pass that depend only on the weights and the condition, for all blocks at once.

    Without conditioning: the prefix sums of the blocks' output biases, [blocks, D]. With it: every block's shifts,
    scales and gates, [blocks, C, 6D], and the last norm's, [C, 2D].
    """

    def __init__(self, net: DiTNetwork, c_BC: Tensor | None) -> None:
        self.biases: Tensor | None = None
        self.mod: Tensor | None = None
        self.final: Tensor | None = None
        self.place = (net.embed.weight.device, net.embed.weight.dtype)
        blocks = net.layers
        if c_BC is None or net.modulation is None:
            self.biases = torch.cumsum(torch.stack([b.mlp_out.bias for b in blocks]).float(), dim=0)
            return
        modulations = [b.modulation for b in blocks if b.modulation is not None]
        weight = torch.stack([m.weight for m in modulations])
        bias = torch.stack([m.bias for m in modulations])
        c_BC = c_BC.to(weight)
        self.mod = torch.baddbmm(bias[:, None], c_BC[None].expand(len(weight), -1, -1), weight.mT)
        self.final = net.modulation(c_BC)

    def copy_(self, other: Constants) -> None:
        """Take over new values in the old place, where a captured graph reads them."""
        for mine, new in ((self.biases, other.biases), (self.mod, other.mod), (self.final, other.final)):
            if mine is not None and new is not None:
                mine.copy_(new)


class FusedStream:
    """The residual stream x_MD and what is still to be added to it; `block` says whose constants hold.

    Without conditioning a product adds itself to x directly; its bias is the same for every row, so it is only
    remembered, and passed to whoever reads x. With conditioning the next norm's kernel adds the gated output.
    """

    def __init__(self, constants: Constants, x_MD: Tensor, rows_per_cond: int) -> None:
        self.constants, self.x, self.rows_per_cond = constants, x_MD, rows_per_cond
        self.block = 0
        self.y: Tensor | None = None
        self.gate: Tensor | None = None
        self.bias: Tensor | None = None

    def norm(self, norm: Norm, branch: int) -> Tensor:
        if self.constants.mod is None:
            return residual_norm(self.x, norm.weight, bias_D=self.bias)
        shift, scale, _ = self.constants.mod[self.block].chunk(6, dim=-1)[3 * branch : 3 * branch + 3]
        return self._modulated(norm.weight, shift, scale)

    def _modulated(self, weight: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        h = residual_norm(
            self.x,
            weight,
            bias_D=self.bias,
            y_MD=self.y,
            gate=self.gate,
            scale=scale,
            shift=shift,
            rows_per_cond=self.rows_per_cond,
        )
        self.y = self.gate = self.bias = None
        return h

    def hidden(self, linear: nn.Linear, h: Tensor) -> Tensor:
        # One product with bias and (tanh) GELU in it.
        return torch._addmm_activation(linear.bias, h, linear.weight.T, use_gelu=True)

    def add(self, linear: nn.Linear, h: Tensor, branch: int) -> None:
        if self.constants.mod is not None:
            gate = self.constants.mod[self.block].chunk(6, dim=-1)[3 * branch + 2]
            self.y, self.bias, self.gate = h @ linear.weight.T, linear.bias, gate
            return
        self.x.addmm_(h, linear.weight.T)
        if linear.bias is not None and self.constants.biases is not None:
            self.bias = self.constants.biases[self.block]

    def keep(self, keep: Keep) -> None:
        """What was pending the norm before has added, save a bias that all rows share."""
        assert keep.take_N is not None
        assert keep.lines.at_BK is not None
        self.x, self.rows_per_cond = self.x.index_select(0, keep.take_N), keep.lines.at_BK.shape[1]

    def finish(self, net: DiTNetwork) -> Tensor:
        if self.constants.final is None:
            return residual_norm(self.x, net.norm.weight, bias_D=self.bias)
        return self._modulated(net.norm.weight, *self.constants.final.chunk(2, dim=-1))
