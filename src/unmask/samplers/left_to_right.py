"""From left to right, one position per call: the order of autoregressive models; also several, or partly random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from unmask.data.batch import DRAW_ORDER
from unmask.errors import UsageError
from unmask.rng import uniform
from unmask.samplers import check_counts
from unmask.samplers.planned import Plan, PlannedSampler, places, plan_by_place
from unmask.sampling.canvas import Canvas


@dataclass(frozen=True, kw_only=True)
class LeftToRight(PlannedSampler):
    """Order: left to right. Calls: L, or ceil(L / tokens), or min(steps, L). Law: the product of its conditionals.

    tokens: the number of tokens per call; steps: the number of calls per row. random: how random the order is; at 1 it
    is uniformly random. Autoregressive models support none of these options: they are read with a key-value cache,
    column by column.
    """

    law: ClassVar[str] = (
        "exactly p(x) of an autoregressive model; of a diffusion model, its any-order law in this order"
    )
    cost: ClassVar[str] = "L, or ceil(L / tokens), or min(steps, L)"

    accepts = (("absorbing", "x0"), (None, "next"))

    tokens: int | None = None
    steps: int | None = None
    random: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self.steps, self.tokens)
        if self.steps is not None and self.tokens is not None:
            raise UsageError("steps and tokens both say how many open in a call: give one of them")
        if not 0 <= self.random <= 1:
            raise UsageError(
                "random is the share of the order that is random, in [0, 1]; got {random}", random=self.random
            )

    @property
    def left_to_right(self) -> bool:
        return self.tokens in (None, 1) and self.steps is None and self.random == 0

    @property
    def fixed_order(self) -> bool:
        return self.random == 0

    def max_calls(self, length: int) -> int:
        return -(-length // (self.tokens or 1)) if self.steps is None else min(self.steps, length)

    def plan(self, canvas: Canvas) -> Plan:
        open_BL = canvas.masked_BL.cpu().numpy()
        place_BL = np.cumsum(open_BL, axis=1) - 1
        if self.random:
            position_L = torch.arange(open_BL.shape[1]) + canvas.offset
            u_BL = uniform(canvas.key_B.cpu()[:, None], DRAW_ORDER, position_L).numpy()
            sooner_BL = 1 - place_BL / np.maximum(open_BL.sum(axis=1, keepdims=True), 1)
            place_BL = places(-((1 - self.random) * sooner_BL + self.random * u_BL), open_BL)
        plan = plan_by_place(canvas, place_BL, tokens=self.tokens, steps=self.steps)
        if self.left_to_right:  # by columns: autoregressive models read all rows in lockstep
            return Plan(np.where(open_BL, np.arange(open_BL.shape[1]), -1), plan.level_BL)
        return plan
