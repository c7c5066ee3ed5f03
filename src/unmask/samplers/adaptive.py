"""Adaptive orders: each call queries all masked positions of a row, and the predictions decide which of them open."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.data.batch import DRAW_ORDER
from unmask.errors import UsageError
from unmask.rng import uniform
from unmask.samplers import Sampler, State, check_counts
from unmask.samplers.drawing import Drawing, forbid
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query
from unmask.sampling.query import ask_about, masked_share


@dataclass(frozen=True, kw_only=True)
class AdaptiveSampler(Drawing, Sampler):
    """Positions open in the order of their score; the first in that order always does.

    random: how random the order is. A position's priority is a mixture of its rank by score and a uniform number; at 1
    the order is uniformly random, at 0 only the score decides.
    Scores are computed from the model's own distribution, before temperature, top_k and top_p.
    """

    random: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.random <= 1:
            raise UsageError(
                "random is the share of the order that is random, in [0, 1]; got {random}", random=self.random
            )

    @property
    def fixed_order(self) -> bool:
        return self.random == 0

    @abstractmethod
    def score(self, log_p_NI: Tensor) -> Tensor:
        """[N] the score of each position; larger scores open first."""

    @abstractmethod
    def opens(self, state: State, score_RK: Tensor, place_RK: Tensor) -> Tensor:
        """[R, K] which positions open now, from each position's score and its place in its row's order (0: first).

        Padding has score -inf and the last places; the result for it is ignored.
        """

    def max_calls(self, length: int) -> int:
        return length

    def ask(self, state: State) -> Query | None:
        canvas, tokens_BL = state.canvas, state.tokens_BL
        masked_BL = tokens_BL == canvas.mask_id
        state.query = ask_about(canvas, tokens_BL, masked_BL, masked_share(canvas, tokens_BL))
        return state.query

    def select(self, state: State, prediction: Tensor) -> Tensor:
        canvas, query = state.canvas, state.query
        assert query is not None
        wanted_RK = query.wanted_RK
        log_p_NI = torch.log_softmax(forbid(prediction, canvas.never), dim=-1)
        score_RK = log_p_NI.new_full(wanted_RK.shape, -torch.inf)
        score_RK[wanted_RK] = self.score(log_p_NI)
        place_RK = self._places(canvas, query, score_RK)
        return ((place_RK == 0) | self.opens(state, score_RK, place_RK))[wanted_RK]

    def _places(self, canvas: Canvas, query: Query, score_RK: Tensor) -> Tensor:
        """[R, K] each position's place in the order in which its row opens."""
        place_RK = places(score_RK)
        if self.random == 0:
            return place_RK
        key_R = canvas.key_B if query.rows_R is None else canvas.key_B[query.rows_R]
        u_RK = uniform(key_R[:, None], DRAW_ORDER, query.at_RK + canvas.offset)
        by_score_RK = 1 - place_RK / query.wanted_RK.sum(dim=1, keepdim=True)
        mixed_RK = (1 - self.random) * by_score_RK + self.random * u_RK
        return places(mixed_RK.masked_fill(~query.wanted_RK, -torch.inf))


@dataclass(frozen=True, kw_only=True)
class CountedSampler(AdaptiveSampler):
    """An adaptive order that opens a fixed number per call: `tokens`, or enough to finish a row in `steps` calls.

    With neither, one token per call.
    """

    steps: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.tokens is not None:
            raise UsageError("steps and tokens both say how many open in a call: give one of them")
        check_counts(self.steps, self.tokens)

    def max_calls(self, length: int) -> int:
        return -(-length // (self.tokens or 1)) if self.steps is None else min(self.steps, length)

    def opens(self, state: State, score_RK: Tensor, place_RK: Tensor) -> Tensor:
        return place_RK < ((self.tokens or 1) if self.steps is None else due(state, self.steps))


@dataclass(frozen=True, kw_only=True)
class CappedSampler(AdaptiveSampler):
    """An adaptive order in which the model's predictions determine how many positions open: at most `tokens` per call,
    but always enough to finish a row in `steps` calls."""

    steps: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self.steps, self.tokens)

    def max_calls(self, length: int) -> int:
        return length if self.steps is None else min(self.steps, length)

    @abstractmethod
    def wanted(self, score_RK: Tensor, place_RK: Tensor) -> Tensor:
        """[R, K] which positions would open without these two limits."""

    def opens(self, state: State, score_RK: Tensor, place_RK: Tensor) -> Tensor:
        opens_RK = self.wanted(score_RK, place_RK)
        if self.tokens is not None:
            opens_RK = opens_RK & (place_RK < self.tokens)
        return opens_RK if self.steps is None else opens_RK | (place_RK < due(state, self.steps))


def due(state: State, steps: int) -> Tensor:
    """[R, 1] how many positions must open now for a row to be done in `steps` calls."""
    assert state.query is not None
    left_R1 = state.query.wanted_RK.sum(dim=1, keepdim=True)
    calls = steps - state.round
    return (left_R1 + calls - 1) // calls


def entropy(log_p_NI: Tensor) -> Tensor:
    """[N] the entropy of each line, in nats.

    >>> entropy(torch.tensor([[0.5, 0.5, 0.0]]).log())
    tensor([0.6931])
    """
    entropy_N: Tensor = torch.special.entr(log_p_NI.exp()).sum(dim=-1)
    return entropy_N


def places(x_RK: Tensor) -> Tensor:
    """The rank of each number in its row, the largest first; ties are broken from left to right.

    >>> places(torch.tensor([[0.1, 0.7, 0.1]])).tolist()
    [[1, 0, 2]]
    """
    return x_RK.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
