"""Samplers whose order is known before the first network call: the plan is a rank for every open position.

In round r every row opens its positions of rank r. A row with fewer rounds is simply done sooner. The plan is on the
host, so the next query is known without reading from the device, unless rows may leave at their end-of-text.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.samplers import Sampler, State
from unmask.samplers.drawing import Drawing
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query


@dataclass
class Plan:
    """rank_BL: the round in which a position opens (-1: fixed). level_BL: the network's noise level then."""

    rank_BL: np.ndarray
    level_BL: np.ndarray


@dataclass(kw_only=True)
class PlannedState(State):
    """row_E and position_E: all positions that open, sorted by round, then row, then position; round r is
    starts[r]..starts[r + 1]. asked: rows and positions of the last query."""

    row_E: np.ndarray
    position_E: np.ndarray
    starts: np.ndarray
    level_BL: np.ndarray
    asked: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0), torch.empty(0)))

    @property
    def num_rounds(self) -> int:
        return len(self.starts) - 1

    def opens(self, r: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and positions that open in round r."""
        part = slice(self.starts[r], self.starts[r + 1])
        return self.row_E[part], self.position_E[part]


def places(when_BL: np.ndarray, open_BL: np.ndarray) -> np.ndarray:
    """The rank of each open position in its row's order of times, the earliest 0; fixed positions come last.

    >>> places(np.array([[0.3, 0.1, 0.2]]), np.array([[True, False, True]])).tolist()
    [[1, 2, 0]]
    """
    order_BL = np.argsort(np.where(open_BL, when_BL, np.inf), axis=1, kind="stable")
    place_BL: np.ndarray = np.argsort(order_BL, axis=1)
    return place_BL


def plan_by_place(canvas: Canvas, place_BL: np.ndarray, *, tokens: int | None, steps: int | None = None) -> Plan:
    """A plan that opens positions in the order of their places: `tokens` per round (None: one), or in `steps` rounds.

    A conditioned denoiser gets the share of the row that is masked when the round begins.
    """
    open_BL = canvas.masked_BL.cpu().numpy()
    num_B1 = open_BL.sum(axis=1, keepdims=True)
    if steps is None:
        rank_BL = place_BL // (tokens or 1)
        first_BL = rank_BL * (tokens or 1)
    else:
        each_B1, more_B1 = np.divmod(num_B1, steps)  # the first more_B1 rounds open one position more than the others
        early_B1 = more_B1 * (each_B1 + 1)
        later_BL = more_B1 + (place_BL - early_B1) // np.maximum(each_B1, 1)
        rank_BL = np.where(place_BL < early_B1, place_BL // (each_B1 + 1), later_BL)
        first_BL = np.where(rank_BL < more_B1, rank_BL * (each_B1 + 1), early_B1 + (rank_BL - more_B1) * each_B1)
    length_B1 = canvas.length_B.clamp(min=1).cpu().numpy()[:, None]  # a shorter row may be empty in this window
    return Plan(np.where(open_BL, rank_BL, -1), (num_B1 - first_BL) / length_B1)


class PlannedSampler(Sampler, Drawing):
    planned = True

    @abstractmethod
    def plan(self, canvas: Canvas) -> Plan: ...

    def start(self, canvas: Canvas) -> PlannedState:
        plan = self.plan(canvas)
        return self._planned(canvas, canvas.tokens.clone(), plan.rank_BL, plan.level_BL)

    def copy_rows(self, state: PlannedState, rows_B: np.ndarray, canvas: Canvas) -> PlannedState:
        """A copy continues with its original's plan; the remaining rounds are counted from 0."""
        rank_BL = np.full(state.level_BL.shape, -1)
        rank_BL[state.row_E, state.position_E] = np.repeat(np.arange(state.num_rounds), np.diff(state.starts))
        left_BL = np.where(rank_BL >= state.round, rank_BL, -1)[rows_B]
        tokens_BL = state.tokens_BL[torch.from_numpy(rows_B).to(state.tokens_BL.device)]
        return self._planned(canvas, tokens_BL, left_BL, state.level_BL[rows_B])

    @staticmethod
    def _planned(canvas: Canvas, tokens_BL: Tensor, rank_BL: np.ndarray, level_BL: np.ndarray) -> PlannedState:
        row, position = np.nonzero(rank_BL >= 0)
        rank = rank_BL[row, position]
        order = np.argsort(rank, kind="stable")  # stable: inside a round still sorted by row, then position
        counts = np.bincount(rank) if len(rank) else np.zeros(0, dtype=int)
        counts = counts[counts > 0]  # in left-to-right order, a column may be fixed in every row
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return PlannedState(
            canvas, tokens_BL, row_E=row[order], position_E=position[order], starts=starts, level_BL=level_BL
        )

    def ask(self, state: PlannedState) -> Query | None:
        row_N, position_N = self._due(state)
        while not len(row_N):
            if state.round >= state.num_rounds:
                return None
            state.round += 1
            row_N, position_N = self._due(state)
        device = state.tokens_BL.device
        rows, first, counts = np.unique(row_N, return_index=True, return_counts=True)
        column_N = np.arange(len(row_N)) - np.repeat(first, counts)
        index_N = np.repeat(np.arange(len(rows)), counts)
        at_RK = np.zeros((len(rows), counts.max()), dtype=np.int64)
        wanted_RK = np.zeros(at_RK.shape, dtype=bool)
        at_RK[index_N, column_N], wanted_RK[index_N, column_N] = position_N, True
        state.asked = (torch.from_numpy(row_N).to(device), torch.from_numpy(position_N).to(device))
        whole = len(rows) == len(state.tokens_BL)
        state.query = Query(
            tokens_BL=state.tokens_BL,
            level_R=torch.from_numpy(state.level_BL[row_N[first], position_N[first]].astype(np.float32)).to(device),
            at_RK=torch.from_numpy(at_RK).to(device),
            wanted_RK=torch.from_numpy(wanted_RK).to(device),
            reach=int(position_N.max()) + 1,
            rows_R=None if whole else torch.from_numpy(rows).to(device),
            valid_BL=state.canvas.valid_BL,
            label_B=state.canvas.label_B,
        )
        return state.query

    def _due(self, state: PlannedState) -> tuple[np.ndarray, np.ndarray]:
        """The positions that open in this round, without rows that have ended early."""
        if state.round >= state.num_rounds:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        row_N, position_N = state.opens(state.round)
        if state.canvas.end_id is None:
            return row_N, position_N
        masked_N = (state.tokens_BL == state.canvas.mask_id).cpu().numpy()[row_N, position_N]
        return row_N[masked_N], position_N[masked_N]

    def opened(self, state: PlannedState, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        """All queried positions, known without reading from the device."""
        return state.asked

    def replayable(self, state: PlannedState) -> tuple[Any, Any] | None:
        return self, state
