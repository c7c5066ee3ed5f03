"""How the positions of a Llama-like network see each other: one class for each way of driving it.

`look` makes of the normed stream what each kept position has read; `kept` are the lines of the stream that go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.denoisers.dit.attention import KV, mask_at, merge_heads
from unmask.denoisers.dit.rotary import Rope, rope_at, rotate
from unmask.denoisers.flat_rows import gather_positions, take_rows
from unmask.denoisers.ragged import Ragged, ragged_attention

if TYPE_CHECKING:
    from unmask.denoisers.llama.block import Block


class Attention(Protocol):
    """What a block needs to know of how it is driven."""

    def look(self, block: Block, h: Tensor) -> Tensor: ...

    def kept(self, x: Tensor) -> Tensor: ...


@dataclass
class Full:
    """Every position of [B, L, D] at once. flat_N: only these go on after attention, [N, D]. back: the first so many
    rows see no later positions."""

    rope: Rope
    mask: Tensor | None
    causal: bool
    back: int = 0
    flat_N: Tensor | None = None

    def look(self, block: Block, h: Tensor) -> Tensor:
        q, (k, v) = heads_first(block.queries(h)), map(heads_first, block.keys_values(h))
        q, k, v = rotate(q, self.rope), each_head(rotate(k, self.rope), q), each_head(v, q)
        if not self.back:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.causal)
            return self.kept(merge_heads(o))
        parts = zip(*(t.tensor_split((self.back,)) for t in (q, k, v)), strict=True)
        both = [F.scaled_dot_product_attention(q, k, v, is_causal=i == 0) for i, (q, k, v) in enumerate(parts)]
        return self.kept(merge_heads(torch.cat(both)))

    def kept(self, x: Tensor) -> Tensor:
        return x if self.flat_N is None else take_rows(x.flatten(0, 1), self.flat_N)


@dataclass
class AtPositions:
    """Queries at the asked positions, keys and values everywhere; only those positions go on."""

    rope: Rope
    mask: Tensor | None
    causal: bool
    at_BK: Tensor

    def look(self, block: Block, h: Tensor) -> Tensor:
        q = rotate(heads_first(block.queries(self.kept(h))), rope_at(self.rope, self.at_BK))
        k, v = map(heads_first, block.keys_values(h))
        k, v = each_head(rotate(k, self.rope), q), each_head(v, q)
        mask = mask_at(self.mask, self.at_BK, k.shape[2], self.causal)
        return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    def kept(self, x: Tensor) -> Tensor:
        return gather_positions(x, self.at_BK)


@dataclass
class InRows:
    """Rows end to end without padding, [M, D]. flat_N: only these go on."""

    rope: Rope  # of each of the M positions, [M, 1, head_dim/2]
    rows: Ragged
    causal: bool
    flat_N: Tensor | None = None

    def look(self, block: Block, h: Tensor) -> Tensor:
        q, (k, v) = rotate(block.queries(h), self.rope), block.keys_values(h)
        k, v = each_head(rotate(k, self.rope), q), each_head(v, q)
        return self.kept(ragged_attention(q, k, v, self.rows, causal=self.causal).flatten(1))

    def kept(self, x: Tensor) -> Tensor:
        return x if self.flat_N is None else take_rows(x, self.flat_N)


@dataclass
class Cached:
    """Positions start..stop-1 of rows in lockstep, after those whose keys and values the cache holds."""

    rope: Rope
    kv: KV
    start: int
    stop: int
    mask: Tensor | None

    def look(self, block: Block, h: Tensor) -> Tensor:
        q, (k, v) = heads_first(block.queries(h)), map(heads_first, block.keys_values(h))
        keys, values = self.kv
        keys[:, :, self.start : self.stop], values[:, :, self.start : self.stop] = rotate(k, self.rope), v
        return read_cache(rotate(q, self.rope), keys[:, :, : self.stop], values[:, :, : self.stop], self.mask)

    def kept(self, x: Tensor) -> Tensor:
        return x


@dataclass
class RowCaches:
    """One position of each row, [M, 1, D], line b at at[b] of a row with a cache of its own.

    Rows look one after another, so nothing is copied or padded, and a row's result does not depend on the others'.
    Lines after the last cache are nobody's.
    """

    rope: Rope
    kvs: Sequence[KV]
    at: Sequence[int]

    def look(self, block: Block, h: Tensor) -> Tensor:
        q, (k, v) = heads_first(block.queries(h)), map(heads_first, block.keys_values(h))
        q, k = rotate(q, self.rope), rotate(k, self.rope)
        a_M1D = q.new_zeros(len(q), 1, q.shape[1] * q.shape[3])
        for b, (keys, values) in enumerate(self.kvs):
            stop = self.at[b] + 1
            keys[:, :, self.at[b] : stop], values[:, :, self.at[b] : stop] = k[b], v[b]
            a_M1D[b] = read_cache(q[b : b + 1], keys[:, :, :stop], values[:, :, :stop], None)[0]
        return a_M1D

    def kept(self, x: Tensor) -> Tensor:
        return x


@dataclass
class AtCounter:
    """One position of rows in lockstep, [B, 1, D], its number on the device; the cache is read up to `stop`, which a
    captured graph knows, and later positions are masked out."""

    rope: Rope
    kv: KV
    position_1: Tensor
    stop: int

    def look(self, block: Block, h: Tensor) -> Tensor:
        q, (k, v) = heads_first(block.queries(h)), map(heads_first, block.keys_values(h))
        keys, values = self.kv
        keys.index_copy_(2, self.position_1, rotate(k, self.rope).to(keys.dtype))
        values.index_copy_(2, self.position_1, v.to(values.dtype))
        seen_1L = torch.arange(self.stop, device=q.device) <= self.position_1[:, None]
        return read_cache(rotate(q, self.rope), keys[:, :, : self.stop], values[:, :, : self.stop], seen_1L)

    def kept(self, x: Tensor) -> Tensor:
        return x


def heads_first(y_BLHK: Tensor) -> Tensor:
    """[B, L, heads, head_dim] → [B, heads, L, head_dim]"""
    return y_BLHK.transpose(1, 2)


def each_head(kv: Tensor, q: Tensor) -> Tensor:
    """Keys or values for every query head, of [B, groups, L, head_dim] or [M, groups, head_dim]: copies, since no
    kernel for masks knows groups."""
    times = q.shape[1] // kv.shape[1]
    return kv if times == 1 else kv.repeat_interleave(times, dim=1)


def read_cache(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """What [B, heads, S, head_dim] read of a cache, [B, S, heads x head_dim]; mask [S, L].

    Of a single position the queries of a group stand where positions would: its keys and values are read once.
    """
    (B, H, S, K), G = q.shape, k.shape[1]
    if S > 1:
        k, v = each_head(k, q), each_head(v, q)
        return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    q = q.view(B, G, H // G, K)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(B, 1, H * K)
