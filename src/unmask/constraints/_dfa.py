"""Deterministic automata over bytes, the form of constraints before they are combined with a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.constraints import MAX_STATES
from unmask.errors import Public, UsageError


@dataclass(frozen=True)
class Dfa:
    """next_SB[s, b]: the state after s and byte b, -1 for no transition. State 0 is the start."""

    next_SB: NDArray[np.int32]
    accept_S: NDArray[np.bool_]

    def reduced(self) -> Dfa:
        """An automaton of the same language without useless states, and with equivalent states merged."""
        next_SB, accept_S = reduce_states(self.next_SB, self.accept_S)
        return Dfa(next_SB, accept_S)


def same_columns(table: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group equal columns: the first index of each group, and the group of every column (by hash, then verified)."""
    factors = np.random.default_rng(0).integers(1 << 63, size=len(table), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    hashed = factors @ table.astype(np.uint64)
    _, first, kind = np.unique(hashed, return_index=True, return_inverse=True)
    if not np.array_equal(table[:, first][:, kind], table):
        _, first, kind = np.unique(table, axis=1, return_index=True, return_inverse=True)
    return first.astype(np.int64), kind.reshape(-1).astype(np.int64)


def reduce_states(
    next_SC: NDArray[np.int32], accept_S: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Drop unreachable and dead states, and merge states with equal transitions; state 0 stays first.

    Merging backwards from the end is always correct, and gives the minimal automaton for finite languages, but not
    always if there are loops.
    """
    # Equal columns stay equal, so one of each is enough.
    first, column_C = same_columns(next_SC)
    next_SC = next_SC[:, first]
    useful = np.union1d([0], np.flatnonzero(_reached(next_SC) & _leads_on(next_SC, accept_S)))
    next_SC, accept_S = _renumber(next_SC, accept_S, useful)
    while True:
        _, first, inverse = np.unique(
            np.column_stack([accept_S.astype(np.int32), next_SC]), axis=0, return_index=True, return_inverse=True
        )
        if len(first) == len(accept_S):
            return next_SC[:, column_C], accept_S
        order = np.argsort(first, kind="stable")  # by first occurrence, so the start remains state 0
        name_S = np.argsort(order)[inverse.reshape(-1)].astype(np.int32)
        kept = first[order]
        next_SC = np.where(next_SC[kept] < 0, np.int32(-1), name_S[next_SC[kept]])
        accept_S = accept_S[kept]


def _renumber(
    next_SC: NDArray[np.int32], accept_S: NDArray[np.bool_], kept: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    name_S = np.full(len(accept_S) + 1, -1, dtype=np.int32)  # one extra entry, so that -1 stays -1
    name_S[kept] = np.arange(len(kept))
    return name_S[next_SC[kept]], accept_S[kept]


def _reached(next_SC: NDArray[np.int32]) -> NDArray[np.bool_]:
    reached_S = np.zeros(len(next_SC), dtype=bool)
    frontier = np.array([0])
    while len(frontier):
        reached_S[frontier] = True
        successors = np.unique(next_SC[frontier])
        successors = successors[successors >= 0]
        frontier = successors[~reached_S[successors]]
    return reached_S


def _leads_on(next_SC: NDArray[np.int32], accept_S: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """States from which some text is accepted, found by following transitions backwards."""
    num = len(accept_S)
    row, column = np.nonzero(next_SC >= 0)
    arrows = np.unique(next_SC[row, column].astype(np.int64) * num + row)  # sorted by where they end
    starts = np.searchsorted(arrows, np.arange(num + 1) * num)
    good_S = np.zeros(num, dtype=bool)
    frontier = np.flatnonzero(accept_S)
    while len(frontier):
        good_S[frontier] = True
        before = [arrows[starts[s] : starts[s + 1]] % num for s in frontier]
        predecessors = np.unique(np.concatenate(before))
        frontier = predecessors[~good_S[predecessors]]
    return good_S


def explore(
    start: Hashable, step: Callable[[Any, int], Hashable | None], accepts: Callable[[Any], bool], letters: set[int]
) -> Dfa:
    """The automaton of a function: `step(state, byte)` is the next state or None. Bytes outside `letters` act alike."""
    other = next((b for b in range(256) if b not in letters), None)
    names: dict[Hashable, int] = {start: 0}
    queue = [start]
    rows: list[NDArray[np.int32]] = []
    for state in queue:
        row = np.full(256, -1, dtype=np.int32)
        for byte in ([] if other is None else [other]) + sorted(letters):
            after = step(state, byte)
            if after is None:
                target = -1
            else:
                if after not in names:
                    names[after] = len(queue)
                    queue.append(after)
                target = names[after]
            if byte == other:
                row[:] = target
            else:
                row[byte] = target
        rows.append(row)
        if len(queue) > MAX_STATES:
            raise UsageError(
                "the constraint has more than {most} states: give fewer or shorter phrases", most=Public(MAX_STATES)
            )
    return Dfa(np.stack(rows), np.array([accepts(state) for state in queue])).reduced()
