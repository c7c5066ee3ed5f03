"""Semi-autoregressive: a window slides over a text of any length; its finished end is the next one's prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from unmask.canvas import Canvas
from unmask.errors import UsageError
from unmask.predictor import Query
from unmask.samplers import Sampler, Step
from unmask.samplers.ancestral import Ancestral


@dataclass
class SemiARState:
    canvas: Canvas
    tokens_BL: Tensor
    start: int
    inner: Any


@dataclass(frozen=True, kw_only=True)
class SemiAR(Sampler):
    """Fills a window with `inner`, moves on by `stride`; the last window - stride tokens are the next one's prefix."""

    law: ClassVar[str] = "the inner sampler's in every window, given what the windows before it wrote"
    cost: ClassVar[str] = "windows x the inner sampler's calls; windows = 1 + ceil((L - window) / stride)"

    window: int
    stride: int | None = None  # None: half a window
    inner: Sampler = Ancestral()

    def __post_init__(self) -> None:
        if self.window < 2:
            raise UsageError(f"window must be at least 2, got {self.window}")
        if self.stride is not None and not 1 <= self.stride <= self.window:
            raise UsageError(f"stride must lie in 1..{self.window} (the window), got {self.stride}")
        if self.inner.left_to_right:
            raise UsageError("left to right needs no window: use the left_to_right sampler alone")

    @property
    def _stride(self) -> int:
        return self.stride or self.window // 2

    @property
    def takes(self) -> tuple[str, ...]:
        return self.inner.takes

    def max_calls(self, length: int) -> int:
        windows = 1 + max(0, -(-(length - self.window) // self._stride))
        return windows * self.inner.max_calls(min(self.window, length))

    def start(self, canvas: Canvas) -> SemiARState:
        state = SemiARState(canvas, canvas.tokens.clone(), 0, None)
        self._open_window(state)
        return state

    def _window(self, canvas: Canvas, tokens_BL: Tensor, lo: int) -> Canvas:
        hi = min(lo + self.window, tokens_BL.shape[1])
        valid_BL = None if canvas.valid_BL is None else canvas.valid_BL[:, lo:hi]
        return replace(canvas, tokens=tokens_BL[:, lo:hi], valid_BL=valid_BL, offset=canvas.offset + lo)

    def _open_window(self, state: SemiARState) -> None:
        state.inner = self.inner.start(self._window(state.canvas, state.tokens_BL, state.start))

    def ask(self, state: SemiARState) -> Query | None:
        while (query := self.inner.ask(state.inner)) is None:
            if state.start + self.window >= state.tokens_BL.shape[1]:
                return None
            # Windows lie at multiples of the stride whatever the longest row: a row's text is its own affair.
            state.start += self._stride
            self._open_window(state)
        return query

    def tell(self, state: SemiARState, prediction: Tensor) -> Step:
        step = self.inner.tell(state.inner, prediction)
        lo, hi = state.start, state.start + step.tokens_BL.shape[1]
        state.tokens_BL = state.tokens_BL.clone()
        state.tokens_BL[:, lo:hi] = step.tokens_BL  # the whole window: a token may have been masked again
        return step.shifted(lo, state.tokens_BL)

    def run(self, canvas: Canvas, fill: Callable[[Canvas], Iterable[Step]]) -> Iterator[Step]:
        """The same windows, each filled whole by `fill`: for a runner that has its own way with the inner sampler."""
        tokens_BL, lo = canvas.tokens.clone(), 0
        while True:
            window = self._window(canvas, tokens_BL, lo)
            for step in fill(window):
                whole = tokens_BL.clone()
                whole[:, lo : lo + self.window] = step.tokens_BL
                yield step.shifted(lo, whole)
                tokens_BL = whole
            if lo + self.window >= tokens_BL.shape[1]:
                return
            lo += self._stride
