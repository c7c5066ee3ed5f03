"""A regular expression that the whole text or gap must match."""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from unmask.constraints import Constraint
from unmask.constraints._automaton import Automaton, join
from unmask.constraints._dfa import Dfa
from unmask.errors import MissingExtraError, UsageError
from unmask.tokens import Tokenizer

MAX_REPEAT = 5000
# Behind the pattern, while it is compiled: without it the compiler would stop at the first alternative that matches
# ("a" of a|ab), as a search does.
_STOP = "\U0010ffff"


@dataclass(frozen=True, kw_only=True)
class Regex(Constraint):
    r"""Full match, as `re.fullmatch` has it; no look-around, back references or word boundaries.

    >>> Regex(pattern=r"[0-9]{4}-[0-9]{2}")
    Regex(over='gap', pattern='[0-9]{4}-[0-9]{2}')
    """

    pattern: str

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        return join(regex_dfa(self.pattern), tokenizer, over=self.over, may_end=may_end)


def regex_dfa(pattern: str) -> Dfa:
    """The automaton over the UTF-8 bytes of all texts that match.

    >>> regex_dfa("a|ab").accept_S.tolist()  # doctest: +SKIP
    [False, True, True]
    """
    shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
    for low, high in re.findall(r"\{(\d+)(?:,(\d*))?\}", pattern):
        if len(max(low, high, key=len)) > 9 or max(int(low), int(high or 0)) > MAX_REPEAT:
            raise UsageError(f"the pattern {shown!r} repeats more than {MAX_REPEAT} times: use a smaller count")
    # The whole must match in any case, so anchors at its ends say nothing.
    body = pattern.removeprefix("^")
    if body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1:
        body = body[:-1]
    core = outlines()
    try:
        index = core.Index(f"(?:{body}){_STOP}", _bytes())
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        if "Found no transitions" in str(e):
            raise UsageError(f"the pattern {shown!r} matches no text at all") from None
        raise UsageError(f"the pattern {shown!r} {_reason(pattern)}") from None
    return _read(index)


def _reason(pattern: str) -> str:
    """What is wrong with a pattern that was refused: Python's parser tells where."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        return f"is no regular expression: {e}"
    return "asks for what an automaton cannot do: no look-around, back references, word boundaries or anchors inside"


def outlines() -> Any:
    """The optional package behind patterns and schemas."""
    try:
        import outlines_core
    except ImportError:
        raise MissingExtraError("outlines-core", "constrain", "a pattern or schema") from None
    return outlines_core


@functools.cache
def _bytes() -> Any:
    return outlines().Vocabulary(256, {bytes((b,)): [b] for b in range(256)})


def _read(index: Any) -> Dfa:
    """Our table from the package's; a state accepts when the stop behind it leads to a match."""
    ways: dict[int, dict[int, int]] = index.get_transitions()
    final: set[int] = set(index.get_final_states())
    start: int = index.get_initial_state()
    names = {start: 0}
    for state in ways:
        names.setdefault(state, len(names))
    for row in ways.values():
        for state in row.values():
            names.setdefault(state, len(names))
    next_SB = np.full((len(names), 256), -1, dtype=np.int32)
    accept_S = np.zeros(len(names), dtype=bool)
    for state, row in ways.items():
        for byte, after in row.items():
            if byte < 256:  # 256 is the package's own end
                next_SB[names[state], byte] = names[after]
    for state, name in names.items():
        at: int | None = state
        for byte in _STOP.encode():
            at = ways.get(at, {}).get(byte) if at is not None else None
        accept_S[name] = at in final
    return Dfa(next_SB, accept_S).reduced()
