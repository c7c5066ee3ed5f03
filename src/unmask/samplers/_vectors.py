"""Samplers whose states are vectors: every step queries the masked positions, and the last one writes the tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from unmask.devices import widest
from unmask.errors import Public, UsageError
from unmask.processes.base import Process
from unmask.processes.gaussian import Gaussian
from unmask.rng import categorical
from unmask.samplers.base import MAX_STEPS, Sampler, State
from unmask.samplers.drawing import Drawing, token_uniforms
from unmask.sampling.query import lines_of


@dataclass(kw_only=True)
class VectorState(State):
    """z_NE: the states of the masked positions, row by row. step counts down from T; at 0 tokens are drawn from z_0."""

    z_NE: Tensor
    step: int


@dataclass(frozen=True, kw_only=True)
class VectorSampler(Drawing, Sampler):
    """Base class of these samplers; it must be bound to the process of a model. steps: T."""

    _process: ClassVar[Gaussian | None] = None  # of the model that the sampler is bound to; not an option

    steps: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.steps <= MAX_STEPS:
            raise UsageError("steps must lie in 1..{most}, got {steps}", most=Public(MAX_STEPS), steps=self.steps)
        if self.temperature_end is not None or self.draw == "hybrid":
            raise UsageError("vectors are drawn at one temperature: leave out temperature_end and draw=hybrid")

    @property
    def constrainable(self) -> bool:
        """False: all tokens are drawn at once in the last step, which a constraint cannot condition."""
        return False

    def bind(self, process: Process | None) -> Sampler:
        bound = cast(VectorSampler, copy.copy(super().bind(process)))
        if isinstance(process, Gaussian):
            object.__setattr__(bound, "_process", process)
        return bound

    @property
    def process(self) -> Gaussian:
        if self._process is None:
            raise UsageError("a sampler of vectors needs a model's embeddings: make it by Model.make_sampler")
        return self._process

    def fresh_noise(self, state: VectorState, visit: int) -> Tensor:
        """[N, E] noise for the positions of the last query."""
        assert state.query is not None
        canvas, (row_N, position_N) = state.canvas, lines_of(state.query)
        return self.process.noise(canvas.key_B[row_N], position_N + canvas.offset, visit)

    def times(self, state: VectorState) -> tuple[Tensor, Tensor]:
        """s and t of the current step; at the end both are 0."""
        device = state.tokens_BL.device
        s, t = torch.tensor([max(state.step - 1, 0), state.step], dtype=widest(device), device=device) / self.steps
        return s, t

    def level(self, state: VectorState) -> Tensor:
        """[B] the noise level for the network."""
        return self.process.level(self.times(state)[1]).expand(len(state.tokens_BL))

    def read_tokens(self, state: VectorState, log_p_NI: Tensor, visit: int = 0) -> tuple[Tensor, Tensor]:
        """Draw one token per line from log_p (temperature and cuts already applied); also its log-probability."""
        assert state.query is not None
        canvas, (row_N, position_N) = state.canvas, lines_of(state.query)
        u_N = token_uniforms(canvas.key_B[row_N], position_N + canvas.offset, visit)
        log_p_NI = log_p_NI.to(canvas.tokens.device)  # a server's canvas may be on another device
        token_N = categorical(log_p_NI, u_N)
        return token_N, log_p_NI.log_softmax(dim=1).gather(1, token_N[:, None]).squeeze(1)

    def nothing(self, prediction: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty(0, dtype=torch.long, device=prediction.device), prediction[:0, 0]
