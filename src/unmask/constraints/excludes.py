"""Phrases that must not occur in the text, such as the sites at which an enzyme cuts."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.constraints import Constraint
from unmask.constraints._dfa import explore
from unmask.constraints.automaton import Automaton, join
from unmask.data.tokenizers import Tokenizer
from unmask.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Excludes(Constraint):
    """None of `phrases` occurs in the text or gap. over = "text" also sees those that reach across a gap's ends.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> automaton = Excludes(phrases=("bad",)).automaton(load_tokenizer("chars"), may_end=False)
    >>> automaton.accepts(load_tokenizer("chars").encode("ba d")), automaton.accepts([2, 1, 4])
    (True, False)
    """

    phrases: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.phrases or not all(self.phrases):
            raise UsageError("must-not-contain needs at least one phrase, and no empty one")

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        self._check_spelled(tokenizer)
        phrases = sorted({phrase.encode() for phrase in self.phrases})
        begun = {phrase[:i] for phrase in phrases for i in range(len(phrase))}

        # The state: the longest suffix of the text that is a prefix of a phrase (Aho and Corasick, 1975).
        def step(tail: bytes, byte: int) -> bytes | None:
            tail += bytes((byte,))
            if any(tail.endswith(phrase) for phrase in phrases):
                return None
            while tail not in begun:
                tail = tail[1:]
            return tail

        dfa = explore(b"", step, lambda tail: True, {byte for phrase in phrases for byte in phrase})
        return join(dfa, tokenizer, over=self.over, may_end=may_end)

    def _check_spelled(self, tokenizer: Tokenizer) -> None:
        """Refuse phrases that cannot occur: "gaattc" would forbid nothing where bases are upper case."""
        words = [word for words in tokenizer.spellings() for word in words if word is not None]
        letters = {byte for word in words for byte in word}
        for phrase in self.phrases:
            if letters.issuperset(phrase.encode()):
                continue
            other = next((w for w in (phrase.upper(), phrase.lower()) if letters.issuperset(w.encode())), None)
            if other is None:
                raise UsageError(
                    "must-not-contain {phrase!r} would forbid nothing: the vocabulary cannot spell it",
                    phrase=phrase[:40],
                )
            raise UsageError(
                "must-not-contain {phrase!r} would forbid nothing: the vocabulary spells it {other!r}; write that",
                phrase=phrase[:40],
                other=other[:40],
            )
