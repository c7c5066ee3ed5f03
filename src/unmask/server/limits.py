"""How much one request may ask for, and how many requests there may be."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.errors import UsageError

MAX_BODY = 1 << 20
MAX_VALUES = 1 << 15  # of a body, in all its lists and objects
MAX_PARTS = 1 << 12  # of a body: its lists, objects and their keys, which take longer than numbers
MAX_DIGITS = 500  # of a number: reading it takes time with their square
MAX_TEXTS = 8  # n, prompts, texts to score
MAX_STOPS = 4
MAX_PATTERN = 2000
MAX_CONSTRAINTS = 8
MAX_OPTIONS = 20
CELLS = 1 << 14  # numbers of a table that are gone through in the time in which the network reads a token


@dataclass(frozen=True, kw_only=True)
class Limits:
    """budget: rows × length × network calls of one request. requests: at work at a time; more are answered with 429.

    >>> Limits(budget=1000).check(rows=2, length=100, calls=10)
    Traceback (most recent call last):
    unmask.errors.UsageError: this asks for 2 rows x 100 tokens x 10 network calls, the server allows 1000 in all: \
ask for less
    """

    budget: int = 1 << 22
    requests: int = 128
    length: int = 4096  # tokens of a row
    body_seconds: float = 30.0  # for a body to arrive

    def check(self, *, rows: int, length: int, calls: int) -> None:
        """Refuse what is beyond the budget."""
        if rows * length * calls > self.budget:
            raise UsageError(
                f"this asks for {rows} rows x {length} tokens x {calls} network calls, the server allows {self.budget} "
                "in all: ask for less"
            )

    def check_length(self, length: int) -> None:
        """Refuse a row before it is made."""
        if length > self.length:
            raise UsageError(f"a text may have {self.length} tokens here, this asks for more: ask for less")
