"""The textbook reverse chain: all masked positions looked at in each of T steps; for models trained without SUBS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unmask.data.batch import DRAW_ORDER
from unmask.errors import UsageError
from unmask.noise import Noise
from unmask.noise.log_linear import LogLinear
from unmask.processes.absorbing import stays_masked
from unmask.rng import uniform
from unmask.samplers import MAX_STEPS, Sampler, Step
from unmask.samplers.drawing import Drawing
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query
from unmask.sampling.query import written_share


@dataclass
class PosteriorState:
    canvas: Canvas
    tokens_BL: Tensor
    step: int  # counts down from T; at 0 what is still masked is reconstructed
    row_N: Tensor
    position_N: Tensor


@dataclass(frozen=True, kw_only=True)
class Posterior(Drawing, Sampler):
    """Order: random, step by step. Calls: at most T + 1. Law: that of the T-step reverse chain, exactly.

    p_theta(z_s|z_t) = q(z_s | z_t, x_theta), also for a network that may predict the mask.
    Visible tokens keep, also at t=0, where a bound without carry-over would draw them once more. A predicted mask makes
    a position stay; what is still masked at t=0 is reconstructed there.
    For models with SUBS it has the law of the planned sampler, at T calls.
    """

    law: ClassVar[str] = "exactly the T-step chain q(z_s | z_t, x_theta), also where the network may predict the mask"
    cost: ClassVar[str] = "at most steps + 1"

    steps: int = 128
    noise: Noise = LogLinear()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None or not 1 <= self.steps <= MAX_STEPS:
            raise UsageError(f"the posterior sampler needs a number of steps from 1 to {MAX_STEPS}, got {self.steps}")

    @property
    def takes(self) -> tuple[str, ...]:
        return ("x0", "x0_and_mask")

    def max_calls(self, length: int) -> int:
        return self.steps + 1

    def start(self, canvas: Canvas) -> PosteriorState:
        none = torch.empty(0, dtype=torch.long, device=canvas.tokens.device)
        return PosteriorState(canvas, canvas.tokens.clone(), self.steps, none, none)

    def ask(self, state: PosteriorState) -> Query | None:
        masked_BL = state.tokens_BL == state.canvas.mask_id
        if state.step < 0 or not bool(masked_BL.any()):
            return None
        state.row_N, state.position_N = masked_BL.nonzero(as_tuple=True)
        t = torch.tensor(state.step / self.steps, dtype=torch.float64)
        B, L = masked_BL.shape
        return Query(
            tokens_BL=state.tokens_BL,
            level_R=self.noise.level(t).expand(B).to(masked_BL.device, torch.float32),
            at_RK=torch.arange(L, device=masked_BL.device).expand(B, L),
            wanted_RK=masked_BL,
            reach=L,
            valid_BL=state.canvas.valid_BL,
            label_B=state.canvas.label_B,
        )

    def tell(self, state: PosteriorState, prediction: Tensor) -> Step:
        canvas, row_N = state.canvas, state.row_N
        position_N = state.position_N + canvas.offset
        key_N = canvas.key_B[row_N]
        opens_N = torch.ones_like(row_N, dtype=torch.bool)
        if state.step > 0:
            t = torch.tensor([state.step - 1, state.step], dtype=torch.float64) / self.steps
            alpha_s, alpha_t = self.noise.alpha(t).to(prediction)
            u_N = uniform(key_N, DRAW_ORDER, position_N, state.step)
            opens_N = u_N >= stays_masked(prediction[:, canvas.mask_id].exp(), alpha_s, alpha_t)
        row_N, position_N, key_N = row_N[opens_N], state.position_N[opens_N], key_N[opens_N]
        token_N, log_prob_N = self.draw_tokens(
            prediction[opens_N],
            key_N,
            position_N + canvas.offset,
            canvas.never,
            share_N=written_share(canvas, state.tokens_BL)[row_N],
        )
        state.tokens_BL = canvas.close_ended(state.tokens_BL.index_put((row_N, position_N), token_N))
        state.step -= 1
        return Step(row_N, position_N, token_N, log_prob_N, state.tokens_BL)
