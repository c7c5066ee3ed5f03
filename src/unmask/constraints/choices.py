"""One of a list of texts, exactly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unmask.constraints import Constraint
from unmask.constraints._dfa import Dfa, explore
from unmask.constraints.automaton import Automaton, join
from unmask.data.tokenizers import Tokenizer
from unmask.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Choices(Constraint):
    """The text or gap is one of `options`.

    >>> Choices(options=("yes", "no")).options
    ('yes', 'no')
    """

    options: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.options or not all(self.options):
            raise UsageError("choices need at least one option, and no empty one")

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        return join(spelled(self.options), tokenizer, over=self.over, may_end=may_end)


def spelled(options: Iterable[str]) -> Dfa:
    """The automaton of a finite list of texts; the state is the text read so far."""
    whole = {option.encode() for option in options}
    begun = {word[:i] for word in whole for i in range(len(word) + 1)}
    return explore(
        b"",
        lambda state, byte: after if (after := state + bytes((byte,))) in begun else None,
        lambda state: state in whole,
        {byte for word in whole for byte in word},
    )
