"""Samplers: the order in which positions open, and how tokens are drawn. They refer to no network and no text.

To add one, subclass `Sampler` and define `ask`, which returns the next query to the network, and `max_calls`. All other
methods have defaults: all queried positions open, and each token is drawn from the prediction and written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from unmask.errors import Public, UsageError
from unmask.registry import Room

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from unmask.noise import Noise
    from unmask.processes.base import Process
    from unmask.samplers.drawing import Drawing
    from unmask.sampling.canvas import Canvas
    from unmask.sampling.predictor import Query

room = Room("unmask.samplers", base="Sampler", helpers=("adaptive", "drawing", "planned", "remasking", "windowed"))
MAX_STEPS = 10_000_000  # a time grid of this size is allocated
Accepts = tuple[tuple[str | None, str], ...]  # (process, what is predicted)


@dataclass(frozen=True)
class RunnersUp:
    """The likeliest other tokens where a token was written, the likeliest first, and the written token's probability.

    These are the network's own probabilities, before temperature, cuts, forbidden ids and constraints.
    """

    token_NK: Tensor
    prob_NK: Tensor
    prob_N: Tensor  # of the token that was written


@dataclass(frozen=True)
class Step:
    """The result of one network call: the rows and positions that opened, the tokens written, and their probabilities.

    log_prob_N is under the distribution that the token was drawn from. tokens_BL is the canvas after the step, with
    remasked positions masked, and with end-of-text at all positions after the end of a row.
    others (the runners-up) and remasked (rows and positions) are set if an observer asks for runners-up.
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


@dataclass
class State:
    """The state of a run: its initial canvas, the current tokens, the last query, and the number of answered queries.

    A sampler that needs more state subclasses it and overrides `Sampler.start`.
    """

    canvas: Canvas
    tokens_BL: Tensor
    query: Query | None = None
    round: int = 0


class Sampler(ABC):
    """Base class of all samplers: `start` with a canvas, then alternate `ask` and `tell` until `ask` returns None.

    The state belongs to the sampler. `tell` has three parts: `select` decides which of the queried positions open,
    `draw_opened` draws their tokens, and `write` puts them on the canvas. A constraint replaces `draw_opened` (see
    unmask.sampling.constrained), and so does a server that has drawn the tokens of many rows at once.

    >>> import torch, unmask
    >>> from unmask.sampling.query import ask_about, masked_share
    >>> class Last(unmask.samplers.Sampler):  # from right to left
    ...     def max_calls(self, length):
    ...         return length
    ...
    ...     def ask(self, state):
    ...         masked_BL = state.tokens_BL == state.canvas.mask_id
    ...         last_BL = masked_BL & (masked_BL.flip(1).cumsum(1).flip(1) == 1)
    ...         level_B = masked_share(state.canvas, state.tokens_BL)
    ...         state.query = ask_about(state.canvas, state.tokens_BL, last_BL, level_B)
    ...         return state.query
    >>> coin = unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> opened = unmask.steps(coin, unmask.Canvas.blank(num=1, length=3, mask_id=2), Last())
    >>> [step.position_N.tolist() for step in opened]
    [[2], [1], [0]]
    """

    room: ClassVar[Room] = room
    law: ClassVar[str] = "no law claimed"  # the tested distribution of the finished texts
    cost: ClassVar[str] = ""  # network calls as a formula of the options and the length L
    accepts: Accepts = (("absorbing", "x0"),)  # pairs of process and kind of prediction that it can use
    own_inner: ClassVar[bool] = True  # of a wrapper: the default `inner` is the model's own sampler

    # --- what it can do ---

    @property
    def final(self) -> bool:
        """Whether written tokens never change, so that a text can be streamed while it is written."""
        return True

    @property
    def planned(self) -> bool:
        """Whether all queried positions open whatever the prediction, with tokens drawn by `drawing`.

        Then rows of several canvases may be drawn together. `select` and `draw_opened` must be those of this class.
        """
        return False

    @property
    def left_to_right(self) -> bool:
        """Whether it opens one column after another, as autoregressive models require."""
        return False

    @property
    def fixed_order(self) -> bool:
        """Whether the order is a deterministic function of the visible tokens: then texts have an exact likelihood."""
        return False

    @property
    def constrainable(self) -> bool:
        """Whether a constraint may replace `draw_opened`: only masked positions are written."""
        return True

    @property
    def context(self) -> int | None:
        """The number of tokens that the network reads at a time; None: the whole canvas."""
        return None

    @property
    def drawing(self) -> Drawing:
        """Temperature and cuts of the draws: its own options, or those of the inner sampler."""
        from unmask.samplers.drawing import Drawing

        return self if isinstance(self, Drawing) else Drawing()

    def visit(self, state: Any) -> int | None:
        """The number of the current draw, if a position may be drawn several times and needs new random numbers."""
        return None

    # --- what it is bound to ---

    def bind(self, process: Process | None) -> Sampler:
        """The same sampler, with the noise of the model's process if it has none of its own; inner samplers as well.

        >>> from unmask.samplers import Ancestral
        >>> Ancestral().bind(None).noise
        LogLinear()
        """
        known = {field.name for field in fields(cast(Any, self))} if is_dataclass(type(self)) else set()
        changes: dict[str, Any] = {}
        if "noise" in known and getattr(self, "noise", None) is None:
            changes["noise"] = (process.schedule if process is not None else None) or self.schedule
        inner = getattr(self, "inner", None) if "inner" in known else None
        if isinstance(inner, Sampler) and (bound := inner.bind(process)) is not inner:
            changes["inner"] = bound
        return cast(Sampler, replace(cast(Any, self), **changes)) if changes else self

    @property
    def schedule(self) -> Noise:
        """The sampler's noise schedule; log-linear if it has none and is not bound to a model."""
        from unmask.noise.log_linear import LogLinear

        return getattr(self, "noise", None) or LogLinear()

    # --- a run ---

    @abstractmethod
    def max_calls(self, length: int) -> int:
        """An upper bound on the number of network calls for a canvas of this length."""

    def start(self, canvas: Canvas) -> Any:
        """The initial state, in which nothing has opened; everything that can be planned is planned here."""
        return State(canvas, canvas.tokens.clone())

    @abstractmethod
    def ask(self, state: Any) -> Query | None:
        """The next query to the network, also stored in `state.query`; None when no mask is left."""

    def tell(self, state: Any, prediction: Tensor) -> Step:
        """Take the network's answer to the last query, one line per wanted position, and write tokens."""
        opens_N = self.select(state, prediction)
        token_N, log_prob_N = self.draw_opened(state, prediction, opens_N)
        return self.write(state, opens_N, token_N, log_prob_N)

    def select(self, state: Any, prediction: Tensor) -> Tensor:
        """[N] which of the queried positions open now, line by line; all of them unless overridden."""
        import torch

        return torch.ones(len(prediction), dtype=torch.bool, device=prediction.device)

    def draw_opened(self, state: Any, prediction: Tensor, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Draw tokens for the lines that open; also their log-probabilities under the sampled distribution."""
        from unmask.sampling.query import written_share

        canvas = state.canvas
        row_N, position_N = self.opened(state, opens_N)
        return self.drawing.draw_tokens(
            prediction if self.planned else prediction[opens_N],
            canvas.key_B[row_N],
            position_N + canvas.offset,
            canvas.never,
            share_N=written_share(canvas, state.tokens_BL)[row_N],
            visit=self.visit(state),
        )

    def write(self, state: Any, opens_N: Tensor, token_N: Tensor, log_prob_N: Tensor) -> Step:
        """Write the tokens at the positions that open, and end-of-text into rows that have ended."""
        row_N, position_N = self.opened(state, opens_N)
        state.tokens_BL = state.canvas.close_ended(state.tokens_BL.index_put((row_N, position_N), token_N))
        state.round += 1
        return Step(row_N, position_N, token_N, log_prob_N, state.tokens_BL)

    def opened(self, state: Any, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and positions, in the state's canvas, of the lines that open."""
        from unmask.sampling.query import lines_of

        row_N, position_N = lines_of(state.query)
        return row_N[opens_N], position_N[opens_N]

    # --- optional abilities ---

    def copy_rows(self, state: Any, rows_B: np.ndarray, canvas: Canvas) -> Any:
        """A state whose row b is a copy of row rows_B[b], to be continued with the keys of `canvas`; for particles."""
        raise UsageError(
            "the sampler {sampler} cannot copy rows: use ancestral or left_to_right",
            sampler=Public(type(self).__name__),
        )

    @property
    def copies_rows(self) -> bool:
        """Whether `copy_rows` is implemented."""
        return type(self).copy_rows is not Sampler.copy_rows

    def replayable(self, state: Any) -> tuple[Any, Any] | None:
        """The planned sampler and state whose remaining rounds a GPU may replay without the host, or None."""
        return None

    def replayed(self, state: Any, step: Step) -> Step:
        """Convert a step of that planned sampler into a step of this sampler."""
        return step

    def go_on(self, state: Any) -> None:
        """Called after those rounds: prepare the next query."""
        return


class Wrapper(Sampler):
    """A sampler around another one, `inner`, whose draws and abilities it takes over."""

    inner: Sampler

    @property
    def accepts(self) -> Accepts:  # type: ignore[override]
        return self.inner.accepts

    @property
    def final(self) -> bool:
        return self.inner.final

    @property
    def fixed_order(self) -> bool:
        return self.inner.fixed_order

    @property
    def constrainable(self) -> bool:
        return self.inner.constrainable

    @property
    def drawing(self) -> Drawing:
        return self.inner.drawing

    def visit(self, state: Any) -> int | None:
        return self.inner.visit(state.inner)


def fitting(process: str | None, gives: str) -> list[str]:
    """The names of the samplers that can use such predictions, without wrappers, which depend on their inner sampler.

    >>> fitting("absorbing", "x0_and_mask")
    ['posterior']
    """
    declared = {name: room.get(name).accepts for name in room.names()}
    return [name for name, pairs in declared.items() if isinstance(pairs, tuple) and (process, gives) in pairs]


def check_counts(steps: int | None, tokens: int | None) -> None:
    """Refuse invalid numbers of calls, or of tokens per call.

    >>> check_counts(None, 0)
    Traceback (most recent call last):
    unmask.errors.UsageError: tokens must lie in 1..10000000, or be none; got 0
    """
    for name, value in (("steps", steps), ("tokens", tokens)):
        if value is not None and not 1 <= value <= MAX_STEPS:
            raise UsageError(
                "{name} must lie in 1..{most}, or be none; got {value}",
                name=Public(name),
                most=Public(MAX_STEPS),
                value=value,
            )
