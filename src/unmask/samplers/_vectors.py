"""Samplers whose states are vectors: what is masked is asked about in every step, and written in the last."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from unmask.data.batch import DRAW_TOKEN
from unmask.errors import Public, UsageError
from unmask.processes.base import Process
from unmask.processes.gaussian import Gaussian
from unmask.rng import categorical, uniform
from unmask.samplers.base import MAX_STEPS, Sampler, State
from unmask.samplers.drawing import Drawing
from unmask.sampling.query import lines_of


@dataclass(kw_only=True)
class VectorState(State):
    """z_NE: the states of what is masked, row by row. step counts down from T; at 0 tokens are read off z_0."""

    z_NE: Tensor
    step: int


@dataclass(frozen=True, kw_only=True)
class VectorSampler(Drawing, Sampler):
    """steps: T. It needs the process of a model, to which it is bound."""

    _process: ClassVar[Gaussian | None] = None  # of the model that it is bound to: no option

    steps: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.steps <= MAX_STEPS:
            raise UsageError("steps must lie in 1..{most}, got {steps}", most=Public(MAX_STEPS), steps=self.steps)
        if self.temperature_end is not None or self.draw == "hybrid":
            raise UsageError("vectors are drawn at one temperature: leave out temperature_end and draw=hybrid")

    @property
    def constrainable(self) -> bool:
        """All tokens are drawn at once in the last step, where it is too late for a constraint."""
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
        """[N, E] the noise of what the state's question is about."""
        assert state.query is not None
        canvas, (row_N, position_N) = state.canvas, lines_of(state.query)
        return self.process.noise(canvas.key_B[row_N], position_N + canvas.offset, visit)

    def times(self, state: VectorState) -> tuple[Tensor, Tensor]:
        """s and t of the step that is due; at the end both are 0."""
        device = state.tokens_BL.device
        s, t = torch.tensor([max(state.step - 1, 0), state.step], dtype=torch.float64, device=device) / self.steps
        return s, t

    def level(self, state: VectorState) -> Tensor:
        """[B] what the network is told."""
        return self.process.level(self.times(state)[1]).expand(len(state.tokens_BL))

    def read_tokens(self, state: VectorState, log_p_NI: Tensor, visit: int = 0) -> tuple[Tensor, Tensor]:
        """One draw for each line from a law that has its temperature and cuts already, and its log-probability."""
        assert state.query is not None
        canvas, (row_N, position_N) = state.canvas, lines_of(state.query)
        u_N = uniform(canvas.key_B[row_N], DRAW_TOKEN, position_N + canvas.offset, visit)
        log_p_NI = log_p_NI.to(u_N.device)  # the embeddings may lie elsewhere than a server's canvas
        token_N = categorical(log_p_NI, u_N)
        return token_N, log_p_NI.log_softmax(dim=1).gather(1, token_N[:, None]).squeeze(1)

    def nothing(self, prediction: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty(0, dtype=torch.long, device=prediction.device), prediction[:0, 0]
