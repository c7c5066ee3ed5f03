"""The Llama-like network with key-value caches: rows in lockstep, rows at places of their own, one captured column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.denoisers.dit.attention import KV
from unmask.denoisers.llama.attention import AtCounter, Cached, RowCaches
from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.denoisers.llama import LlamaNetwork

KVCache = list[KV]  # of every block, [B, groups, length, head_dim]


def cached_trunk(net: LlamaNetwork, z: Tensor, cache: KVCache, span: tuple[int, int]) -> Tensor:
    """Positions start..stop-1 of every row, in lockstep: `Network.trunk` with a cache."""
    start, stop = span
    room = cache[0][0].shape[2]
    if not 0 <= start < stop <= min(z.shape[1], room):
        raise UsageError(f"a cache of {room} positions was asked for those from {start} to {stop} of {z.shape[1]}")
    x_BND = net.embed(net.read(z)[:, start:stop])
    cos, sin = net.rope(None, stop, x_BND)
    mask = None
    if stop - start > 1:
        steps = torch.arange(stop, device=z.device)
        mask = steps[None, :] <= steps[start:, None]
    for block, kv in zip(net.blocks, cache, strict=True):
        x_BND = block(x_BND, Cached((cos[..., start:, :], sin[..., start:, :]), kv, start, stop, mask))
    h_BND: Tensor = net.norm(x_BND)
    return h_BND


def step_rows(net: LlamaNetwork, ids_M: Tensor, caches: Sequence[KVCache], at: Sequence[int]) -> Tensor:
    """h_MD: `Network.step_rows`. The matrix products take all rows together, attention one after another."""
    for position, cache in zip(at, caches, strict=True):
        room = cache[0][0].shape[2]
        if not 0 < position < room:
            raise UsageError(f"position {position} of a cache of {room}: begin a row by trunk, with room for more")
    M = len(ids_M)
    x_M1D = net.embed(ids_M).unsqueeze(1)
    position_M = torch.tensor([*at, *[0] * (M - len(at))], device=ids_M.device)
    rope = net.rope(position_M.unsqueeze(1), 1, x_M1D)
    for i, block in enumerate(net.blocks):
        x_M1D = block(x_M1D, RowCaches(rope, [cache[i] for cache in caches], at))
    h_MD: Tensor = net.norm(x_M1D)[:, 0]
    return h_MD


def decode(net: LlamaNetwork, ids_B: Tensor, position_1: Tensor, cache: KVCache, stop: int) -> Tensor:
    """h_BD: `Network.decode`, in plain torch that never asks the device for a number."""
    ids_B = torch.where(position_1 > 0, ids_B, net.begin_id)  # whoever calls knows the mask alone
    x_B1D = net.embed(ids_B).unsqueeze(1)
    rope = net.rope(position_1.unsqueeze(0), 1, x_B1D)
    for block, kv in zip(net.blocks, cache, strict=True):
        x_B1D = block(x_B1D, AtCounter(rope, kv, position_1, stop))
    h_BD: Tensor = net.norm(x_B1D)[:, 0]
    return h_BD
