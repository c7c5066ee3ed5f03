"""A regular expression that the whole text or gap must match."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from unmask.constraints import MAX_STATES, Constraint
from unmask.constraints._dfa import Dfa
from unmask.constraints._nfa import TooLarge
from unmask.constraints._pattern import Builder, Wrong, parsed
from unmask.constraints.automaton import Automaton, join
from unmask.data.tokenizers import Tokenizer
from unmask.errors import Public, UsageError

MAX_SIZE = 20_000  # characters in a pattern, repeats expanded
MAX_BUILT = 10 * MAX_STATES  # limit of states before equivalent ones are merged
MAX_STEPS = 1 << 22  # of determinisation: some short patterns have automata of astronomic size


@dataclass(frozen=True, kw_only=True)
class Regex(Constraint):
    r"""Full match, as `re.fullmatch` has it with re.ASCII; no look-around, back references, conditional or atomic
    groups, or possessive quantifiers.

    >>> Regex(pattern=r"[0-9]{4}-[0-9]{2}")
    Regex(over='gap', pattern='[0-9]{4}-[0-9]{2}')
    """

    pattern: str

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        return join(regex_dfa(self.pattern), tokenizer, over=self.over, may_end=may_end)


@functools.lru_cache(maxsize=64)
def regex_dfa(pattern: str) -> Dfa:
    """The automaton over the UTF-8 bytes of all matching texts.

    >>> regex_dfa("a|ab").accept_S.tolist()
    [False, True, True]
    """
    return spliced_dfa(pattern, {})


def spliced_dfa(pattern: str, splices: Mapping[str, Dfa], *, name: str = "pattern") -> Dfa:
    """The same, where each character in `splices` stands for any text that its automaton accepts."""
    subject = Public(f"the {name}")
    if name == "pattern":
        spelled = repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")
        subject = Public(f"the pattern {spelled}", "the pattern '…'")
    try:
        tree, flags = parsed(pattern)
        builder = Builder(splices)
        if builder.size(tree) > MAX_SIZE:
            raise Wrong("asks for more than {most} characters: use smaller counts", most=Public(MAX_SIZE))
        builder.nfa.go(builder.sequence(tree, 0, flags), builder.nfa.final)
        dfa = builder.nfa.determinised(max_states=MAX_BUILT, max_steps=MAX_STEPS)
    except Wrong as e:
        raise UsageError("{subject} {reason}", subject=subject, reason=e) from None
    except RecursionError:
        raise UsageError(
            "{subject} is nested too deeply: use fewer groups inside each other", subject=subject
        ) from None
    except TooLarge:
        raise UsageError(
            "{subject} has too many states: use smaller counts, or fewer choices before them", subject=subject
        ) from None
    if not dfa.accept_S.any():
        raise UsageError("{subject} matches no text at all", subject=subject)
    return dfa
