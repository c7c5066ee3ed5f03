"""Reverse chains in which written tokens can be masked again, so that a token can be corrected.

A move from time t to s masks a written token with probability sigma and opens a masked position with probability
(alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t). A position that was visible with probability alpha_t is then visible
with probability alpha_s: the marginals of the forward process are preserved for every sigma up to
min(1, (1 - alpha_s)/alpha_t).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.data.batch import DRAW_ORDER
from unmask.errors import Public, UsageError
from unmask.noise import Noise
from unmask.rng import uniform
from unmask.samplers import Sampler, State, Step
from unmask.samplers.drawing import Drawing
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query
from unmask.sampling.query import ask_about

MAX_MOVES = 100_000  # the host visits each move, even one without a network call


@dataclass(frozen=True)
class Move:
    """From alpha_t to alpha_s; sigma: the probability that a written token is masked again.

    >>> Move(alpha_t=0.5, alpha_s=0.75, sigma=0.5).opening
    1.0
    """

    alpha_t: float
    alpha_s: float
    sigma: float

    @property
    def opening(self) -> float:
        """The probability that a masked position opens."""
        return (self.alpha_s - (1 - self.sigma) * self.alpha_t) / (1 - self.alpha_t)


def largest_sigma(alpha_t: float, alpha_s: float) -> float:
    """The largest possible sigma, at which every masked position opens.

    >>> largest_sigma(0.5, 0.75)
    0.5
    """
    return min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0


def alphas(noise: Noise, start: float, stop: float, steps: int) -> list[float]:
    """alpha at evenly spaced times, both ends included."""
    times = torch.linspace(start, stop, steps + 1, dtype=torch.float64)
    alpha: list[float] = noise.alpha(times).tolist()
    return alpha


@dataclass(kw_only=True)
class RemaskingState(State):
    """log_prob_BL: of the written tokens when they were drawn. at: the next move. masks_BL: the positions it masks."""

    log_prob_BL: Tensor
    moves: list[Move]
    at: int = 0
    masks_BL: Tensor | None = None


class RemaskingSampler(Drawing, Sampler):
    """A sequence of moves. Which positions open is known before the network call, so the network is called only for
    moves that open something, and only for those positions. Every move draws new random numbers."""

    final = False

    @abstractmethod
    def moves(self) -> list[Move]:
        """The moves, from all masks to none."""

    def sigma(self, state: RemaskingState, move: Move) -> Tensor | float:
        """The probability that a written token is masked again, per position or one for all."""
        return move.sigma

    def start(self, canvas: Canvas) -> RemaskingState:
        log_prob_BL = torch.zeros(canvas.tokens.shape, device=canvas.tokens.device)
        return RemaskingState(canvas, canvas.tokens.clone(), log_prob_BL=log_prob_BL, moves=self.moves())

    def visit(self, state: RemaskingState) -> int:
        return state.at

    def ask(self, state: RemaskingState) -> Query | None:
        canvas = state.canvas
        position_L = torch.arange(canvas.tokens.shape[1], device=canvas.tokens.device) + canvas.offset
        while state.at < len(state.moves):
            move = state.moves[state.at]
            masked_BL = state.tokens_BL == canvas.mask_id
            u_BL = uniform(canvas.key_B[:, None], DRAW_ORDER, position_L, state.at)
            opens_BL = masked_BL & (u_BL < move.opening)
            state.masks_BL = canvas.open_BL & ~masked_BL & (u_BL < self.sigma(state, move))
            level_B = canvas.key_B.new_full(canvas.key_B.shape, 1 - move.alpha_t, dtype=torch.float32)
            if (query := ask_about(canvas, state.tokens_BL, opens_BL, level_B)) is not None:
                state.query = query
                return query
            self._mask_again(state)
        return None

    def _mask_again(self, state: RemaskingState) -> None:
        assert state.masks_BL is not None
        state.tokens_BL = state.tokens_BL.masked_fill(state.masks_BL, state.canvas.mask_id)
        state.at += 1

    def write(self, state: RemaskingState, opens_N: Tensor, token_N: Tensor, log_prob_N: Tensor) -> Step:
        row_N, position_N = self.opened(state, opens_N)
        self._mask_again(state)
        state.tokens_BL = state.tokens_BL.index_put((row_N, position_N), token_N)
        state.log_prob_BL = state.log_prob_BL.index_put((row_N, position_N), log_prob_N.to(state.log_prob_BL.dtype))
        return Step(row_N, position_N, token_N, log_prob_N, state.tokens_BL)


def check_steps(steps: int | None, name: str = "steps", least: int = 1) -> None:
    """Refuse an invalid number of moves.

    >>> check_steps(0)
    Traceback (most recent call last):
    unmask.errors.UsageError: steps must lie in 1..100000, got 0
    """
    if steps is None or not least <= steps <= MAX_MOVES:
        raise UsageError(
            "{name} must lie in {least}..{most}, got {steps}",
            name=Public(name),
            least=Public(least),
            most=Public(MAX_MOVES),
            steps=steps,
        )
