"""A regular expression that the whole text or gap must match."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unmask.constraints import MAX_STATES, Constraint, _compile
from unmask.constraints._automaton import Automaton, join
from unmask.constraints._compile import compiled
from unmask.constraints._dfa import Dfa
from unmask.errors import MissingExtraError, UsageError
from unmask.tokens import Tokenizer

MAX_SIZE = 20_000  # characters in a pattern, repeats written out
MAX_FREE = 10  # characters behind a loop or choice, for which the worst automaton is still no trouble
MAX_SECONDS = 5.0  # for a pattern with more of them; one that is held takes far less
# Stands before and behind the pattern while it is compiled, and nowhere in it. The compiler makes an automaton that
# searches: with this before it there is one place to begin, where it would else keep track of all of them, and with
# this behind it no alternative wins before the end ("a" of a|ab).
_EDGE = "\U0010ffff"


@dataclass(frozen=True, kw_only=True)
class Regex(Constraint):
    r"""Full match, as `re.fullmatch` has it with re.ASCII; no look-around, back references or word boundaries.

    >>> Regex(pattern=r"[0-9]{4}-[0-9]{2}")
    Regex(over='gap', pattern='[0-9]{4}-[0-9]{2}')
    """

    pattern: str

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        return join(regex_dfa(self.pattern), tokenizer, over=self.over, may_end=may_end)


@functools.lru_cache(maxsize=64)
def regex_dfa(pattern: str) -> Dfa:
    """The automaton over the UTF-8 bytes of all texts that match.

    >>> regex_dfa("a|ab").accept_S.tolist()  # doctest: +SKIP
    [False, True, True]
    """
    shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
    parts = _parts(pattern)
    if _size(parts) > MAX_SIZE:
        raise UsageError(f"the pattern {shown!r} asks for more than {MAX_SIZE} characters: use smaller counts")
    core, spelled = outlines(), f"{_EDGE}(?:{_translate(parts)}){_EDGE}"
    found = _stoppable(spelled) if _may_explode(parts) else compiled(core, spelled)
    if found is None:
        raise UsageError(f"the pattern {shown!r} has too many states: use smaller counts, or fewer choices before them")
    if "wrong" in found:
        nothing = "Found no transitions" in found["wrong"]
        raise UsageError(f"the pattern {shown!r} {'matches no text at all' if nothing else _reason(pattern)}")
    return _read(found)


def _may_explode(parts: list[str]) -> bool:
    """Whether much that is not just letters follows a loop or a choice: an automaton that reads it may have to remember
    at which of its places it could be, in any combination.

    >>> _may_explode(_parts("[ab]*a[ab]{30}")), _may_explode(_parts("[ab]*abba")), _may_explode(_parts("[0-9]{30}"))
    (True, False, False)
    """
    first = next((i for i, part in enumerate(parts) if part in "*+?|" or _varies(part)), len(parts))
    behind = parts[first + 1 :]
    free = any(part in ".|" or part[0] == "[" or part[1:] in _CLASSES for part in behind)
    return free and _size(behind) > MAX_FREE


def _varies(part: str) -> bool:
    """A count that leaves a choice, as {2,} or {2,5}."""
    return part[0] == "{" and "," in part


def _stoppable(pattern: str) -> dict[str, Any] | None:
    """The same in a process of its own; None where it takes too long or too much memory."""
    command = [sys.executable, str(Path(_compile.__file__))]
    try:
        done = subprocess.run(command, input=pattern.encode(), capture_output=True, timeout=MAX_SECONDS, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    if "ways" in found:  # the keys of JSON are texts
        found["ways"] = {int(s): {int(b): n for b, n in row.items()} for s, row in found["ways"].items()}
    return found


# As with re.ASCII. All letters of the world would make an automaton of thousands of states out of a name.
_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
_CLASSES |= {"s": r"[\t\n\x0B\f\r ]", "S": r"[^\t\n\x0B\f\r ]"}


_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?:\d+(?:,\d*)?|,\d+)\}|.", re.DOTALL)


def _parts(pattern: str) -> list[str]:
    """Characters, escapes, whole classes in brackets, counts; without anchors at the ends, which say nothing here."""
    parts = _PART.findall(pattern)
    return parts[parts[:1] == ["^"] : len(parts) - (parts[-1:] == ["$"])]


def _translate(parts: list[str]) -> str:
    """The same expression in the package's dialect, every class of characters without the edge.

    In that dialect a bracket inside brackets opens a class of its own, and -- takes one class from another.
    """
    spelled = []
    newline = "" if re.search(r"\(\?[a-z]*s", "".join(parts)) else r"\n"  # the flag s lets a dot be one
    for part in parts:
        if part == ".":
            part = f"[^{newline}{_EDGE}]"
        elif part[0] == "\\" and part[1:] in _CLASSES:
            part = _CLASSES[part[1]]
        elif part[0] == "[" and len(part) > 1:
            head, inner = re.fullmatch(r"(\[\^?\]?)(.*)\]", part, re.DOTALL).groups()  # type: ignore[union-attr]
            part = head + re.sub(r"\\.|[\[&~]", _inside_brackets, inner, flags=re.DOTALL) + "]"
        elif part[:2] == "{,":
            part = "{0" + part[1:]
        spelled.append(f"[{part}--{_EDGE}]" if part[0] == "[" and len(part) > 1 else part)
    return "".join(spelled)


def _inside_brackets(found: re.Match[str]) -> str:
    part = found[0]
    return f"\\{part}" if len(part) == 1 else _CLASSES.get(part[1], part)


def _size(parts: list[str]) -> int:
    """About how many characters the longest way through has, loops taken once: compiling takes time in proportion."""
    sums, last = [0], 0
    for part in parts:
        if part == "(":
            sums.append(0)
            last = 0
        elif part == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif part[0] == "{" and len(part) > 1:
            count = max(int(n) for n in re.findall(r"\d+", part[:40]))
            sums[-1] += last * (count - 1)
            last *= count
        elif part not in "*+?|":
            last = 1
            sums[-1] += 1
    return sum(sums)


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


def _read(found: dict[str, Any]) -> Dfa:
    """Our table from the package's: it starts behind one edge, and accepts where another one leads to a match."""
    ways: dict[int, dict[int, int]] = found["ways"]
    if len(ways) > 10 * MAX_STATES:  # fewer may become few enough
        raise UsageError(f"the pattern has {len(ways)} states, far more than {MAX_STATES}: use smaller counts")

    def behind_edge(state: int | None) -> int | None:
        for byte in _EDGE.encode():
            state = ways.get(state, {}).get(byte) if state is not None else None
        return state

    final: set[int] = set(found["final"])
    names = {behind_edge(found["initial"]): 0}
    for state, row in ways.items():
        for after in (state, *row.values()):
            names.setdefault(after, len(names))
    next_SB = np.full((len(names), 256), -1, dtype=np.int32)
    for state, row in ways.items():
        for byte, after in row.items():
            if byte < 256:  # 256 is the package's own end
                next_SB[names[state], byte] = names[after]
    accept_S = np.array([behind_edge(state) in final for state in names])
    return Dfa(next_SB, accept_S).reduced()
