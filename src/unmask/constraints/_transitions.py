"""The transitions between an automaton's states, and the token classes on them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.errors import Public, UsageError

MAX_PAIRS = 1 << 19  # pairs of states with a transition between them
_CELLS = 1 << 22  # states × classes that are sorted at a time


@dataclass(frozen=True, eq=False)
class Transitions:
    """P: sorted pairs of states with a transition from one to the other. U: the distinct sets of classes on these
    transitions; in repetitive patterns many pairs share a set.

    Set u has the classes class_E[start_U[u] : start_U[u + 1]]; start_U has one more entry than there are sets.
    """

    from_P: NDArray[np.int64]
    to_P: NDArray[np.int64]
    set_P: NDArray[np.int64]
    start_U: NDArray[np.int32]
    class_E: NDArray[np.int32]

    @classmethod
    def of(cls, next_SC: NDArray[np.int32]) -> Transitions:
        """
        >>> arcs = Transitions.of(np.array([[1, 1, -1], [0, 0, 1]], dtype=np.int32))
        >>> [*zip(arcs.from_P.tolist(), arcs.to_P.tolist(), arcs.set_P.tolist())], arcs.class_E.tolist()
        ([(0, 1, 0), (1, 0, 0), (1, 1, 1)], [0, 1, 2])
        """
        S, C = next_SC.shape
        narrow: type[np.signedinteger[Any]] = np.int16 if S < 1 << 15 else np.int32  # narrow types sort faster
        sets: dict[bytes, int] = {}
        pairs: list[NDArray[np.int64]] = []
        names: list[int] = []
        num = max(1, _CELLS // max(1, C))
        for lo in range(0, S, num):
            to_SC = next_SC[lo : lo + num].astype(narrow)
            order_SC = np.argsort(to_SC, axis=1, kind="stable").astype(np.int32)
            to_SC = np.take_along_axis(to_SC, order_SC, axis=1)
            row_E, column_E = np.nonzero(to_SC >= 0)
            pair_E = (row_E + lo) * S + to_SC[row_E, column_E]
            class_E = order_SC[row_E, column_E]
            start = np.flatnonzero(np.diff(pair_E, prepend=-1))
            pairs.append(pair_E[start])
            edges = [*start.tolist(), len(pair_E)]
            for a, b in itertools.pairwise(edges):
                names.append(sets.setdefault(class_E[a:b].tobytes(), len(sets)))
            if len(names) > MAX_PAIRS:
                raise UsageError(
                    "the constraint has more than {most} ways between its {states} states: use a simpler one",
                    most=Public(MAX_PAIRS),
                    states=Public(S),
                )
        pair_P = np.concatenate(pairs)
        size_U = np.array([0, *map(len, sets)], dtype=np.int64) // np.dtype(np.int32).itemsize
        return cls(
            from_P=pair_P // S,
            to_P=pair_P % S,
            set_P=np.array(names, dtype=np.int64),
            start_U=np.cumsum(size_U).astype(np.int32),
            class_E=np.frombuffer(bytearray().join(sets), dtype=np.int32),
        )

    @property
    def num_pairs(self) -> int:
        return len(self.to_P)

    @property
    def num_sets(self) -> int:
        return len(self.start_U) - 1
