"""SSD-LM's decoding, block by block: each step projects the prediction to the simplex and adds new noise.

Han, Kumar, Tsvetkov 2022, arXiv 2210.17432: z_s = alpha_s K (2 w - 1) + sigma_s K noise, where w is one-hot of the
likeliest token (argmax), of one that is drawn (sample), or has a 1 for every token that the cuts leave (multi_hot; the
published code does this, by top-p). The noise is fresh in every step, so that this is no step of the process's
posterior, and no law is claimed. What differs: in the last step multi_hot takes the likeliest token, where the
published code takes the first of those that are left; by default 100 steps a block, where the paper takes 1000.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.errors import UsageError
from unmask.processes.gaussian import Simplex as SimplexProcess
from unmask.processes.gaussian import alpha_of, sigma_of
from unmask.samplers._vectors import VectorSampler, VectorState
from unmask.samplers.base import Accepts, Step
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query
from unmask.sampling.query import ask_about


@dataclass(frozen=True, kw_only=True)
class Simplex(VectorSampler):
    """Order: the model's blocks from left to right, all of a block in every step. Calls: blocks × T. Law: none.

    The network sees the text before a block and nothing after it, so a gap is filled without the text that follows.
    Temperature and cuts act on the projected distribution. Rows that have ended leave.
    """

    law: ClassVar[str] = "no law claimed"
    cost: ClassVar[str] = "blocks x steps; blocks = ceil(L / the model's block)"
    accepts: ClassVar[Accepts] = (("simplex", "x0"),)  # type: ignore[misc]

    steps: int = 100
    projection: Literal["sample", "argmax", "multi_hot"] = "sample"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.projection == "multi_hot" and self.draws_whole_law:
            raise UsageError("multi_hot keeps the tokens that a cut leaves: give top_p or top_k")

    @property
    def block(self) -> int:
        return 25 if self._process is None else cast(SimplexProcess, self._process).block

    def max_calls(self, length: int) -> int:
        return -(-length // self.block) * self.steps

    def start(self, canvas: Canvas) -> VectorState:
        empty_NE = torch.zeros(0, device=canvas.tokens.device)
        return VectorState(canvas=canvas, tokens_BL=canvas.tokens.clone(), z_NE=empty_NE, step=self.steps)

    @torch.no_grad()
    def ask(self, state: VectorState) -> Query | None:
        """A query about the masked positions of the first block that has any."""
        canvas, masked_BL = state.canvas, state.canvas.open_BL & (state.tokens_BL == state.canvas.mask_id)
        columns = masked_BL.any(dim=0).nonzero().flatten()
        state.query = None
        if len(columns):
            seen = (int(columns[0]) // self.block + 1) * self.block
            part = canvas.part(0, min(seen, masked_BL.shape[1]), state.tokens_BL, canvas.open_BL)
            state.query = ask_about(part, part.tokens, masked_BL[:, :seen], self.level(state))
        if state.query is None:
            return None
        if state.step == self.steps:
            state.z_NE = self.fresh_noise(state, 0)
        state.query = replace(state.query, latent_NE=state.z_NE)
        return state.query

    def select(self, state: VectorState, prediction: Tensor) -> Tensor:
        return torch.full((len(prediction),), state.step == 1, dtype=torch.bool, device=prediction.device)

    @torch.no_grad()
    def draw_opened(self, state: VectorState, prediction: Tensor, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Draw tokens in the last step, and z_s, which the state keeps, in all others."""
        law_NI = self.shaped(prediction, state.canvas.never)
        if self.projection == "sample":
            token_N, log_prob_N = self.read_tokens(state, law_NI, visit=state.step)
        else:
            log_prob_N, token_N = law_NI.log_softmax(dim=1).max(dim=1)
        if state.step == 1:
            return token_N, log_prob_N
        several = self.projection == "multi_hot" and not self.takes_likeliest
        w_NI = law_NI > -torch.inf if several else F.one_hot(token_N, law_NI.shape[1])
        gamma_s = self.process.gamma.gamma(self.times(state)[0])
        noise_NE = self.fresh_noise(state, self.steps + 1 - state.step)
        mean_NE = alpha_of(gamma_s).to(noise_NE) * self.process.mean(w_NI)
        state.z_NE = mean_NE + sigma_of(gamma_s).to(noise_NE) * noise_NE
        return self.nothing(prediction)

    def write(self, state: VectorState, opens_N: Tensor, token_N: Tensor, log_prob_N: Tensor) -> Step:
        step = super().write(state, opens_N, token_N, log_prob_N)
        state.step = state.step - 1 or self.steps  # the next block begins at t = 1
        return step
