"""Reverse chains in T steps whose moves depend on the prediction, so they cannot be planned.

With absorbing states each step queries the masked positions and opens some of them. With uniform states it is not
visible which tokens are noise, so each step queries all open positions and redraws every one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from unmask.data.batch import DRAW_ORDER
from unmask.devices import put, widest
from unmask.errors import Public, UsageError
from unmask.noise import Noise
from unmask.rng import categorical, uniform
from unmask.samplers.base import MAX_STEPS, Sampler, State
from unmask.samplers.drawing import Drawing, forbid, token_uniforms
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query
from unmask.sampling.query import ask_about

SMALLEST = 1e-12  # lower limit of alpha: at t = 1 a rate would be infinite


@dataclass(kw_only=True)
class ChainState(State):
    """step counts down from T. clips: the number of probabilities outside [0, 1] that have been clipped so far."""

    step: int
    clips: int = 0


@dataclass(frozen=True, kw_only=True)
class ChainSampler(Drawing, Sampler):
    """Base class of these chains. steps: T. state: the process to reverse; None: the model's. noise: the same."""

    steps: int = 128
    noise: Noise | None = None
    state: Literal["absorbing", "uniform"] | None = None

    def __post_init__(self) -> None:
        if self.steps is None:
            raise UsageError("{sampler} needs a number of steps", sampler=Public(type(self).__name__))
        super().__post_init__()
        if not 1 <= self.steps <= MAX_STEPS:
            raise UsageError("steps must lie in 1..{most}, got {steps}", most=Public(MAX_STEPS), steps=self.steps)

    # --- what it can do ---

    @property
    def redraws(self) -> bool:
        """Whether each step redraws every open position: then no token is final and no constraint can be enforced."""
        return self.state == "uniform"

    @property
    def final(self) -> bool:
        return not self.redraws

    @property
    def constrainable(self) -> bool:
        return not self.redraws

    def bind(self, process: Any) -> Sampler:
        bound = cast(ChainSampler, super().bind(process))
        if process is not None and bound.state not in (None, process.name):
            raise UsageError(
                "the sampler is to reverse {state} states, the model has {process} ones: leave state out",
                state=Public(bound.state),
                process=Public(process.name),
            )
        if process is not None and bound.state is None:
            bound = replace(bound, state=process.name)
        if bound.redraws and (bound.temperature_end is not None or bound.draw == "hybrid"):
            raise UsageError("uniform states are drawn at one temperature: leave out temperature_end and draw=hybrid")
        return bound

    def max_calls(self, length: int) -> int:
        return self.steps

    # --- a run ---

    def start(self, canvas: Canvas) -> ChainState:
        if self.redraws:
            canvas = replace(canvas, end_id=None)  # an end-of-text may be overwritten later
        return ChainState(canvas=canvas, tokens_BL=canvas.tokens.clone(), step=self.steps)

    def ask(self, state: ChainState) -> Query | None:
        canvas = state.canvas
        wanted_BL = canvas.open_BL if self.redraws else state.tokens_BL == canvas.mask_id
        t = self.times(state)[1]
        level_B = self.schedule.level(t).expand(len(wanted_BL)).to(wanted_BL.device, torch.float32)
        state.query = None if state.step < 1 else ask_about(canvas, state.tokens_BL, wanted_BL, level_B)
        return state.query

    def times(self, state: ChainState) -> tuple[Tensor, Tensor]:
        """s and t of the current step."""
        s, t = torch.tensor([state.step - 1, state.step], dtype=torch.float64) / self.steps
        return s, t

    def visit(self, state: ChainState) -> int:
        return state.step

    def select(self, state: ChainState, prediction: Tensor) -> Tensor:
        """[N] which positions open; with uniform states all of them."""
        if self.redraws or state.step == 1:  # in the last step all remaining masks open
            return torch.ones(len(prediction), dtype=torch.bool, device=prediction.device)
        law_NI = prediction.to(widest(prediction.device))
        opening_N = self.opening(*self.times(state)) * torch.logsumexp(law_NI, dim=1).exp()
        state.clips += int((opening_N > 1).sum())
        row_N, position_N = self.opened(state, torch.ones_like(opening_N, dtype=torch.bool))
        canvas = state.canvas
        return uniform(canvas.key_B[row_N], DRAW_ORDER, position_N + canvas.offset, state.step) < opening_N

    def draw_opened(self, state: ChainState, prediction: Tensor, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        if not self.redraws:
            return super().draw_opened(state, prediction, opens_N)
        canvas, device = state.canvas, prediction.device
        row_N, position_N = self.opened(state, opens_N)
        if widest(device) != torch.float64:  # at large t the terms of a move cancel
            prediction = prediction.cpu()
        z_N = state.tokens_BL[row_N, position_N].to(prediction.device)
        law_NI = self.moves(state, self.shaped(prediction, canvas.never), z_N)
        law_NI = law_NI.index_fill(1, torch.tensor([canvas.mask_id], device=law_NI.device), 0.0)
        outside_NI = law_NI < 0
        state.clips += int(outside_NI.sum())
        log_NI = torch.where(outside_NI, 0.0, law_NI).log()
        if state.step == 1:  # before the last step, ids that are forbidden in a text are allowed
            log_NI = forbid(log_NI, canvas.never)
        u_N = token_uniforms(canvas.key_B[row_N], position_N + canvas.offset, state.step)
        token_N = categorical(log_NI, u_N)
        log_prob_N = log_NI.log_softmax(dim=1).gather(1, token_N[:, None]).squeeze(1)
        return put(token_N, device), put(log_prob_N, device)

    def write(self, state: ChainState, opens_N: Tensor, token_N: Tensor, log_prob_N: Tensor) -> Any:
        step = super().write(state, opens_N, token_N, log_prob_N)
        state.step -= 1
        return step

    # --- what a subclass defines ---

    def opening(self, s: Tensor, t: Tensor) -> Tensor:
        """Absorbing: this value times Z is the probability that a masked position opens between t and s."""
        raise NotImplementedError

    @abstractmethod
    def moves(self, state: ChainState, log_p_NI: Tensor, z_N: Tensor) -> Tensor:
        """[N, I] uniform: the distribution of z_s; entries may be negative and need not sum to 1."""
