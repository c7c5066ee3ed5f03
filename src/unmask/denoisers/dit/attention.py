"""How a block's positions see each other: one class for each way of driving the network in plain torch.

`project` makes queries, keys (both rotated, and normed where the block says so) and values of the normed stream; `look`
makes of them what each position reads. fused.py and fused_training.py have the ways that use kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask import kernels
from unmask.denoisers.dit.lines import Keep, Lines
from unmask.denoisers.dit.rotary import Rope, rope_at, rotate, tables
from unmask.denoisers.flat_rows import gather_positions
from unmask.denoisers.ragged import Ragged, ragged_attention

if TYPE_CHECKING:
    from unmask.denoisers.dit.block import Block

QKV = tuple[Tensor, Tensor, Tensor]
KV = tuple[Tensor, Tensor]  # keys and values [B, heads, length, head_dim] of one block


class First:
    """The first block's values in a pass, which later ones mix into theirs where the network has value_residual."""

    v: Tensor | None = None


class Attention(Protocol):
    """The interface through which a block runs attention."""

    @property
    def first(self) -> First:
        """The same for all blocks of a pass."""

    @property
    def lines(self) -> Lines:
        """What the lines of the stream are when it enters the block."""

    @property
    def keep(self) -> Keep | None:
        """The lines that go on after attention; `look` answers for those alone. None: all."""

    def project(self, block: Block, h: Tensor) -> QKV: ...

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass
class Full:
    """Every position of [B, L, D] at once; `keep`: after attention a flat list of them, [N, D]."""

    rope: Rope
    mask: Tensor | None
    causal: bool
    keep: Keep | None = None
    lines: Lines = Lines()
    first: First = field(default_factory=First)

    def project(self, block: Block, h: Tensor) -> QKV:
        qkv_BLW = block.qkv(h)
        if len(self.rope[0]) == 1 and kernels.fit(qkv_BLW):
            from unmask.kernels.split_rope import split_rope

            parts = split_rope(qkv_BLW.flatten(0, 1), *tables(self.rope))
            q, k, v = (block.split_heads(y.view(h.shape)) for y in parts)
            return block.normed(q, k, v)
        return rotated(block, qkv_BLW, self.rope)

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a_BLD = merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.causal))
        return a_BLD if self.keep is None else self.keep.of(a_BLD)


@dataclass
class AtPositions:
    """Queries at the asked positions, keys and values everywhere; only those positions go on."""

    rope: Rope
    mask: Tensor | None
    causal: bool
    at_BK: Tensor
    first: First
    lines: Lines = Lines()

    @property
    def keep(self) -> Keep:
        return Keep(Lines(at_BK=self.at_BK))

    def project(self, block: Block, h: Tensor) -> QKV:
        D = h.shape[-1]
        w_q, w_kv = block.qkv.weight[:D], block.qkv.weight[D:]
        q_BKD = F.linear(gather_positions(h, self.at_BK), w_q)
        q = rotate(block.split_heads(q_BKD), rope_at(self.rope, self.at_BK))
        k, v = (block.split_heads(y) for y in F.linear(h, w_kv).chunk(2, dim=-1))
        return block.normed(q, rotate(k, self.rope), v)

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = mask_at(self.mask, self.at_BK, k.shape[2], self.causal)
        return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@dataclass
class InRows:
    """Rows end to end without padding, [M, D]."""

    rope: Rope  # of each of the M positions
    rows: Ragged
    causal: bool
    keep: Keep | None
    lines: Lines
    first: First = field(default_factory=First)

    def project(self, block: Block, h: Tensor) -> QKV:
        qkv_MW = block.qkv(h)
        if kernels.fit(qkv_MW):
            from unmask.kernels.split_rope import split_rope

            parts = split_rope(qkv_MW, self.rope[0].squeeze(1), self.rope[1].squeeze(1))
            q, k, v = (y.view(len(y), block.heads, -1) for y in parts)
            return block.normed(q, k, v)
        q, k, v = (y.unflatten(-1, (block.heads, -1)) for y in qkv_MW.chunk(3, dim=-1))
        return block.normed(rotate(q, self.rope), rotate(k, self.rope), v)

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a_MD = ragged_attention(q, k, v, self.rows, causal=self.causal).flatten(1)
        return a_MD if self.keep is None else self.keep.of(a_MD)


@dataclass
class Cached:
    """Positions start..stop-1 of rows in lockstep, after those whose keys and values the cache holds."""

    rope: Rope
    kv: KV
    start: int
    stop: int
    mask: Tensor | None
    first: First
    keep: Keep | None = None
    lines: Lines = Lines()

    def project(self, block: Block, h: Tensor) -> QKV:
        return rotated(block, block.qkv(h), self.rope)

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.kv
        keys[:, :, self.start : self.stop], values[:, :, self.start : self.stop] = k, v
        k, v = keys[:, :, : self.stop], values[:, :, : self.stop]
        causal = self.start == 0 and self.stop > 1
        return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=causal))


@dataclass
class RowCaches:
    """One position of each row, [M, 1, D], line b at at[b] of a row with a cache of its own.

    Rows are processed one after another, so nothing is copied or padded, and a row's result does not depend on the
    others. Lines after the last cache are padding.
    """

    rope: Rope
    kvs: Sequence[KV]
    at: Sequence[int]
    first: First
    keep: Keep | None = None
    lines: Lines = Lines()

    def project(self, block: Block, h: Tensor) -> QKV:
        return rotated(block, block.qkv(h), self.rope)

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a_M1D = q.new_zeros(len(q), 1, q.shape[1] * q.shape[3])
        for b, (keys, values) in enumerate(self.kvs):
            stop = self.at[b] + 1
            keys[:, :, self.at[b] : stop], values[:, :, self.at[b] : stop] = k[b], v[b]
            o = F.scaled_dot_product_attention(q[b : b + 1], keys[:, :, :stop], values[:, :, :stop])
            a_M1D[b] = merge_heads(o)[0]
        return a_M1D


def rotated(block: Block, qkv_BLW: Tensor, rope: Rope) -> QKV:
    """Queries and keys with their rotary positions, and values, [B, heads, L, head_dim] each."""
    q, k, v = (block.split_heads(y) for y in qkv_BLW.chunk(3, dim=-1))
    return block.normed(rotate(q, rope), rotate(k, rope), v)


def merge_heads(o_BHLK: Tensor) -> Tensor:
    """[B, heads, L, head_dim] → [B, L, D]"""
    return o_BHLK.transpose(1, 2).flatten(2)


def mask_at(mask: Tensor | None, at_BK: Tensor, length: int, causal: bool) -> Tensor | None:
    """What the asked positions may see, [B, 1, K, L] or broadcast to it, of a mask for all of them."""
    if causal:
        return torch.arange(length, device=at_BK.device)[None, None, None, :] <= at_BK[:, None, :, None]
    if mask is None or mask.shape[2] == 1:
        return mask
    return torch.take_along_dim(mask, at_BK[:, None, :, None], dim=2)
