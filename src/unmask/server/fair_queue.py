"""Whose rows go a step next: every request gets the same share of the engine's work, however many rows it brings.

Work is counted in tokens that the network reads, so a row of 256 tokens takes as much of its request's share as sixteen
rows of 16. The request that has had least goes first; another joins the step as long as it has had no more than any
beside it. So a short row takes many steps while a long one takes one, and rows that cost alike all go together. (This
is start-time fair queueing; a request that comes begins at the share of the one that has had least, not at zero.)
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

LEAST_WORK = 16  # of a row's step: what the shortest row is padded to
LEAST_ROOM = 256  # work of a step at least, however slow the network is
MOST_ROOM = 1 << 15
STEP_SECONDS = 0.05  # that a step should take at most: whoever comes waits for the end of one


class Sharer(Protocol):
    """A request in the engine: what it has had, and its rows that wait."""

    spent: float

    @property
    def next_work(self) -> Work | None:
        """The row that is next; None where none waits."""

    def take_next(self) -> int:
        """The number of that row, which waits no more."""


T = TypeVar("T", bound=Sharer)


class Shares:
    """What a step may cost, and whose rows are in it.

    >>> Shares(num_ids=258).room
    256
    """

    def __init__(self, num_ids: int) -> None:
        self.num_ids, self.room = num_ids, LEAST_ROOM
        self._now = 0.0  # what the request that has had least has had

    def joins(self, sharer: Sharer) -> None:
        """A request that comes, or comes again, has had as much as the one here that has had least."""
        sharer.spent = max(sharer.spent, self._now)

    def took(self, work: int, seconds: float) -> None:
        """A step has been measured: the next may have about as much work as fits the time that a step should take. What
        a small one took tells little of a large one, save that it was slow."""
        if 2 * work >= self.room or seconds > STEP_SECONDS:
            fits = work * STEP_SECONDS / max(seconds, 1e-9)
            fits = min(max(fits, self.room / 2), self.room * 2)
            self.room = int(min(max(fits, LEAST_ROOM), MOST_ROOM))

    def pick(self, sharers: Iterable[T], most: int, *, beside: bool = True) -> tuple[list[tuple[T, int]], int]:
        """The rows of the next step, at most so many, and what work they are for the engine's thread. beside: whether
        the thread beside it is free for what takes one of them long afterwards.

        Of rows that must be alone with the network there is only one, as everybody waits for it, and one of those that
        take long afterwards. The rest of them hold nobody up.
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
        """What a row's next step costs: tokens read, lines of the vocabulary answered, and what it does with them."""
        lines = sum(query.at_RK.numel() for query in work.questions)
        read = sum(map(_tokens, work.questions)) + lines * self.num_ids // CELLS
        return max(LEAST_WORK, read + work.extra)


def _spent(sharer: Sharer) -> float:
    return sharer.spent


def _kind(work: Work) -> str:
    """With whom its next step can be."""
    return "alone" if not work.questions else "beside" if work.beside else "together"


def _tokens(query: Query) -> int:
    """What the network reads of a question: the padded row, or what its cache does not yet hold."""
    if isinstance(query, NextQuery):
        return query.reach - query.cache.length
    return bucket(query.tokens_BL.shape[1])
