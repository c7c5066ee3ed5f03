"""The DiT with key-value caches: rows in lockstep, and rows at different positions with caches of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.denoisers.dit.attention import KV, Cached, First, RowCaches
from unmask.denoisers.dit.lines import Lines
from unmask.denoisers.dit.rotary import rotary
from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.denoisers.dit import DiTNetwork

KVCache = list[KV]  # of every block


def cached_trunk(net: DiTNetwork, z: Tensor, cache: KVCache, span: tuple[int, int]) -> Tensor:
    """Positions start..stop-1 of every row, in lockstep: `Network.trunk` with a cache."""
    start, stop = span
    room = cache[0][0].shape[2]
    if not 0 <= start < stop <= min(z.shape[1], room):
        raise UsageError(f"a cache of {room} positions was asked for those from {start} to {stop} of {z.shape[1]}")
    x_BND = net.embed(net.shift(z)[:, start:stop])
    cos, sin = rotary(net.head_dim, None, stop, x_BND.device, x_BND.dtype)
    mask = None
    if start > 0 and stop - start > 1:
        steps = torch.arange(stop, device=z.device)
        mask = steps[None, :] <= steps[start:, None]
    c = net.condition(z, None)
    first = First()
    for block, kv in zip(net.blocks, cache, strict=True):
        x_BND = block(x_BND, c, Cached((cos[..., start:, :], sin[..., start:, :]), kv, start, stop, mask, first))
    return net.final(x_BND, c, Lines())


def step_rows(net: DiTNetwork, ids_M: Tensor, caches: Sequence[KVCache], at: Sequence[int]) -> Tensor:
    """h_MD: `Network.step_rows`. The matrix products take all rows together, attention one after another."""
    for position, cache in zip(at, caches, strict=True):
        room = cache[0][0].shape[2]
        if not 0 < position < room:
            raise UsageError(f"position {position} of a cache of {room}: begin a row by trunk, with room for more")
    M = len(ids_M)
    x_M1D = net.embed(ids_M).unsqueeze(1)
    position_M = torch.tensor([*at, *[0] * (M - len(at))], device=ids_M.device)
    rope = rotary(net.head_dim, position_M.unsqueeze(1), 1, ids_M.device, x_M1D.dtype)
    c = net.condition(ids_M, None)
    first = First()
    for i, block in enumerate(net.blocks):
        x_M1D = block(x_M1D, c, RowCaches(rope, [cache[i] for cache in caches], at, first))
    return net.final(x_M1D, c, Lines())[:, 0]
