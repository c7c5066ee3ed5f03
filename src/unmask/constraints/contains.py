"""Phrases that must occur in the text, in any order."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.constraints import Constraint
from unmask.constraints._dfa import explore
from unmask.constraints.automaton import Automaton, join
from unmask.data.tokenizers import Tokenizer
from unmask.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Contains(Constraint):
    """Every one of `phrases` occurs in the text or gap; they may overlap.

    >>> Contains(phrases=("sun", "moon")).phrases
    ('sun', 'moon')
    """

    phrases: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.phrases or not all(self.phrases):
            raise UsageError("must-contain needs at least one phrase, and no empty one")

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        phrases = sorted({phrase.encode() for phrase in self.phrases})
        begun = {phrase[:i] for phrase in phrases for i in range(len(phrase) + 1)}
        everything = frozenset(range(len(phrases)))

        # The state: which phrases have occurred, and the longest suffix of the text that is a prefix of one.
        def step(state: tuple[frozenset[int], bytes], byte: int) -> tuple[frozenset[int], bytes]:
            contained, tail = state
            if contained == everything:
                return state
            tail += bytes((byte,))
            while tail not in begun:
                tail = tail[1:]
            contained |= {i for i, phrase in enumerate(phrases) if tail.endswith(phrase)}
            return (contained, b"") if contained == everything else (contained, tail)

        dfa = explore(
            (frozenset[int](), b""), step, lambda state: state[0] == everything, {b for p in phrases for b in p}
        )
        return join(dfa, tokenizer, over=self.over, may_end=may_end)
