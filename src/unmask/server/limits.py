"""Limits on what one request may ask for, and on the number of requests."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.constraints.automaton import Automaton
from unmask.errors import Public, UnmaskError, UsageError

MAX_BODY = 1 << 20
MAX_VALUES = 1 << 15  # values in a body, in all its lists and objects
MAX_PARTS = 1 << 12  # lists, objects and keys in a body, which take longer to parse than numbers
MAX_DIGITS = 500  # digits of a number: parsing takes quadratic time
MAX_TEXTS = 8  # n, prompts, texts to score
MAX_STOPS = 4
MAX_PATTERN = 2000
MAX_CONSTRAINTS = 8
MAX_OPTIONS = 20
# Measured in the time that a network of about twenty million weights needs for one token on two cores:
CELLS = 1 << 14  # table entries processed
TOKEN_NANOSECONDS = 150_000
MAX_STEP = 1 << 14  # maximum cost in tokens of a row's step under a constraint: a step cannot be interrupted


class ConstraintTooCostly(UnmaskError):
    """A constraint exceeds the server's limits.

    Unlike one that cannot hold in a gap, it will not fit other gaps either.
    """


@dataclass(frozen=True)
class Holding:
    """The cost of a constraint for a row, in tokens that a network could read meanwhile: per step, and for the whole
    text.

    >>> Holding(step=3, text=12).step
    3
    """

    step: int = 0
    text: int = 0

    @classmethod
    def of(cls, automaton: Automaton, positions: int, steps: int, *, likeliest: bool) -> Holding:
        """The cost for `positions` positions in at most `steps` steps, plus one step for the initial check whether it
        can hold."""
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
    length: int = 4096  # maximum tokens per row
    body_seconds: float = 30.0  # time for a body, and the head before it, to arrive
    write_seconds: float = 30.0  # time after which a client that reads nothing is dropped
    unread: int = 1 << 22  # maximum unread bytes of a stream

    def check(self, *, rows: int, length: int, calls: int, holding: Holding = Holding()) -> None:
        """Refuse what exceeds the budget. holding: the cost of the constraint on every row."""
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
        """Refuse a constraint that would delay everybody else at every step."""
        if holding.step > MAX_STEP:
            raise ConstraintTooCostly(
                "a step under this constraint takes as long as {step} tokens here, {most} are allowed: use a "
                "simpler constraint, or a shorter gap",
                step=Public(holding.step),
                most=Public(MAX_STEP),
            )

    def check_looks(self, tokens: int) -> None:
        """Refuse more checks of whether a constraint can hold, one per length of a gap, than the budget allows."""
        if tokens > self.budget:
            raise ConstraintTooCostly(
                "to try the constraint in so many lengths takes as long as {tokens} tokens, the server allows "
                "{budget}: use a simpler constraint, or give fewer lengths",
                tokens=Public(tokens),
                budget=Public(self.budget),
            )

    def check_length(self, length: int) -> None:
        """Refuse a row that is too long before it is created."""
        if length > self.length:
            raise UsageError(
                "a text may have {length} tokens here, this asks for more: ask for less", length=Public(self.length)
            )
