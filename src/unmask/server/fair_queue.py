"""Which rows take the next step: every request gets an equal share of the engine's work, however many rows it has.

Work is counted in tokens that the network reads, so a row of 256 tokens uses as much of its request's share as sixteen
rows of 16. The request with the least work so far goes first; another one joins the step if it has had no more work
than any in it. So a short row takes many steps while a long one takes one, and rows of equal cost go together. (This is
start-time fair queueing; a new request starts at the share of the one with the least, not at zero.)
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from typing import Protocol, TypeVar

from unmask.sampling.predictor import Query
from unmask.server.batching import bucket
from unmask.server.limits import CELLS
from unmask.server.next_tokens import NextQuery
from unmask.server.rows import Work

LEAST_WORK = 16  # minimum work of a row's step: the padded length of the shortest row
LEAST_ROOM = 256  # minimum work of a step, however slow the network is
MOST_ROOM = 1 << 15
STEP_SECONDS = 0.05  # target duration of a step: a new request waits for the current one to end


class Sharer(Protocol):
    """A request in the engine: the work it has had, and its waiting rows."""

    spent: float

    @property
    def next_work(self) -> Work | None:
        """The next row; None if none waits."""

    def take_next(self) -> int:
        """Remove that row from the queue; returns its number."""


T = TypeVar("T", bound=Sharer)


class Shares:
    """Decides how much work a step may do, and which rows are in it.

    >>> Shares(num_ids=258).room
    256
    """

    def __init__(self, num_ids: int) -> None:
        self.num_ids, self.room = num_ids, LEAST_ROOM
        self._now = 0.0  # work of the request that has had the least

    def joins(self, sharer: Sharer) -> None:
        """A request that joins, or rejoins, starts with the work of the one here that has had the least."""
        sharer.spent = max(sharer.spent, self._now)

    def took(self, work: int, seconds: float) -> None:
        """Record a step's duration: the next step gets about the work that fits the target duration.

        A small step says little about a large one, unless it was slow.
        """
        if 2 * work >= self.room or seconds > STEP_SECONDS:
            fits = work * STEP_SECONDS / max(seconds, 1e-9)
            fits = min(max(fits, self.room / 2), self.room * 2)
            self.room = int(min(max(fits, LEAST_ROOM), MOST_ROOM))

    def pick(self, sharers: Iterable[T], most: int, *, beside: bool = True) -> tuple[list[tuple[T, int]], int]:
        """The rows of the next step, at most `most`, and their work for the engine's thread.

        beside: whether the second thread is free for a row with lengthy work after its answers. At most one row that
        needs the network alone is taken, because everybody waits for it, and one with lengthy work afterwards. Further
        rows of these kinds delay nobody.
        """
        kinds: dict[str, list[T]] = {"together": [], "alone": [], "beside": []}
        for sharer in sharers:
            if sharer.next_work is not None:
                kinds[_kind(sharer.next_work)].append(sharer)
        alone, apart = ([min(kinds[kind], key=_spent)] if kinds[kind] else [] for kind in ("alone", "beside"))
        line = kinds["together"] + alone + (apart if beside else [])
        self._now = max(self._now, min(map(_spent, line), default=0.0))
        order = itertools.count()
        heap = [(sharer.spent, next(order), sharer) for sharer in line]
        heapq.heapify(heap)
        aside = min((_spent(sharer) for sharer in kinds["alone"] if sharer not in alone), default=math.inf)
        batch: list[tuple[T, int]] = []
        total = 0
        while heap and len(batch) < most:
            spent, _, sharer = heapq.heappop(heap)
            work = sharer.next_work
            assert work is not None
            price = self.price(work)
            here = price - work.extra if work.beside else price
            ahead = spent > min(aside, heap[0][0] if heap else math.inf)
            if batch and (ahead or total + here > self.room):
                break
            batch.append((sharer, sharer.take_next()))
            total += here
            sharer.spent = spent + price
            if sharer.next_work is not None and _kind(sharer.next_work) == "together":
                heapq.heappush(heap, (sharer.spent, next(order), sharer))
            else:
                aside = min(aside, sharer.spent)
        return batch, total

    def price(self, work: Work) -> int:
        """The cost of a row's next step: tokens read, lines of logits, and its own work on them."""
        lines = sum(query.at_RK.numel() for query in work.questions)
        read = sum(map(_tokens, work.questions)) + lines * self.num_ids // CELLS
        return max(LEAST_WORK, read + work.extra)


def _spent(sharer: Sharer) -> float:
    return sharer.spent


def _kind(work: Work) -> str:
    """Which rows its next step can be batched with."""
    return "alone" if not work.questions else "beside" if work.beside else "together"


def _tokens(query: Query) -> int:
    """The number of tokens that the network reads for a query: the padded row, or what is not cached yet."""
    if isinstance(query, NextQuery):
        return query.reach - query.cache.length
    return bucket(query.tokens_BL.shape[1])
