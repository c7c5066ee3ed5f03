"""Constraints: what a text or a gap must match. Each becomes an automaton over tokens that every draw obeys."""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from unmask.errors import Public, UsageError
from unmask.registry import Room, check_fields

if TYPE_CHECKING:
    from unmask.constraints.automaton import Automaton
    from unmask.data.tokenizers import Tokenizer

room = Room(
    "unmask.constraints", base="Constraint", helpers=("automaton", "conditioning", "cost", "leading_space", "tables")
)
MAX_STATES = 4000  # of an automaton; each is combined with the whole vocabulary once


@dataclass(frozen=True, kw_only=True)
class Constraint(ABC):
    """What must hold. over: "gap" asks it of every run of masks by itself, "text" of the whole text with its prompt.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> import unmask
    >>> automaton = unmask.constraints.Choices(options=("yes", "no")).automaton(load_tokenizer("bytes"))
    >>> automaton.accepts([110, 111]), automaton.accepts([110])
    (True, False)
    """

    room: ClassVar[Room] = room

    over: Literal["gap", "text"] = "gap"

    def __post_init__(self) -> None:
        check_fields(self)
        for name, kind in typing.get_type_hints(type(self)).items():
            if tuple[str, ...] in (kind, *typing.get_args(kind)):
                object.__setattr__(self, name, _texts(name, getattr(self, name)))

    @abstractmethod
    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        """The automaton of the rows of tokens that obey. may_end: end-of-text may be written, and anything after it."""


def _texts(name: str, value: Any) -> tuple[str, ...] | None:
    """Texts as a tuple; None stays None. A single string counts as one text, not as a sequence of letters."""
    if value is None:
        return None
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, typing.Iterable) else (None,)
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(
            "{name} must be a text or a list of texts, got {value!r}", name=Public(name), value=str(value)[:40]
        )
    return texts
