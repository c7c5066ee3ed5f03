"""Semi-autoregressive: a window slides over a text of any length; the end of each is the prompt of the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from unmask.errors import UsageError
from unmask.registry import check_fields
from unmask.samplers import Sampler
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.windowed import WindowedSampler, WindowedState


@dataclass(frozen=True, kw_only=True)
class SemiAR(WindowedSampler):
    """Order: windows from left to right, inside of each that of `inner`. Calls: windows × the inner sampler's.

    It fills a window and moves on by `stride`; the last window - stride tokens are the next window's prefix. The
    network sees one window at a time. Rows that have ended leave.
    """

    law: ClassVar[str] = (
        "window by window the inner sampler's, given what is written; over many windows no law of its own"
    )
    cost: ClassVar[str] = "windows x the inner sampler's calls; windows = 1 + ceil((L - window) / stride)"

    window: int
    stride: int | None = None  # None: half a window
    inner: Sampler = Ancestral()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.window < 2:
            raise UsageError("window must be at least 2, got {window}", window=self.window)
        if self.stride is not None and not 1 <= self.stride <= self.window:
            raise UsageError(
                "stride must lie in 1..{window} (the window), got {stride}", window=self.window, stride=self.stride
            )
        if self.inner.left_to_right:
            raise UsageError("left to right needs no window: use the left_to_right sampler alone")

    @property
    def span(self) -> tuple[int, int]:
        return self.window, self.stride or self.window // 2

    @property
    def context(self) -> int:
        return self.window

    def replayable(self, state: WindowedState) -> tuple[Any, Any] | None:
        return self.inner.replayable(state.inner)
