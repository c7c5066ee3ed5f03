"""The reverse chain in T steps (steps=none: T = infinity), planned: at most min(T, L) network calls per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from unmask.data.batch import DRAW_ORDER
from unmask.errors import Public, UsageError
from unmask.noise import Noise
from unmask.rng import uniform
from unmask.samplers import MAX_STEPS, check_counts
from unmask.samplers.planned import Plan, PlannedSampler, places, plan_by_place
from unmask.sampling.canvas import Canvas


@dataclass(frozen=True, kw_only=True)
class Ancestral(PlannedSampler):
    """Order: random, planned. Calls: at most min(T, L) a row. Law: that of the T-step reverse chain, exactly.

    Under SUBS the network does not decide whether a position opens, only which token is written. So each position's
    opening step is drawn first: u ~ U(0, 1], and it opens in the step from t to s with u in (alpha_t, alpha_s].
    The network is called only at steps that open something, and only for the positions that open.
    tokens: open exactly this many per call in a random order instead; tokens=1 has the same law as steps=none.
    """

    law: ClassVar[str] = "exactly the T-step reverse chain of the network; of continuous time with steps = none"
    cost: ClassVar[str] = "at most min(steps, L); L with steps = none; ceil(L / tokens)"

    steps: int | None = 128
    tokens: int | None = None
    noise: Noise | None = None  # None: the model's

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and not 1 <= self.steps <= MAX_STEPS:
            raise UsageError(
                "steps must lie in 1..{most}, or be none for one token a call; got {steps}",
                most=Public(MAX_STEPS),
                steps=self.steps,
            )
        check_counts(None, self.tokens)

    def max_calls(self, length: int) -> int:
        if self.tokens is not None:
            return -(-length // self.tokens)
        return length if self.steps is None else min(self.steps, length)

    def plan(self, canvas: Canvas) -> Plan:
        key_B = canvas.key_B.cpu()
        open_BL = canvas.masked_BL.cpu().numpy()
        position_L = torch.arange(open_BL.shape[1]) + canvas.offset
        u_BL = 1 - uniform(key_B[:, None], DRAW_ORDER, position_L)  # in (0, 1]
        if self.tokens is not None:
            return plan_by_place(canvas, places(u_BL.numpy(), open_BL), tokens=self.tokens)
        if self.steps is None:
            # T → infinity: one position per call, in the order of the hitting times alpha(t) = u. Time runs from 1 to
            # 0, so alpha increases and the smallest u opens first; the level at the hitting time is 1 - u for every
            # schedule.
            when_BL, level_BL = u_BL.numpy(), (1 - u_BL).numpy()
        else:
            t = torch.arange(self.steps, -1, -1, dtype=torch.float64) / self.steps  # 1 … 0
            alpha = self.schedule.alpha(t)  # 0 … 1, rising
            # The k-th step goes from t[k] to t[k+1] and opens u in (alpha[k], alpha[k+1]].
            k_BL = torch.searchsorted(alpha, u_BL, right=False) - 1
            when_BL, level_BL = k_BL.numpy(), self.schedule.level(t)[k_BL].numpy()
        return Plan(_ranks(when_BL, open_BL), level_BL)


def _ranks(when_BL: np.ndarray, open_BL: np.ndarray) -> np.ndarray:
    """Each row's distinct opening times, numbered from 0; -1 where nothing opens."""
    when_BL = np.where(open_BL, when_BL, np.inf)  # fixed positions come last
    order_BL = np.argsort(when_BL, axis=1, kind="stable")
    sorted_BL = np.take_along_axis(when_BL, order_BL, axis=1)
    later_BL = np.zeros(open_BL.shape, dtype=np.int64)
    later_BL[:, 1:] = sorted_BL[:, 1:] != sorted_BL[:, :-1]
    rank_BL = np.empty_like(later_BL)
    np.put_along_axis(rank_BL, order_BL, np.cumsum(later_BL, axis=1), axis=1)
    return np.where(open_BL, rank_BL, -1)
