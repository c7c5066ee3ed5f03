"""Gibbs sampling (BERT-Mouth): the text is filled, then one position at a time is masked and redrawn given the rest.

Wang and Cho 2019, arXiv 1902.04094. If x_theta's conditionals are those of a joint distribution p, then p is
stationary; those of a trained network need not be consistent with any. What differs from the published sampler: it
chooses positions at random from the start, so that some stay masked for long; here each is filled once before any is
redrawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unmask.data.batch import DRAW_ORDER
from unmask.rng import uniform
from unmask.samplers import Sampler, State, check_counts
from unmask.samplers.drawing import Drawing
from unmask.samplers.planned import places, plan_by_place
from unmask.samplers.remasking import check_steps
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query
from unmask.sampling.query import ask_about, masked_share


@dataclass(kw_only=True)
class GibbsState(State):
    """open_BL: the positions that are filled and redrawn. rank_BL: the round that fills each; fill_B1: the number of
    rounds that fill the row."""

    open_BL: Tensor
    rank_BL: Tensor
    fill_B1: Tensor


@dataclass(frozen=True, kw_only=True)
class Gibbs(Drawing, Sampler):
    """Order: all once, then `sweeps` times as many redraws. Calls: (1 + sweeps) × L at most. Law: its chain.

    scan: random fills in a random order and then redraws a position chosen uniformly each time; systematic fills and
    redraws from left to right. steps: the number of calls that fill the text, evenly; none: one position per call.
    Fixed positions are never masked. Rows do not leave at their end-of-text, since it may be overwritten. With
    sweeps = 0 and random it has the law of ancestral with steps = none.

    >>> Gibbs(sweeps=3).max_calls(10), Gibbs(sweeps=3, steps=4).max_calls(10)
    (40, 34)
    """

    law: ClassVar[str] = "its chain, exactly; the stationary law is p where the network's conditionals are those of p"
    cost: ClassVar[str] = "(1 + sweeps) x L; min(steps, L) + sweeps x L"
    final = False

    sweeps: int = 4
    scan: Literal["random", "systematic"] = "random"
    steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps(self.sweeps, "sweeps", 0)
        check_counts(self.steps, None)

    def max_calls(self, length: int) -> int:
        return min(self.steps or length, length) + self.sweeps * length

    def start(self, canvas: Canvas) -> GibbsState:
        open_BL = canvas.masked_BL
        place_BL = open_BL.cumsum(dim=1).cpu().numpy() - 1  # from left to right
        if self.scan == "random":
            position_L = torch.arange(open_BL.shape[1]) + canvas.offset
            u_BL = uniform(canvas.key_B.cpu()[:, None], DRAW_ORDER, position_L)
            place_BL = places(u_BL.numpy(), open_BL.cpu().numpy())
        plan = plan_by_place(canvas, place_BL, tokens=None, steps=self.steps)
        rank_BL = torch.from_numpy(plan.rank_BL).to(open_BL.device)
        canvas, fill_B1 = replace(canvas, end_id=None), rank_BL.amax(dim=1, keepdim=True) + 1
        return GibbsState(canvas, canvas.tokens.clone(), open_BL=open_BL, rank_BL=rank_BL, fill_B1=fill_B1)

    def visit(self, state: GibbsState) -> int:
        return state.round

    def ask(self, state: GibbsState) -> Query | None:
        """A query about the positions that this round fills in each row, or the position that it masks and redraws."""
        canvas, at_BL = state.canvas, self.due(state)
        state.tokens_BL = state.tokens_BL.masked_fill(at_BL, canvas.mask_id)
        state.query = ask_about(canvas, state.tokens_BL, at_BL, masked_share(canvas, state.tokens_BL))
        return state.query

    def due(self, state: GibbsState) -> Tensor:
        """[B, L] the positions that are drawn in this round; none in a row whose sweeps are done."""
        num_B1, redraw_B1 = state.open_BL.sum(dim=1, keepdim=True), state.round - state.fill_B1
        place_B1 = redraw_B1 % num_B1.clamp(min=1)
        if self.scan == "random":
            # Each window of a longer text has its own random numbers, identified by its first open position.
            window_B = state.open_BL.int().argmax(dim=1) + state.canvas.offset
            u_B1 = uniform(state.canvas.key_B, DRAW_ORDER, window_B, state.round)[:, None]
            place_B1 = torch.minimum((u_B1 * num_B1).long(), num_B1 - 1)  # uniforms of only 24 bits may round up
        again_B1 = (redraw_B1 >= 0) & (redraw_B1 < self.sweeps * num_B1)
        again_BL = state.open_BL & again_B1 & (state.open_BL.cumsum(dim=1) - 1 == place_B1)
        return again_BL | (state.rank_BL == state.round)
