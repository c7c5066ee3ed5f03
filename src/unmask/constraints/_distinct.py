"""JSON arrays of distinct values from a short list."""

from __future__ import annotations

import json
from typing import Any

from unmask.constraints._dfa import Dfa
from unmask.constraints._nfa import Nfa
from unmask.constraints.regex import MAX_BUILT, MAX_STEPS

MAX_VALUES = 8  # one state per subset of used values: 2^8


def distinct(values: list[Any], least: int, most: int) -> Dfa:
    """The automaton of JSON arrays of `least` to `most` of these values, each at most once, in any order.

    >>> distinct([1, "a"], 2, 2).accept_S.tolist().count(True)  # all of them end alike
    1
    """
    nfa = Nfa()

    def write(here: int, text: str) -> int:
        for character in text:
            there = nfa.state()
            nfa.read(here, [(ord(character), ord(character))], there)
            here = there
        return here

    def space(here: int) -> int:
        there = nfa.state()
        nfa.go(here, there)
        nfa.go(write(here, " "), there)
        return there

    spelled = [json.dumps(value, ensure_ascii=False) for value in values]
    used = {0: space(write(0, "["))}
    for mask in range(1 << len(values)):  # a set comes after all of its subsets
        if mask not in used:
            continue
        here, num = used[mask], mask.bit_count()
        if least <= num <= most:
            nfa.go(write(space(here), "]"), nfa.final)
        if num < most:
            begin = space(write(here, ",")) if mask else here
            for i, text in enumerate(spelled):
                if not mask >> i & 1:
                    nfa.go(write(begin, text), used.setdefault(mask | 1 << i, nfa.state()))
    return nfa.determinised(max_states=MAX_BUILT, max_steps=MAX_STEPS)


def different(values: list[Any]) -> list[Any]:
    """The values without those that equal an earlier one, in the sense of JSON: 1 equals 1.0, but not true.

    >>> different([1, 1.0, True, [1], [1.0]])
    [1, True, [1]]
    """
    return [*{json.dumps(_plain(value), sort_keys=True): value for value in reversed(values)}.values()][::-1]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return int(value) if isinstance(value, float) and value == int(value) else value
