"""One position a call, from left to right: the order of autoregressive models, and a baseline for diffusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unmask.canvas import Canvas
from unmask.samplers._planned import Plan, PlannedSampler


@dataclass(frozen=True, kw_only=True)
class LeftToRight(PlannedSampler):
    """Order: column by column. Calls: L. Law: the product of its conditionals; an AR model's own, exactly.

    An autoregressive model is read with a key-value cache.
    """

    law: ClassVar[str] = (
        "exactly p(x) of an autoregressive model; of a diffusion model, its any-order law in this order"
    )
    cost: ClassVar[str] = "L"
    left_to_right: ClassVar[bool] = True

    def max_calls(self, length: int) -> int:
        return length

    def plan(self, canvas: Canvas) -> Plan:
        open_BL = canvas.open_BL.cpu().numpy()
        column_L = np.arange(open_BL.shape[1])
        rank_BL = np.where(open_BL, column_L, -1)
        # A conditioned denoiser is shown the share of the row that is still masked.
        left_BL = np.cumsum(open_BL[:, ::-1], axis=1)[:, ::-1]
        length_B1 = canvas.length_B.clamp(min=1).cpu().numpy()[:, None]  # in a window a shorter row may have no part
        return Plan(rank_BL, left_BL / length_B1)
