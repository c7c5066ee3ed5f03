"""Uniform-state diffusion: a token is replaced by any token of the vocabulary, pi = 1/V on the V tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.data.batch import DRAW_STATE
from unmask.processes.absorbing import position_uniforms
from unmask.processes.base import CategoricalProcess, per_position
from unmask.rng import uniform


class Uniform(CategoricalProcess):
    """q(z_t | x): x with probability alpha_t, else a uniform token (x itself among them); never the mask.

    >>> from unmask.noise.log_linear import LogLinear
    >>> process = Uniform(LogLinear(), num_ids=3, mask_id=1)
    >>> process.pi(torch.zeros(1))
    tensor([0.5000, 0.0000, 0.5000])
    """

    name = "uniform"

    def pi(self, like: Tensor) -> Tensor:
        share = like.new_full((self.num_ids,), 1 / self.num_tokens)
        return share.index_fill(0, torch.tensor([self.mask_id], device=like.device), 0.0)

    def prior(self, key_B: Tensor, open_BL: Tensor, tokens_BL: Tensor, *, offset: int = 0) -> Tensor:
        return torch.where(open_BL, self._tokens(key_B, open_BL, offset), tokens_BL)

    def corrupt(self, x_BL: Tensor, t: Tensor, key_B: Tensor, open_BL: Tensor) -> Tensor:
        noised_BL = open_BL & (position_uniforms(key_B, open_BL) < per_position(self.level(t)))
        return torch.where(noised_BL, self._tokens(key_B, open_BL, 0), x_BL)

    def _tokens(self, key_B: Tensor, like_BL: Tensor, offset: int) -> Tensor:
        """[B, L] uniform tokens; drawn numbers from mask_id on are shifted by one, so the mask is never drawn."""
        position_L = torch.arange(like_BL.shape[1], device=like_BL.device) + offset
        token_BL = (uniform(key_B[:, None], DRAW_STATE, position_L) * self.num_tokens).long()
        token_BL = token_BL.clamp(max=self.num_tokens - 1)  # uniforms of only 24 bits may round up
        return token_BL + (token_BL >= self.mask_id).long()


def log_marginal(log_p_NI: Tensor, level_N: Tensor) -> Tensor:
    """[N, I] log[V alpha p + (1 - alpha)]: log of V times q(z_t | p), also for a p that does not sum to 1; I = V + 1.

    >>> log_marginal(torch.tensor([[1.0, 0.0, 0.0]]).log(), torch.tensor([0.5])).exp()
    tensor([[1.5000, 0.5000, 0.5000]])
    """
    scale_N = (log_p_NI.shape[1] - 1) * (1 - level_N)  # in the level's own precision: it may be very close to 1
    log_scale_N1, log_level_N1 = (x.log()[:, None].to(log_p_NI) for x in (scale_N, level_N))
    return torch.logaddexp(log_p_NI + log_scale_N1, log_level_N1.expand_as(log_p_NI))
