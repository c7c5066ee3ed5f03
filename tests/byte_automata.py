"""What an automaton over bytes takes, read state by state: for tests of what builds one."""

from __future__ import annotations

from unmask.constraints._dfa import Dfa


def accepts(dfa: Dfa, text: str) -> bool:
    """Whether it takes the whole text."""
    state = 0
    for byte in text.encode():
        state = int(dfa.next_SB[state, byte])
        if state < 0:
            return False
    return bool(dfa.accept_S[state])
