"""An automaton's tables on a device: computed once, shared by all draws."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from unmask.constraints.automaton import Automaton


@dataclass(frozen=True, eq=False)
class Tables:
    """An automaton as tensors on one device; see Transitions for P and U.

    next_SC has -1 for no transition. set_P and to_P have one additional entry: a padding pair of weight 0.
    sums_UC[u, c] is 1 if class c is in set u. by_state: groups of states with similar numbers of transitions, and the
    pairs of each state (P: none). class_I: the class of each id that may occur in a span; word_I: of the ids that a
    network predicts.
    """

    class_I: Tensor
    word_I: Tensor
    next_SC: Tensor
    log_accept_S: Tensor
    from_P: Tensor
    to_P: Tensor
    set_P: Tensor
    sums_UC: Tensor
    by_state: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, automaton: Automaton, device: torch.device) -> Tables:
        """Create the tables, sharing the automaton's memory if the device can read it."""
        arcs, (S, C) = automaton.transitions, automaton.next_SC.shape

        def tensor(x: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "in beta state"
            sums_UC = torch.sparse_csr_tensor(
                tensor(arcs.start_U), tensor(arcs.class_E), torch.ones(len(arcs.class_E), device=device).double(),
                size=(arcs.num_sets, C), check_invariants=False,
            )  # fmt: skip
        class_I = tensor(automaton.class_I)
        return cls(
            class_I=class_I,
            word_I=class_I[: automaton.num_words],
            next_SC=tensor(automaton.next_SC),
            log_accept_S=tensor(automaton.accept_S).double().log(),
            from_P=tensor(arcs.from_P),
            to_P=tensor(np.append(arcs.to_P, S)),
            set_P=tensor(np.append(arcs.set_P, arcs.num_sets)),
            sums_UC=sums_UC,
            by_state=[(tensor(s), tensor(p)) for s, p in _by_state(arcs.from_P, S)],
        )

    @property
    def num_states(self) -> int:
        return len(self.log_accept_S)

    @property
    def num_sets(self) -> int:
        return int(self.sums_UC.shape[0])

    def after(self, next: Tensor) -> Tensor:
        """Entries of next_SC as indices into messages, where the last index, S, means no transition."""
        return next.long().masked_fill_(next < 0, self.num_states)


class _Shared:
    """The tables of one automaton, by device."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tables: dict[torch.device, Tables] = {}


_shared: WeakKeyDictionary[Automaton, _Shared] = WeakKeyDictionary()  # as long as the automaton is referenced
_shared_lock = threading.Lock()


def tables_of(automaton: Automaton, device: torch.device) -> Tables:
    """The automaton's tables, computed once for all rows, threads and requests."""
    with _shared_lock:
        shared = _shared.setdefault(automaton, _Shared())
    with shared.lock:
        if device not in shared.tables:
            shared.tables[device] = Tables.of(automaton, device)
        return shared.tables[device]


def _by_state(from_P: np.ndarray, S: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """States and their pairs, padded: one table if little is wasted, otherwise a table for each power of four."""
    count_S = np.bincount(from_P, minlength=S)
    most = max(1, int(count_S.max(initial=0)))
    size_S = np.full(S, most)
    if S * most > 4 * len(from_P) + 4096:
        size_S = 4 ** np.ceil(np.log(np.maximum(count_S, 1)) / np.log(4) - 1e-9).astype(int)
    start_S = np.cumsum(count_S) - count_S
    tables = []
    for size in np.unique(size_S):
        states = np.flatnonzero(size_S == size)
        column = np.arange(size)
        pairs = start_S[states, None] + column
        tables.append((states, np.where(column < count_S[states, None], pairs, len(from_P))))
    return tables
