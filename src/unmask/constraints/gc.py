"""The share of G and C in each window of a DNA sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unmask.constraints import Constraint
from unmask.constraints._dfa import explore
from unmask.constraints.automaton import Automaton, join
from unmask.data.tokenizers import Tokenizer
from unmask.errors import UsageError

LETTERS = b"ACGTacgt"
STRONG = frozenset(b"GCgc")  # paired by three hydrogen bonds


@dataclass(frozen=True, kw_only=True)
class Gc(Constraint):
    """Of each `window` bases, one window after the other, a share between `low` and `high` is G or C.

    The last window may be a shorter one; its share is within the bounds to the nearest base. Only A, C, G and T may be
    written.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> automaton = Gc(low=0.5, high=0.5, window=4).automaton(load_tokenizer("bytes"), may_end=False)
    >>> automaton.accepts(b"ACGTGGAA"), automaton.accepts(b"ACGTGGGG")
    (True, False)
    """

    low: float = 0.4
    high: float = 0.6
    window: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low <= self.high <= 1 or self.window < 1:
            raise UsageError(
                "gc needs 0 <= low <= high <= 1 and a window of at least 1, got {low}, {high}, {window}",
                low=self.low,
                high=self.high,
                window=self.window,
            )
        if math.ceil(self.low * self.window - 1e-9) > math.floor(self.high * self.window + 1e-9):
            raise UsageError(
                "no whole number of {window} bases is a share from {low} to {high}: widen the bounds",
                window=self.window,
                low=self.low,
                high=self.high,
            )

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        least = math.ceil(self.low * self.window - 1e-9)
        most = math.floor(self.high * self.window + 1e-9)

        # The state: the number of bases in the window so far, and how many of them are G or C.
        def step(state: tuple[int, int], byte: int) -> tuple[int, int] | None:
            if byte not in LETTERS:
                return None
            bases, strong = state[0] + 1, state[1] + (byte in STRONG)
            if strong > most or strong + self.window - bases < least:
                return None
            return (0, 0) if bases == self.window else (bases, strong)

        def ends(state: tuple[int, int]) -> bool:
            bases, strong = state
            return math.floor(self.low * bases) <= strong <= math.ceil(self.high * bases)

        return join(explore((0, 0), step, ends, set(LETTERS)), tokenizer, over=self.over, may_end=may_end)
