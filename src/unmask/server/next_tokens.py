"""Rows of an autoregressive model in one network call, each at a place of its own with a cache of its own.

A row's beginning is read alone; from then on a step is one token for every row. The matrix products take all rows
together. Attention, which looks into a row's own cache, takes them one after another, so nothing is copied or padded,
and a row's result is the same bits in any company (see batching.py about the products).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.denoisers._network import KVCache, Network
from unmask.denoisers._rotary import rotary, rotate
from unmask.denoisers.dit import DiTNetwork
from unmask.objectives._terms import subs_log_probs
from unmask.predictor import Query
from unmask.server.batching import LEAST

FEWEST = 4  # lines of a product; one row by itself pays for all of them, so they are not more


@dataclass(frozen=True, kw_only=True)
class NextQuery(Query):
    """What comes next in a row, of which the cache remembers what stands before."""

    cache: KVCache

    @property
    def ready(self) -> bool:
        """Whether everything is remembered but the last token."""
        return 0 < self.cache.length == self.reach - 1


def next_groups(queries: Sequence[Query], denoiser: Network) -> Iterator[list[int]]:
    """Which questions share a call: all rows that are one token on. Others are alone, as are all rows of a network that
    reads its rows in lockstep only.

    >>> list(next_groups([], network))  # doctest: +SKIP
    []
    """
    together: list[int] = []
    for i, query in enumerate(queries):
        assert isinstance(query, NextQuery)
        if query.ready and isinstance(denoiser, DiTNetwork):
            together.append(i)
        else:
            yield [i]
    if together:
        yield together


def answer_next(denoiser: Network, queries: Sequence[Query], device: torch.device) -> list[Tensor]:
    """log p(x_l | x_<l) of each row, [1, I]; the caches move on when all are answered."""
    asked = [query for query in queries if isinstance(query, NextQuery)]
    assert len(asked) == len(queries)
    if isinstance(denoiser, DiTNetwork) and all(query.ready for query in asked):
        h_BD = _one_token_on(denoiser, asked, device)
    else:
        [query] = asked
        query.cache.stop = query.reach
        h_BD = denoiser.trunk(query.tokens_BL.to(device), cache=query.cache)[:, -1]
    log_p_BI = subs_log_probs(denoiser.head(_whole(h_BD)), denoiser.mask_id)
    for query in asked:
        query.cache.length = query.reach
    return [log_p_BI[i : i + 1].to(query.tokens_BL.device) for i, query in enumerate(asked)]


def _one_token_on(network: DiTNetwork, asked: Sequence[NextQuery], device: torch.device) -> Tensor:
    """h_BD at each row's next position. The new keys and values are put into the rows' caches; until `length` says that
    they are there nobody reads them, so that a call that fails can be made again."""
    at_B = torch.tensor([query.cache.length for query in asked])
    ids_B = torch.stack([query.tokens_BL[0, query.cache.length - 1] for query in asked])
    x_B1D = network.embed(_whole(ids_B.to(device))).unsqueeze(1)
    positions_B1 = _whole(at_B.to(device)).unsqueeze(1)
    rope = rotary(network._head_dim, positions_B1, 1, device, x_B1D.dtype)
    c_BC = network.condition(positions_B1, None)
    for i, block in enumerate(network.layers):
        attn_in, attn_gate, mlp_in, mlp_gate = block._modulators(c_BC)
        q, k, v = (block._split(y) for y in block.qkv(attn_in(block.norm1(x_B1D))).chunk(3, dim=-1))
        q, k = block.asked(rotate(q, rope)), block.normed(rotate(k, rope))
        seen = torch.zeros_like(x_B1D)
        for b, query in enumerate(asked):
            keys, values = query.cache.blocks[i]
            at, stop = query.cache.length, query.cache.length + 1
            keys[:, :, at:stop], values[:, :, at:stop] = k[b], v[b]
            o = F.scaled_dot_product_attention(q[b : b + 1], keys[:, :, :stop], values[:, :, :stop])
            seen[b] = o.transpose(1, 2).flatten(2)[0]
        x_B1D = x_B1D + attn_gate(block.out(seen))
        m_B1D = block.mlp_out(F.gelu(block.mlp_in(mlp_in(block.norm2(x_B1D))), approximate="tanh"))
        x_B1D = x_B1D + mlp_gate(m_B1D)
    return network._final(x_B1D, c_BC)[: len(asked), 0]


def _whole(lines: Tensor) -> Tensor:
    """Lines that are nobody's behind the last: four at least, else whole eights, which share out evenly among threads,
    so that no product takes the way of few lines through the processor.

    >>> [len(_whole(torch.ones(n, 2))) for n in (1, 4, 5, 9)]
    [4, 4, 8, 16]
    """
    missing = max(0, FEWEST - len(lines)) if len(lines) <= FEWEST else -len(lines) % LEAST
    return torch.cat([lines, lines[-1:].expand(missing, *lines.shape[1:])]) if missing else lines
