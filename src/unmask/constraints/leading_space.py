"""A gap that begins with a space: for vocabularies whose words bring the space before them."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.constraints import Constraint
from unmask.constraints._dfa import explore
from unmask.constraints.automaton import Automaton, join
from unmask.data.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class LeadingSpace(Constraint):
    """The first character is a space; everything may follow.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> automaton = LeadingSpace().automaton(load_tokenizer("bytes"))
    >>> automaton.accepts([32, 97]), automaton.accepts([97, 32])
    (True, False)
    """

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        space = ord(" ")
        dfa = explore(False, lambda begun, byte: True if begun or byte == space else None, bool, {space})
        return join(dfa, tokenizer, over=self.over, may_end=may_end)
