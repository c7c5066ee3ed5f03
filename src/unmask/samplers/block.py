"""Blocks from left to right inside one window, in any order inside a block; the network sees the whole canvas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from unmask.errors import UsageError
from unmask.registry import check_fields
from unmask.samplers import Sampler
from unmask.samplers.base import Accepts
from unmask.samplers.confidence import Confidence
from unmask.samplers.windowed import WindowedSampler, WindowedState
from unmask.sampling.predictor import Query
from unmask.sampling.query import masked_share


@dataclass(frozen=True, kw_only=True)
class Block(WindowedSampler):
    """Order: blocks of `size` from left to right, inside of each that of `inner`. Calls: blocks × the inner sampler's.

    Positions after the block are masked for the network. A conditioned network gets the masked share of the whole row
    as its level. Rows that have ended leave.
    """

    law: ClassVar[str] = "the inner sampler's in each block, given what stands around it"
    cost: ClassVar[str] = "blocks x the inner sampler's calls; blocks = ceil(L / size)"

    own_inner = False

    size: int = 32
    inner: Sampler = Confidence()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.size < 1:
            raise UsageError("size is the number of tokens in a block, at least 1; got {size}", size=self.size)
        if self.inner.context is not None:
            raise UsageError("a block lies inside a window: put block into semi_ar, not semi_ar into block")

    @property
    def accepts(self) -> Accepts:  # type: ignore[override]
        """What the inner sampler accepts, restricted to processes whose masks show how much is left."""
        return tuple(pair for pair in self.inner.accepts if pair[0] == "absorbing")

    @property
    def span(self) -> tuple[int, int]:
        return self.size, self.size

    def visible(self, state: WindowedState, query: Query) -> Query:
        tokens_BL = state.tokens_BL.clone()
        tokens_BL[:, state.lo : state.lo + self.size] = query.tokens_BL
        level_B = masked_share(state.canvas, tokens_BL)
        return replace(
            query,
            tokens_BL=tokens_BL,
            level_R=level_B if query.rows_R is None else level_B[query.rows_R],
            at_RK=query.at_RK + state.lo,
            reach=query.reach + state.lo,
            valid_BL=state.canvas.valid_BL,
        )
