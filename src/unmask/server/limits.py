"""How much one request may ask for, and how many requests there may be."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.constraints.automaton import Automaton
from unmask.errors import Public, UnmaskError, UsageError

MAX_BODY = 1 << 20
MAX_VALUES = 1 << 15  # of a body, in all its lists and objects
MAX_PARTS = 1 << 12  # of a body: its lists, objects and their keys, which take longer than numbers
MAX_DIGITS = 500  # of a number: reading it takes time with their square
MAX_TEXTS = 8  # n, prompts, texts to score
MAX_STOPS = 4
MAX_PATTERN = 2000
MAX_CONSTRAINTS = 8
MAX_OPTIONS = 20
# In the time in which a network of some twenty million weights reads a token on two cores:
CELLS = 1 << 14  # numbers of a table that are gone through
TOKEN_NANOSECONDS = 150_000
MAX_STEP = 1 << 14  # of a row under a constraint, in tokens: nothing ends a step before its end


class ConstraintTooCostly(UnmaskError):
    """A constraint asks for more than the server allows: unlike one that cannot hold in a gap, it fits no other gap."""


@dataclass(frozen=True)
class Holding:
    """What it costs a row to hold a constraint, in tokens that a network would read meanwhile: a step, the whole text.

    >>> Holding(step=3, text=12).step
    3
    """

    step: int = 0
    text: int = 0

    @classmethod
    def of(cls, automaton: Automaton, positions: int, steps: int, *, likeliest: bool) -> Holding:
        """Of so many positions in at most so many steps; before them it is looked whether it can hold at all, which
        costs as much as one."""
        cost = automaton.cost(positions, likeliest=likeliest)
        tokens = -(-positions // max(1, steps))
        return cls(
            step=-(-(cost.call + tokens * cost.token) // TOKEN_NANOSECONDS),
            text=-(-((steps + 1) * cost.call + positions * cost.token) // TOKEN_NANOSECONDS),
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """budget: rows × length × network calls of one request, and what its constraint costs besides.
    requests: at work at a time; more are answered with 429.

    >>> Limits(budget=1000).check(rows=2, length=100, calls=10)
    Traceback (most recent call last):
    unmask.errors.UsageError: this asks for 2 rows x 100 tokens x 10 network calls, the server allows 1000 in all: \
ask for less
    """

    budget: int = 1 << 22
    requests: int = 128
    length: int = 4096  # tokens of a row
    body_seconds: float = 30.0  # for a body to arrive, and for the head before it
    write_seconds: float = 30.0  # after which a client that reads nothing is dropped
    unread: int = 1 << 22  # bytes of a stream that may wait for their reader

    def check(self, *, rows: int, length: int, calls: int, holding: Holding = Holding()) -> None:
        """Refuse what is beyond the budget. holding: of the constraint that every row is under."""
        asked = Public(f"this asks for {rows} rows x {length} tokens x {calls} network calls")
        if rows * length * calls > self.budget:
            raise UsageError(
                "{asked}, the server allows {budget} in all: ask for less", asked=asked, budget=Public(self.budget)
            )
        self.check_step(holding)
        if rows * (length * calls + holding.text) > self.budget:
            raise ConstraintTooCostly(
                "{asked}, and of each row the constraint takes as long as {tokens_more} tokens more; the server "
                "allows {budget} in all: use a simpler constraint, or ask for less",
                asked=asked,
                tokens_more=Public(holding.text),
                budget=Public(self.budget),
            )

    def check_step(self, holding: Holding) -> None:
        """Refuse a constraint that would keep all others waiting in every step."""
        if holding.step > MAX_STEP:
            raise ConstraintTooCostly(
                "a step under this constraint takes as long as {step} tokens here, {most} are allowed: use a "
                "simpler constraint, or a shorter gap",
                step=Public(holding.step),
                most=Public(MAX_STEP),
            )

    def check_looks(self, tokens: int) -> None:
        """Refuse more looks whether a constraint can hold, one for each length of a gap, than the budget allows."""
        if tokens > self.budget:
            raise ConstraintTooCostly(
                "to try the constraint in so many lengths takes as long as {tokens} tokens, the server allows "
                "{budget}: use a simpler constraint, or give fewer lengths",
                tokens=Public(tokens),
                budget=Public(self.budget),
            )

    def check_length(self, length: int) -> None:
        """Refuse a row before it is made."""
        if length > self.length:
            raise UsageError(
                "a text may have {length} tokens here, this asks for more: ask for less", length=Public(self.length)
            )
