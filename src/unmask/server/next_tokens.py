"""Rows of an autoregressive model in one network call, each at its own position with its own cache.

The beginning of a row is read alone. From then on each step reads one token of every row, if the network supports that
(`step_rows`). A row's result is bitwise independent of the other rows (see batching.py on matrix products).
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

FEWEST = 4  # minimum lines of a product; a single row pays for all of them, so there are no more


class RowCache:
    """How many positions of a row have been read, and the network's cache for them, if any."""

    def __init__(self) -> None:
        self.length = 0
        self.state: Cache | None = None


@dataclass(frozen=True, kw_only=True)
class NextQuery(Query):
    """A query for the next token of a row; the cache holds the tokens before."""

    cache: RowCache

    @property
    def ready(self) -> bool:
        """Whether everything except the last token is cached."""
        return self.cache.state is not None and 0 < self.cache.length == self.reach - 1


def next_groups(queries: Sequence[Query], denoiser: Network) -> Iterator[list[int]]:
    """Which queries share a call: all rows that need one more token.

    Others run alone, as do all rows if the network has no `step_rows`.

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
    """log p(x_l | x_<l) of each row, [1, I]; the caches advance once all are answered."""
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
    """Pad with unused lines: to at least four, beyond that to a multiple of eight, which divides evenly among threads.

    So no product uses the processor's code path for few lines.

    >>> [len(_whole(torch.ones(n, 2))) for n in (1, 4, 5, 9)]
    [4, 4, 8, 16]
    """
    missing = max(0, FEWEST - len(lines)) if len(lines) <= FEWEST else -len(lines) % LEAST
    return torch.cat([lines, lines[-1:].expand(missing, *lines.shape[1:])]) if missing else lines
