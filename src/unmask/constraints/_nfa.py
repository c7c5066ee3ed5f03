"""Nondeterministic automata over bytes, with conditions on a position in the text, and their determinisation.

A condition such as $ or \\b depends on the previous character, which is known, and on what follows, which is not yet.
So each state records what may follow it, and has no transition for other bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from unmask.constraints._dfa import Dfa

# What may follow a position: nothing, a final line end, a line end and more, a word character, any other character.
END, LAST_LINE, LINE, WORD, OTHER = (1 << i for i in range(5))
ANYTHING = END | LAST_LINE | LINE | WORD | OTHER
START = 0  # the beginning of the text, as a kind of previous character besides LINE, WORD and OTHER
MAX_CODE = 0x10FFFF
_WORD_RANGES = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_KINDS = [LINE if b == 0x0A else WORD if any(lo <= b <= hi for lo, hi in _WORD_RANGES) else OTHER for b in range(256)]
_SIZES = ((0x00, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, MAX_CODE))  # no surrogates

Ranges = Sequence[tuple[int, int]]  # of characters, (first, last) of each range
Guard = tuple[tuple[int, int], ...]  # (kind of previous character, what may follow); other kinds do not match
_States = frozenset[tuple[int, int]]  # (state, what may follow)


class TooLarge(Exception):
    """More states or steps than allowed."""


class Nfa:
    """States are numbers; 0 is the start, `final` the end.

    >>> nfa = Nfa()
    >>> nfa.read(0, [(97, 99)], nfa.final)
    >>> nfa.determinised(max_states=10, max_steps=100).accept_S.tolist()
    [False, True]
    """

    def __init__(self) -> None:
        self._bytes: list[list[tuple[int, int, int]]] = [[], []]
        self._free: list[list[tuple[int, Guard | None]]] = [[], []]
        self.final = 1
        self._guarded = False

    def state(self) -> int:
        self._bytes.append([])
        self._free.append([])
        return len(self._bytes) - 1

    def go(self, here: int, there: int, guard: Guard | None = None) -> None:
        """Add a transition that reads nothing, allowed where the guard holds."""
        self._free[here].append((there, guard))
        self._guarded |= guard is not None

    def read(self, here: int, ranges: Ranges, there: int) -> None:
        """Add a transition that reads one of these characters, as UTF-8."""
        known: dict[tuple[tuple[int, int], ...], int] = {(): there}

        def before(tail: tuple[tuple[int, int], ...]) -> int:
            if tail not in known:
                known[tail] = self.state()
                self._bytes[known[tail]].append((*tail[0], before(tail[1:])))
            return known[tail]

        for lo, hi in ranges:
            for parts in _utf8(lo, hi):
                self._bytes[here].append((*parts[0], before(parts[1:])))

    def splice(self, here: int, dfa: Dfa, there: int) -> None:
        """Add transitions that read any text accepted by `dfa`."""
        names = [self.state() for _ in dfa.accept_S]
        self.go(here, names[0])
        for name, row, accepts in zip(names, dfa.next_SB, dfa.accept_S, strict=True):
            edges = np.flatnonzero(np.diff(row, prepend=-2, append=-2)).tolist()
            self._bytes[name] += [(lo, hi - 1, names[row[lo]]) for lo, hi in itertools.pairwise(edges) if row[lo] >= 0]
            if accepts:
                self.go(name, there)

    def determinised(self, *, max_states: int, max_steps: int) -> Dfa:
        """The deterministic automaton of the same language; raises TooLarge if it exceeds the limits."""
        before = functools.cache(self._transitions)
        start = self._reached(0, ANYTHING, START)
        names: dict[_States, int] = {start: 0}
        queue, rows, steps = [start], [], 0
        for states in queue:
            row: NDArray[np.int32] = np.full(256, -1, dtype=np.int32)
            transitions = [one for state in states for one in before(state)]
            cuts = sorted({cut for lo, hi, _ in transitions for cut in (lo, hi + 1)})
            place = {cut: i for i, cut in enumerate(cuts)}
            targets: list[list[_States]] = [[] for _ in cuts]
            for lo, hi, after in transitions:
                for i in range(place[lo], place[hi + 1]):
                    targets[i].append(after)
                    steps += 1
            for i, several in enumerate(targets):
                after = several[0].union(*several[1:]) if several else frozenset()
                if not after:
                    continue
                if after not in names:
                    names[after] = len(queue)
                    queue.append(after)
                row[cuts[i] : cuts[i + 1]] = names[after]
                steps += len(after)
            rows.append(row)
            if len(queue) > max_states or steps > max_steps:
                raise TooLarge
        accept_S = [any(state == self.final and may & END for state, may in states) for states in queue]
        return Dfa(np.stack(rows), np.array(accept_S)).reduced()

    def _reached(self, state: int, may: int, before: int) -> _States:
        """The final state and the states with reading transitions that are reachable from here without reading."""
        reached, queue = {(state, may)}, [(state, may)]
        for here, left in queue:
            for there, guard in self._free[here]:
                still = left if guard is None else left & dict(guard).get(before, 0)
                if still and (there, still) not in reached:
                    reached.add((there, still))
                    queue.append((there, still))
        return frozenset(item for item in reached if self._bytes[item[0]] or item[0] == self.final)

    def _transitions(self, state: tuple[int, int]) -> list[tuple[int, int, _States]]:
        """(first byte, last byte, states after them)."""
        here, may = state
        if not self._guarded:
            return [(lo, hi, self._reached_cached(there, ANYTHING, OTHER)) for lo, hi, there in self._bytes[here]]
        transitions = []
        for first, last, there in self._bytes[here]:
            for lo, hi in _alike(first, last):
                kind = _KINDS[lo]
                left = _left(may, kind)
                if left:
                    transitions.append((lo, hi, self._reached_cached(there, left, kind)))
        return transitions

    @functools.cached_property
    def _reached_cached(self) -> functools._lru_cache_wrapper[_States]:
        return functools.cache(self._reached)


def _left(may: int, kind: int) -> int:
    """What may follow a character of this kind, if `may` may follow the position before it; 0 if it is not allowed.

    >>> _left(ANYTHING, WORD) == ANYTHING, _left(LAST_LINE | END, LINE) == END, _left(END, WORD)
    (True, True, 0)
    """
    if kind != LINE:
        return ANYTHING if may & kind else 0
    return (END if may & LAST_LINE else 0) | (ANYTHING & ~END if may & LINE else 0)


def _alike(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Split a range of bytes into parts of one kind each."""
    lo = first
    for b in range(first, last + 1):
        if b == last or _KINDS[b + 1] != _KINDS[lo]:
            yield lo, b
            lo = b + 1


def _utf8(lo: int, hi: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """A range of characters as sequences of byte ranges.

    >>> [*_utf8(0x61, 0x7FF)]
    [((97, 127),), ((194, 223), (128, 191))]
    """
    for first, last in _SIZES:
        a, b = max(lo, first), min(hi, last)
        if a <= b:
            yield from _same_size(chr(a).encode(), chr(b).encode())


def _same_size(a: bytes, b: bytes) -> Iterator[tuple[tuple[int, int], ...]]:
    if len(a) == 1 or a[0] == b[0]:
        tails = [()] if len(a) == 1 else _same_size(a[1:], b[1:])
        yield from (((a[0], b[0]), *tail) for tail in tails)
        return
    least, most = b"\x80" * (len(a) - 1), b"\xbf" * (len(a) - 1)
    lo, hi = a[0], b[0]
    if a[1:] != least:
        yield from (((lo, lo), *tail) for tail in _same_size(a[1:], most))
        lo += 1
    if b[1:] != most:
        yield from (((hi, hi), *tail) for tail in _same_size(least, b[1:]))
        hi -= 1
    if lo <= hi:
        yield from (((lo, hi), *tail) for tail in _same_size(least, most))
