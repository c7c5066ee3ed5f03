"""The DiT's step of rows that stand at different positions, each with a key-value cache of its own.

The matrix products take all rows together. Attention, which looks into a row's own cache, takes them one after another,
so nothing is copied or padded, and a row's result does not depend on the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.denoisers.dit.rotary import rotary, rotate
from unmask.denoisers.network import KVCache
from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.denoisers.dit import DiTNetwork


def step_rows(net: DiTNetwork, ids_M: Tensor, caches: Sequence[KVCache]) -> Tensor:
    """h_MD: `Network.step_rows` of a DiT."""
    at = [cache.length for cache in caches]
    _check(at, caches)
    M = len(ids_M)
    at += [0] * (M - len(at))  # the lines that are nobody's
    x_M1D = net.embed(ids_M).unsqueeze(1)
    rope = rotary(net._head_dim, torch.tensor(at, device=ids_M.device).unsqueeze(1), 1, ids_M.device, x_M1D.dtype)
    c_BC = net.condition(ids_M, None)
    for i, block in enumerate(net.layers):
        attn_in, attn_gate, mlp_in, mlp_gate = block._modulators(c_BC)
        q, k, v = (net.split_heads(y, M) for y in block.qkv(attn_in(block.norm1(x_M1D))).chunk(3, dim=-1))
        q, k = block.normed(rotate(q, rope)), block.normed(rotate(k, rope))
        seen = torch.zeros_like(x_M1D)
        for b, cache in enumerate(caches):
            keys, values = cache.blocks[i]
            stop = at[b] + 1
            keys[:, :, at[b] : stop], values[:, :, at[b] : stop] = k[b], v[b]
            o = F.scaled_dot_product_attention(q[b : b + 1], keys[:, :, :stop], values[:, :, :stop])
            seen[b] = o.transpose(1, 2).flatten(2)[0]
        x_M1D = x_M1D + attn_gate(block.out(seen))
        m_M1D = block.mlp_out(F.gelu(block.mlp_in(mlp_in(block.norm2(x_M1D))), approximate="tanh"))
        x_M1D = x_M1D + mlp_gate(m_M1D)
    return net._final(x_M1D, c_BC)[:, 0]


def _check(at: list[int], caches: Sequence[KVCache]) -> None:
    for length, cache in zip(at, caches, strict=True):
        room = cache.blocks[0][0].shape[2] if cache.blocks else 0
        if not 0 < length < room:
            raise UsageError(f"a row's cache holds {length} positions of {room}: begin it by trunk, with room for more")
