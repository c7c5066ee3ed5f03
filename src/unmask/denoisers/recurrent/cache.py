"""What a causal recurrent network keeps of rows that it has read: as much for a long row as for a short one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.denoisers.recurrent.mixer import State
from unmask.errors import UsageError


class States(NamedTuple):
    """Those of all blocks: [blocks, B, taps - 1, E] and [blocks, B, N, E]."""

    inputs: Tensor
    scans: Tensor

    def of(self, block: int) -> State:
        return State(self.inputs[block], self.scans[block])

    @classmethod
    def stack(cls, states: Sequence[State]) -> States:
        return cls(torch.stack([s.inputs_BKE for s in states]), torch.stack([s.scan_BNE for s in states]))

    @classmethod
    def rows(cls, parts: Sequence[States], rows: int) -> States:
        """Rows beside each other, and such that are nobody's up to so many."""
        missing = rows - sum(part.scans.shape[1] for part in parts)
        joined = [torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)]
        joined = [torch.cat([t, t.new_zeros(len(t), missing, *t.shape[2:])], dim=1) if missing else t for t in joined]
        return cls(*joined)

    def row(self, b: int) -> States:
        return States(self.inputs[:, b : b + 1], self.scans[:, b : b + 1])


class RecurrentCache:
    """The states before the span that was read last and after it, by position: a call may be repeated."""

    def __init__(self, nothing: States) -> None:
        self.nothing = nothing
        self.known: dict[int, States] = {}
        self.now: States | None = None  # of `decode`, changed in place: where captured graphs find it

    def before(self, position: int) -> States:
        if position == 0:
            return self.nothing
        if position not in self.known:
            raise UsageError(f"the cache holds no state at position {position}: read what stands before it first")
        return self.known[position]

    def moved(self, start: int, stop: int, after: States) -> None:
        self.known = {start: self.before(start), stop: after}
        if self.now is not None:
            for kept, new in zip(self.now, after, strict=True):
                kept.copy_(new)

    def in_place(self) -> States:
        """The state that `decode` goes on from: that after what was read last."""
        if self.now is None:
            last = self.known[max(self.known)] if self.known else self.nothing
            self.now = States(*(t.clone() for t in last))
        return self.now
