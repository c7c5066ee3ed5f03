"""The number of tokens before the end of the text."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.constraints import MAX_STATES, Constraint
from unmask.constraints.automaton import Automaton, count_tokens
from unmask.data.tokenizers import Tokenizer
from unmask.errors import Public, UsageError


@dataclass(frozen=True, kw_only=True)
class Length(Constraint):
    """From `least` to `most` tokens (most=None: no limit), end-of-text not counted.

    In a gap where the text may not end, the number of tokens equals the number of masks, so this only checks it.

    >>> Length(least=3, most=3).most
    3
    """

    least: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least <= (MAX_STATES if self.most is None else self.most) <= MAX_STATES:
            raise UsageError(
                "a length in tokens needs 0 <= least <= most <= {most}, got {least} to {got}",
                most=Public(MAX_STATES),
                least=self.least,
                got=self.most,
            )

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        return count_tokens(self.least, self.most, tokenizer, over=self.over, may_end=may_end)
