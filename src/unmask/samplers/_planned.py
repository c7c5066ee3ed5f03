"""Samplers whose order is known before the first network call: the plan is a rank for every open position.

In round r every row opens its positions of rank r. Rows do not wait for each other: a row with fewer rounds is simply
done sooner. The plan lives on the host: what to ask next is known without looking at the device.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from unmask.canvas import Canvas
from unmask.predictor import Query
from unmask.samplers import Sampler, Step
from unmask.samplers._drawing import Drawing


@dataclass
class Plan:
    """rank_BL: the round in which a position opens (-1: fixed). level_BL: the noise level shown to the network then."""

    rank_BL: np.ndarray
    level_BL: np.ndarray


@dataclass
class PlannedState:
    canvas: Canvas
    tokens_BL: Tensor
    rounds: list[tuple[np.ndarray, np.ndarray]]  # rows and positions that open, sorted by row
    level_BL: np.ndarray
    round: int = 0
    asked: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0), torch.empty(0)))


class PlannedSampler(Sampler, Drawing):
    @abstractmethod
    def plan(self, canvas: Canvas) -> Plan: ...

    def start(self, canvas: Canvas) -> PlannedState:
        plan = self.plan(canvas)
        row, position = np.nonzero(plan.rank_BL >= 0)
        rank = plan.rank_BL[row, position]
        order = np.argsort(rank, kind="stable")  # stable: inside a round still sorted by row, then position
        counts = np.bincount(rank, minlength=0) if len(rank) else np.zeros(0, dtype=int)
        cuts = np.cumsum(counts)[:-1]
        rounds = [
            (r, p)
            for r, p in zip(np.split(row[order], cuts), np.split(position[order], cuts), strict=True)
            if len(r)  # left to right, a column may be fixed in every row
        ]
        return PlannedState(canvas, canvas.tokens.clone(), rounds, plan.level_BL)

    def ask(self, state: PlannedState) -> Query | None:
        if state.round == len(state.rounds):
            return None
        row_N, position_N = state.rounds[state.round]
        device = state.tokens_BL.device
        rows, first, counts = np.unique(row_N, return_index=True, return_counts=True)
        column_N = np.arange(len(row_N)) - np.repeat(first, counts)
        index_N = np.repeat(np.arange(len(rows)), counts)
        at_RK = np.zeros((len(rows), counts.max()), dtype=np.int64)
        wanted_RK = np.zeros(at_RK.shape, dtype=bool)
        at_RK[index_N, column_N], wanted_RK[index_N, column_N] = position_N, True
        state.asked = (torch.from_numpy(row_N).to(device), torch.from_numpy(position_N).to(device))
        whole = len(rows) == len(state.tokens_BL)
        return Query(
            tokens_BL=state.tokens_BL,
            level_R=torch.from_numpy(state.level_BL[row_N[first], position_N[first]].astype(np.float32)).to(device),
            at_RK=torch.from_numpy(at_RK).to(device),
            wanted_RK=torch.from_numpy(wanted_RK).to(device),
            reach=int(position_N.max()) + 1,
            rows_R=None if whole else torch.from_numpy(rows).to(device),
            valid_BL=state.canvas.valid_BL,
        )

    def tell(self, state: PlannedState, prediction: Tensor) -> Step:
        row_N, position_N = state.asked
        canvas = state.canvas
        token_N, log_prob_N = self.draw(
            prediction, canvas.key_B[row_N], position_N + canvas.offset, (canvas.mask_id, *canvas.forbidden)
        )
        return self.write(state, token_N, log_prob_N)

    def write(self, state: PlannedState, token_N: Tensor, log_prob_N: Tensor) -> Step:
        """Put drawn tokens where this round opens."""
        row_N, position_N = state.asked
        state.tokens_BL = state.tokens_BL.index_put((row_N, position_N), token_N)
        state.round += 1
        return Step(row_N, position_N, token_N, log_prob_N, state.tokens_BL)
