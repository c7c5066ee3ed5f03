"""From a regular expression, parsed by Python's own parser with re.ASCII, to an automaton.

Only the parser's tree is used; nothing here parses the pattern itself.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from unmask.constraints._dfa import Dfa
from unmask.constraints._nfa import ANYTHING, END, LAST_LINE, LINE, MAX_CODE, OTHER, START, WORD, Guard, Nfa, Ranges
from unmask.errors import Public, UsageError

_parser: Any = importlib.import_module("re._parser")
_op: Any = importlib.import_module("re._constants")

_DIGIT = [(0x30, 0x39)]
_SPACE = [(0x09, 0x0D), (0x20, 0x20)]
_LETTER = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_UPPER = (0x41, 0x5A)
_TO_LOWER = 0x20

_NAMES = {
    _op.ASSERT: "look-around",
    _op.ASSERT_NOT: "look-around",
    _op.FAILURE: "look-around",  # an empty one, (?!)
    _op.GROUPREF: "back references",
    _op.GROUPREF_EXISTS: "conditional groups",
    _op.ATOMIC_GROUP: "atomic groups",
    _op.POSSESSIVE_REPEAT: "possessive quantifiers",
}


class Wrong(UsageError):
    """An invalid or unsupported pattern. The message is a continuation of a sentence that starts with its name."""


def parsed(pattern: str) -> tuple[Any, int]:
    """The parser's tree, and the global flags."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about syntax that a later Python may parse differently
            tree = _parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError, ValueError) as e:
        raise Wrong("is no regular expression: {reason}", reason=e) from None
    return tree, tree.state.flags


class Builder:
    """Builds an Nfa from a tree. splices: automata that replace a character of the pattern."""

    def __init__(self, splices: Mapping[str, Dfa]) -> None:
        self.nfa = Nfa()
        self.splices = {ord(character): dfa for character, dfa in splices.items()}

    def size(self, items: Any) -> int:
        """The number of characters and conditions with all repeats expanded; refuses unsupported syntax."""
        total = 0
        for op, value in items:
            if op in _NAMES:
                raise Wrong("has {feature}, which cannot be held: write it without", feature=Public(_NAMES[op]))
            if op is _op.BRANCH:
                total += 1 + sum(self.size(branch) for branch in value[1])
            elif op is _op.SUBPATTERN:
                if value[1] & re.UNICODE:
                    raise Wrong("has the flag u: classes are those of re.ASCII, so leave it out")
                total += self.size(value[3])
            elif op in (_op.MAX_REPEAT, _op.MIN_REPEAT):
                least, most, inner = value
                total += max(1, self.size(inner)) * max(1, least if most is _op.MAXREPEAT else most)
            else:
                part = self.splices.get(value) if op is _op.LITERAL else None
                total += 1 if part is None else len(part.accept_S)
        return total

    def sequence(self, items: Any, here: int, flags: int) -> int:
        """Add all items from state `here` on; return the state after them."""
        for op, value in items:
            here = self._item(op, value, here, flags)
        return here

    def _item(self, op: Any, value: Any, here: int, flags: int) -> int:
        there = self.nfa.state()
        if op is _op.LITERAL and value in self.splices:
            self.nfa.splice(here, self.splices[value], there)
        elif op in (_op.LITERAL, _op.NOT_LITERAL, _op.ANY, _op.IN):
            self.nfa.read(here, _characters(op, value, flags), there)
        elif op is _op.AT:
            self.nfa.go(here, there, _guard(value, flags))
        elif op is _op.BRANCH:
            for branch in value[1]:
                self.nfa.go(self.sequence(branch, here, flags), there)
        elif op is _op.SUBPATTERN:
            _, added, removed, inner = value
            return self.sequence(inner, here, (flags | added) & ~removed)
        elif op in (_op.MAX_REPEAT, _op.MIN_REPEAT):
            return self._repeat(value, here, flags)
        else:
            raise Wrong(
                "has {feature}, which is not known here: write it without",
                feature=Public(str(op).lower().replace("_", " ")),
            )
        return there

    def _repeat(self, value: Any, here: int, flags: int) -> int:
        """Add a repeat, greedy or lazy, which makes no difference for full matches."""
        least, most, inner = value
        for _ in range(least):
            here = self.sequence(inner, here, flags)
        there = self.nfa.state()
        self.nfa.go(here, there)
        if most is _op.MAXREPEAT:
            self.nfa.go(self.sequence(inner, there, flags), there)
            return there
        for _ in range(most - least):
            here = self.sequence(inner, here, flags)
            self.nfa.go(here, there)
        return there


def _guard(code: Any, flags: int) -> Guard:
    """The guard of a condition: what may follow, by the kind of the previous character."""
    before = (START, LINE, WORD, OTHER)
    if flags & re.MULTILINE:
        code = _op.AT_MULTILINE.get(code, code)
    if code in (_op.AT_BEGINNING, _op.AT_BEGINNING_STRING):
        return ((START, ANYTHING),)
    if code is _op.AT_BEGINNING_LINE:
        return ((START, ANYTHING), (LINE, ANYTHING))
    ends = {_op.AT_END: END | LAST_LINE, _op.AT_END_STRING: END, _op.AT_END_LINE: END | LAST_LINE | LINE}
    if code in ends:
        return tuple((kind, ends[code]) for kind in before)
    if code is _op.AT_BOUNDARY:
        return tuple((kind, ANYTHING & ~WORD if kind == WORD else WORD) for kind in before)
    # Whether \B matches in the empty text depends on the version of Python.
    empty = 0 if re.search(r"\B", "") else END
    inside = {kind: WORD if kind == WORD else ANYTHING & ~WORD for kind in before}
    return tuple({**inside, START: inside[START] & ~empty}.items())


def _characters(op: Any, value: Any, flags: int) -> Ranges:
    """The characters that one part of a pattern matches."""
    if op is _op.ANY:
        return [(0, MAX_CODE)] if flags & re.DOTALL else _without([(0x0A, 0x0A)])
    if op is not _op.IN:
        value = [(_op.NEGATE, None), (_op.LITERAL, value)] if op is _op.NOT_LITERAL else [(_op.LITERAL, value)]
    negate = value[0][0] is _op.NEGATE
    ranges = sorted(_members(value[negate:]))
    if flags & re.IGNORECASE:
        ranges = sorted([*ranges, *_other_case(ranges)])
    return _without(ranges) if negate else ranges


def _members(items: Any) -> Iterator[tuple[int, int]]:
    classes = {
        _op.CATEGORY_DIGIT: _DIGIT,
        _op.CATEGORY_NOT_DIGIT: _without(_DIGIT),
        _op.CATEGORY_SPACE: _SPACE,
        _op.CATEGORY_NOT_SPACE: _without(_SPACE),
        _op.CATEGORY_WORD: _LETTER,
        _op.CATEGORY_NOT_WORD: _without(_LETTER),
    }
    for op, value in items:
        if op is _op.LITERAL:
            yield value, value
        elif op is _op.RANGE:
            yield value
        else:
            yield from classes[value]


def _other_case(ranges: Ranges) -> Iterator[tuple[int, int]]:
    """The ranges in the other case, for ASCII letters only."""
    for first, shift in ((_UPPER[0], _TO_LOWER), (_UPPER[0] + _TO_LOWER, -_TO_LOWER)):
        for lo, hi in ranges:
            a, b = max(lo, first), min(hi, first + _UPPER[1] - _UPPER[0])
            if a <= b:
                yield a + shift, b + shift


def _without(ranges: Ranges) -> Ranges:
    """All characters except those of these sorted ranges."""
    others, at = [], 0
    for lo, hi in ranges:
        if lo > at:
            others.append((at, lo - 1))
        at = max(at, hi + 1)
    return [*others, (at, MAX_CODE)] if at <= MAX_CODE else others
