"""The reverse chain of Gaussian states in T steps: z_s ~ q(z_s | z_t, x_hat) from noise to z_0, then the tokens.

For Plaid (arXiv 2305.18619) and Diffusion-LM (arXiv 2205.14217). Fixed positions keep their tokens: the network reads
their embeddings without noise in every step, as in Diffusion-LM's infilling. What differs from the published samplers:
each step has the posterior's own variance, where Diffusion-LM's code takes a larger one; Plaid's sharpened guidance of
the score is the temperature of x_theta here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from unmask.samplers._vectors import VectorSampler, VectorState
from unmask.samplers.base import Accepts, Step
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query
from unmask.sampling.query import ask_about


@dataclass(frozen=True, kw_only=True)
class Gaussian(VectorSampler):
    """Order: all open positions in every step. Calls: T, and one more where the network reads z_0. Law: its chain.

    Under self-conditioning a call is two passes. Temperature and cuts act on x_theta, and so on x_hat in every step and
    on the tokens' draw. clamp: x_hat is moved to the nearest embedding in each step (Diffusion-LM's clamping trick);
    the chain is then no longer the bound's. No token is written before the last step.
    """

    law: ClassVar[str] = "exactly the T-step chain q(z_s | z_t, x_hat) with tokens from p(x | z_0); with clamp none"
    cost: ClassVar[str] = "steps, or steps + 1"
    accepts: ClassVar[Accepts] = (("gaussian", "x0"),)  # type: ignore[misc]

    clamp: bool = False

    def max_calls(self, length: int) -> int:
        return self.steps + 1

    @torch.no_grad()
    def start(self, canvas: Canvas) -> VectorState:
        z_NE = self.process.prior(canvas.key_B, canvas.masked_BL, canvas.tokens, offset=canvas.offset)
        return VectorState(canvas=canvas, tokens_BL=canvas.tokens.clone(), z_NE=z_NE, step=self.steps)

    def ask(self, state: VectorState) -> Query | None:
        masked_BL = state.canvas.open_BL & (state.tokens_BL == state.canvas.mask_id)
        query = ask_about(state.canvas, state.tokens_BL, masked_BL, self.level(state))
        state.query = None if query is None else replace(query, latent_NE=state.z_NE)
        return state.query

    def select(self, state: VectorState, prediction: Tensor) -> Tensor:
        last = state.step == (0 if self.process.reads_z0 else 1)
        return torch.full((len(prediction),), last, dtype=torch.bool, device=prediction.device)

    @torch.no_grad()
    def draw_opened(self, state: VectorState, prediction: Tensor, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        """Draw z_s into the state, and tokens in the last step."""
        log_p_NI, never = self.shaped(prediction, state.canvas.never), state.canvas.never
        if state.step == 0:
            return self.read_tokens(state, log_p_NI)
        x_hat_NE = self.process.mean(log_p_NI.exp())
        if self.clamp:
            x_hat_NE = self.process.points(nearest(x_hat_NE, self.process.e_IE, never))
        mean_NE, std_N1 = self.process.posterior(state.z_NE, x_hat_NE, *self.times(state))
        state.z_NE = mean_NE + std_N1 * self.fresh_noise(state, self.steps + 1 - state.step)
        if state.step > 1 or self.process.reads_z0:
            return self.nothing(prediction)
        gamma_N = self.process.gamma.gamma(self.times(state)[0]).expand(len(state.z_NE))
        return self.read_tokens(state, self.shaped(self.process.log_likelihood(state.z_NE, gamma_N), never))

    def write(self, state: VectorState, opens_N: Tensor, token_N: Tensor, log_prob_N: Tensor) -> Step:
        step = super().write(state, opens_N, token_N, log_prob_N)
        state.step -= 1
        return step


def nearest(x_hat_NE: Tensor, e_IE: Tensor, forbidden: tuple[int, ...]) -> Tensor:
    """[N] the id of the nearest embedding.

    >>> nearest(torch.tensor([[0.6]]), torch.tensor([[0.0], [1.0], [0.7]]), (2,))
    tensor([1])
    """
    distance_NI = torch.cdist(x_hat_NE, e_IE)
    return distance_NI.index_fill(1, torch.tensor(forbidden, device=e_IE.device), torch.inf).argmin(dim=1)
