"""Running any sampler in windows, from left to right."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from unmask.samplers import State, Step, Wrapper
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query


@dataclass(kw_only=True)
class WindowedState(State):
    """left_BL: open positions outside finished windows. lo: first column of the window; inner: the inner state."""

    left_BL: Tensor
    lo: int = 0
    inner: Any = None


class WindowedSampler(Wrapper):
    """Runs the inner sampler in one window after another; rows that have ended are left out of later windows."""

    @property
    @abstractmethod
    def span(self) -> tuple[int, int]:
        """The width of a window, and the distance to the next one."""

    def visible(self, state: WindowedState, query: Query) -> Query:
        """The query that the network gets for a query of the inner sampler about its window."""
        return replace(query, lo=query.lo + state.lo)

    def max_calls(self, length: int) -> int:
        width, stride = self.span
        windows = 1 + max(0, -(-(length - width) // stride))
        return windows * self.inner.max_calls(min(width, length))

    def start(self, canvas: Canvas) -> WindowedState:
        state = WindowedState(canvas, canvas.tokens.clone(), left_BL=canvas.open_BL)
        state.inner = self.inner.start(self._window(state))
        self.go_on(state)
        return state

    def _window(self, state: WindowedState) -> Canvas:
        hi = min(state.lo + self.span[0], state.tokens_BL.shape[1])
        return state.canvas.part(state.lo, hi, state.tokens_BL, state.left_BL)

    def go_on(self, state: WindowedState) -> None:
        """Compute the next query, from the next window if this one is done.

        It is computed ahead, since an end-of-text is certain to stay only once the inner sampler has no more queries.
        """
        width, stride = self.span
        while (query := self.inner.ask(state.inner)) is None:
            closed_BL = state.canvas.close_ended(state.tokens_BL)
            state.left_BL = state.left_BL & (closed_BL == state.tokens_BL)
            state.left_BL[:, state.lo : state.lo + width] = False
            state.tokens_BL = closed_BL
            if state.lo + width >= state.tokens_BL.shape[1]:
                break
            # Windows begin at multiples of the stride, so that a row's text does not depend on the longest row.
            state.lo += stride
            state.inner = self.inner.start(self._window(state))
        state.query = None if query is None else self.visible(state, query)

    def ask(self, state: WindowedState) -> Query | None:
        return state.query

    def select(self, state: WindowedState, prediction: Tensor) -> Tensor:
        return self.inner.select(state.inner, prediction)

    def draw_opened(self, state: WindowedState, prediction: Tensor, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.draw_opened(state.inner, prediction, opens_N)

    def opened(self, state: WindowedState, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        row_N, position_N = self.inner.opened(state.inner, opens_N)
        return row_N, position_N + state.lo

    def write(self, state: WindowedState, opens_N: Tensor, token_N: Tensor, log_prob_N: Tensor) -> Step:
        step = self.replayed(state, self.inner.write(state.inner, opens_N, token_N, log_prob_N))
        self.go_on(state)
        return replace(step, tokens_BL=state.tokens_BL)

    def replayed(self, state: WindowedState, step: Step) -> Step:
        """The inner sampler's step, in columns of the whole canvas."""
        state.tokens_BL = state.tokens_BL.clone()
        state.tokens_BL[:, state.lo : state.lo + self.span[0]] = step.tokens_BL
        return step.shifted(state.lo, state.tokens_BL)
