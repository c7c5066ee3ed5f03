"""Rows of an autoregressive model in one network call, each at a place of its own with a cache of its own.

A row's beginning is read alone; from then on a step is one token for every row, where the network can (`step_rows`).
A row's result is the same bits in any company (see batching.py about the products).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.denoisers.network import Cache, Network, read_on
from unmask.objectives.terms import subs_log_probs
from unmask.sampling.predictor import Query
from unmask.server.batching import LEAST

FEWEST = 4  # lines of a product; one row by itself pays for all of them, so they are not more


class RowCache:
    """How many positions of a row have been read, and what the network keeps of them, if it keeps anything."""

    def __init__(self) -> None:
        self.length = 0
        self.state: Cache | None = None


@dataclass(frozen=True, kw_only=True)
class NextQuery(Query):
    """What comes next in a row, of which the cache remembers what stands before."""

    cache: RowCache

    @property
    def ready(self) -> bool:
        """Whether everything is remembered but the last token."""
        return self.cache.state is not None and 0 < self.cache.length == self.reach - 1


def next_groups(queries: Sequence[Query], denoiser: Network) -> Iterator[list[int]]:
    """Which questions share a call: all rows that are one token on. Others are alone, as are all rows of a network
    without `step_rows`.

    >>> list(next_groups([], network))  # doctest: +SKIP
    []
    """
    together: list[int] = []
    for i, query in enumerate(queries):
        assert isinstance(query, NextQuery)
        if query.ready and denoiser.can_step_rows():
            together.append(i)
        else:
            yield [i]
    if together:
        yield together


def answer_next(denoiser: Network, queries: Sequence[Query], device: torch.device) -> list[Tensor]:
    """log p(x_l | x_<l) of each row, [1, I]; the caches move on when all are answered."""
    asked = [query for query in queries if isinstance(query, NextQuery)]
    assert len(asked) == len(queries)
    if denoiser.can_step_rows() and all(query.ready for query in asked):
        ids_B = torch.stack([query.tokens_BL[0, query.cache.length - 1] for query in asked])
        caches = [query.cache for query in asked]
        states, at = [cache.state for cache in caches], [cache.length for cache in caches]
        h_MD = denoiser.step_rows(_whole(ids_B.to(device)), states, at)
    else:
        [query] = asked
        z_1L, cache = query.tokens_BL.to(device), query.cache
        if cache.length == 0:
            cache.state = denoiser.new_cache(*z_1L.shape)
        h_MD = _whole(read_on(denoiser, z_1L, cache.state, cache.length, query.reach))
    log_p_MI = subs_log_probs(denoiser.head(h_MD), denoiser.mask_id)
    for query in asked:
        query.cache.length = query.reach
    return [log_p_MI[i : i + 1].to(query.tokens_BL.device) for i, query in enumerate(asked)]


def _whole(lines: Tensor) -> Tensor:
    """Lines that are nobody's after the last: four at least, else whole eights, which share out evenly among threads,
    so that no product takes the way of few lines through the processor.

    >>> [len(_whole(torch.ones(n, 2))) for n in (1, 4, 5, 9)]
    [4, 4, 8, 16]
    """
    missing = max(0, FEWEST - len(lines)) if len(lines) <= FEWEST else -len(lines) % LEAST
    return torch.cat([lines, lines[-1:].expand(missing, *lines.shape[1:])]) if missing else lines
