"""Words that may be used, or words that may not."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from unmask.constraints import Constraint
from unmask.constraints._dfa import explore
from unmask.constraints.automaton import Automaton, join
from unmask.data.tokenizers import Tokenizer
from unmask.errors import UsageError

WORD = re.compile(r"[A-Za-z0-9_\x80-\U0010ffff]+")
_LETTERS = {*(string.ascii_letters + string.digits + "_").encode(), *range(0x80, 0x100)}


@dataclass(frozen=True, kw_only=True)
class Words(Constraint):
    """`allow`: every word is one of these. `forbid`: none is. A word is a run of letters, digits and underscores;
    whatever lies beyond ASCII counts as a letter. ignore_case: A-Z and a-z are the same.

    >>> Words(forbid=("secret",)).forbid
    ('secret',)
    """

    allow: tuple[str, ...] | None = None
    forbid: tuple[str, ...] = ()
    ignore_case: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.allow and not self.forbid:
            raise UsageError("give words to allow or words to forbid")
        for word in (*(self.allow or ()), *self.forbid):
            if not WORD.fullmatch(word):
                raise UsageError(
                    "{word!r} is not one word of letters, digits and underscores: use a pattern for it", word=word
                )

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        forbid = {self._fold(word) for word in self.forbid}
        allow = None if self.allow is None else {self._fold(word) for word in self.allow} - forbid
        begun = {word[:i] for word in forbid | (allow or set()) for i in range(len(word) + 1)}

        # The state: the current word so far, None if it is not a prefix of any listed word.
        def good(word: bytes | None) -> bool:
            return word == b"" or (word not in forbid if allow is None else word in allow)

        def step(state: tuple[bytes | None], byte: int) -> tuple[bytes | None] | None:
            (word,) = state
            if byte not in _LETTERS:
                return (b"",) if good(word) else None
            letter = bytes((byte,)).lower() if self.ignore_case else bytes((byte,))
            after = None if word is None or word + letter not in begun else word + letter
            return None if after is None and allow is not None else (after,)

        dfa = explore((b"",), step, lambda state: good(state[0]), _LETTERS)
        return join(dfa, tokenizer, over=self.over, may_end=may_end)

    def _fold(self, word: str) -> bytes:
        return word.encode().lower() if self.ignore_case else word.encode()  # lower() of bytes affects ASCII only
