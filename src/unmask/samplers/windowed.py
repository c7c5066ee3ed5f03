"""Any sampler inside windows that follow each other from left to right."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from unmask.samplers import Sampler, Step
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query


@dataclass
class WindowedState:
    canvas: Canvas
    tokens_BL: Tensor
    lo: int
    inner: Any
    query: Query | None = None


class WindowedSampler(Sampler):
    """When the inner sampler is done with a window, the next one begins; rows that have ended take no part in it."""

    inner: Sampler

    @property
    @abstractmethod
    def span(self) -> tuple[int, int]:
        """How wide a window is, and how far the next one lies."""

    def seen(self, state: WindowedState, query: Query) -> Query:
        """What the network is shown of the canvas when the inner sampler asks about its window."""
        return replace(query, lo=query.lo + state.lo)

    @property
    def takes(self) -> tuple[str, ...]:
        return self.inner.takes

    def max_calls(self, length: int) -> int:
        width, stride = self.span
        windows = 1 + max(0, -(-(length - width) // stride))
        return windows * self.inner.max_calls(min(width, length))

    def part(self, canvas: Canvas, tokens_BL: Tensor, lo: int) -> Canvas:
        return canvas.part(lo, min(lo + self.span[0], tokens_BL.shape[1]), tokens_BL)

    def start(self, canvas: Canvas) -> WindowedState:
        state = WindowedState(canvas, canvas.tokens.clone(), 0, None)
        state.inner = self.inner.start(self.part(canvas, state.tokens_BL, 0))
        self._advance(state)
        return state

    def _advance(self, state: WindowedState) -> None:
        """The next question, from the next window where this one is done. Asked ahead, since only when the inner
        sampler has no more questions is it certain that an end-of-text stays."""
        width, stride = self.span
        while (query := self.inner.ask(state.inner)) is None:
            state.tokens_BL = state.canvas.close_ended(state.tokens_BL)
            if state.lo + width >= state.tokens_BL.shape[1]:
                break
            # Windows lie at multiples of the stride whatever the longest row: a row's text is its own affair.
            state.lo += stride
            state.inner = self.inner.start(self.part(state.canvas, state.tokens_BL, state.lo))
        state.query = None if query is None else self.seen(state, query)

    def ask(self, state: WindowedState) -> Query | None:
        return state.query

    def tell(self, state: WindowedState, prediction: Tensor) -> Step:
        return self.took(state, self.inner.tell(state.inner, prediction))

    def took(self, state: WindowedState, step: Step) -> Step:
        """The same step in the whole canvas, when the inner sampler has made it."""
        lo = state.lo
        state.tokens_BL = state.tokens_BL.clone()
        state.tokens_BL[:, lo : lo + self.span[0]] = step.tokens_BL
        self._advance(state)
        return step.shifted(lo, state.tokens_BL)
