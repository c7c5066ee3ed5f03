"""The textbook reverse chain: each of T steps queries all masked positions; for models trained without SUBS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unmask.data.batch import DRAW_ORDER
from unmask.errors import Public, UsageError
from unmask.noise import Noise
from unmask.processes.absorbing import stays_masked
from unmask.rng import uniform
from unmask.samplers import MAX_STEPS, Sampler, State
from unmask.samplers.drawing import Drawing
from unmask.sampling.predictor import Query


@dataclass(frozen=True, kw_only=True)
class Posterior(Drawing, Sampler):
    """Order: random, step by step. Calls: at most T + 1. Law: that of the T-step reverse chain, exactly.

    p_theta(z_s|z_t) = q(z_s | z_t, x_theta) (MDLM's equation 7), also for a network that may predict the mask.
    Visible tokens stay, also at t=0, where a bound without carry-over would redraw them. If the mask is predicted, the
    position stays masked; positions still masked at t=0 are reconstructed.
    For models with SUBS it has the law of the planned sampler, with T calls.
    """

    law: ClassVar[str] = "exactly the T-step chain q(z_s | z_t, x_theta), also where the network may predict the mask"
    cost: ClassVar[str] = "at most steps + 1"

    accepts = (("absorbing", "x0"), ("absorbing", "x0_and_mask"))

    steps: int = 128
    noise: Noise | None = None  # None: the model's

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None or not 1 <= self.steps <= MAX_STEPS:
            raise UsageError(
                "the posterior sampler needs a number of steps from 1 to {most}, got {steps}",
                most=Public(MAX_STEPS),
                steps=self.steps,
            )

    def max_calls(self, length: int) -> int:
        return self.steps + 1

    def ask(self, state: State) -> Query | None:
        masked_BL = state.tokens_BL == state.canvas.mask_id
        if state.round > self.steps or not bool(masked_BL.any()):
            return None
        t = torch.tensor((self.steps - state.round) / self.steps, dtype=torch.float64)
        B, L = masked_BL.shape
        state.query = Query(
            tokens_BL=state.tokens_BL,
            level_R=self.schedule.level(t).expand(B).to(masked_BL.device, torch.float32),
            at_RK=torch.arange(L, device=masked_BL.device).expand(B, L),
            wanted_RK=masked_BL,
            reach=L,
            valid_BL=state.canvas.valid_BL,
            label_B=state.canvas.label_B,
        )
        return state.query

    def select(self, state: State, prediction: Tensor) -> Tensor:
        opens_N = super().select(state, prediction)
        step = self.steps - state.round  # counts down from T; at 0 the remaining masks are reconstructed
        if step == 0:
            return opens_N
        canvas = state.canvas
        row_N, position_N = self.opened(state, opens_N)
        t = torch.tensor([step - 1, step], dtype=torch.float64) / self.steps
        alpha_s, alpha_t = self.schedule.alpha(t).to(prediction)
        u_N = uniform(canvas.key_B[row_N], DRAW_ORDER, position_N + canvas.offset, step)
        return u_N >= stays_masked(prediction[:, canvas.mask_id].exp(), alpha_s, alpha_t)
