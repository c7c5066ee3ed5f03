"""Samplers: in which order the masks open, and how the tokens are drawn. They know no network and no text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from unmask.errors import UsageError
from unmask.registry import Room

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from unmask.sampling.canvas import Canvas
    from unmask.sampling.predictor import Query

room = Room("unmask.samplers", base="Sampler", helpers=("adaptive", "drawing", "planned", "remasking", "windowed"))
MAX_STEPS = 10_000_000  # a grid of times is made of them


@dataclass(frozen=True)
class RunnersUp:
    """What else the network found likely where a token was written, the likeliest first, and how likely that token was.

    These are the network's own probabilities, before temperature, cuts, forbidden ids and constraints.
    """

    token_NK: Tensor
    prob_NK: Tensor
    prob_N: Tensor  # of the token that was written


@dataclass(frozen=True)
class Step:
    """What one network call opened: which positions of which rows, the tokens written, and how likely each was.

    log_prob_N is under the law that the token was drawn from. tokens_BL is the canvas after the step: besides what
    opened it shows what was masked again, and end-of-text in all that follows where a row has ended.
    others and, by rows and positions, remasked: told where somebody asks for runners-up.
    """

    row_N: Tensor
    position_N: Tensor
    token_N: Tensor
    log_prob_N: Tensor
    tokens_BL: Tensor
    remasked: tuple[Tensor, Tensor] | None = None
    others: RunnersUp | None = None

    def shifted(self, by: int, tokens_BL: Tensor) -> Step:
        """The same step of a window that begins at position `by` of a longer canvas."""
        remasked = None if self.remasked is None else (self.remasked[0], self.remasked[1] + by)
        return replace(self, position_N=self.position_N + by, tokens_BL=tokens_BL, remasked=remasked)


class Sampler(ABC):
    """`start` a canvas, then `ask` and `tell` in turn until `ask` returns None. The state is the sampler's own."""

    room: ClassVar[Room] = room
    law: ClassVar[str] = "no law claimed"  # what the finished texts follow, as far as a test holds the sampler to it
    cost: ClassVar[str] = ""  # network calls as a formula of the options and the length L

    @property
    def takes(self) -> tuple[str, ...]:
        """The kinds of prediction that it can use."""
        return ("x0",)

    @property
    def left_to_right(self) -> bool:
        """Whether it opens one column after another, as an autoregressive model must be read."""
        return False

    @abstractmethod
    def start(self, canvas: Canvas) -> Any:
        """The state in which nothing has opened; everything that can be planned is planned here."""

    @abstractmethod
    def ask(self, state: Any) -> Query | None:
        """What the network is asked next; None when no mask is left."""

    @abstractmethod
    def tell(self, state: Any, prediction: Tensor) -> Step:
        """Take the network's answer to the last `ask`, write tokens, and say what was written."""

    def select(self, state: Any, rows_B: np.ndarray, canvas: Canvas) -> Any:
        """A state whose row b is a copy of row rows_B[b], drawn on with the keys of `canvas`."""
        raise UsageError(f"the sampler {type(self).__name__} cannot copy rows: use ancestral or left_to_right")

    @abstractmethod
    def max_calls(self, length: int) -> int:
        """An upper limit of network calls for a canvas of this length."""


def check_counts(steps: int | None, tokens: int | None) -> None:
    """Refuse numbers of calls, or of tokens in a call, that cannot be.

    >>> check_counts(None, 0)
    Traceback (most recent call last):
    unmask.errors.UsageError: tokens must lie in 1..10000000, or be none; got 0
    """
    for name, value in (("steps", steps), ("tokens", tokens)):
        if value is not None and not 1 <= value <= MAX_STEPS:
            raise UsageError(f"{name} must lie in 1..{MAX_STEPS}, or be none; got {value}")
