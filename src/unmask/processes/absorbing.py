"""Masked diffusion: a token is itself until it is masked, pi = the mask (MDLM's equations 4 and 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.data.batch import DRAW_MASK
from unmask.processes.base import CategoricalProcess, per_position
from unmask.rng import uniform


class Masking(CategoricalProcess):
    """Base class of masking processes: the prior is the mask. A subclass defines when each token is masked."""

    name = "absorbing"

    def pi(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.num_ids).index_fill(0, torch.tensor([self.mask_id], device=like.device), 1.0)

    def prior(self, key_B: Tensor, open_BL: Tensor, tokens_BL: Tensor, *, offset: int = 0) -> Tensor:
        return tokens_BL.masked_fill(open_BL, self.mask_id)


class Absorbing(Masking):
    """q(z_t | x): x with probability alpha_t, else the mask. q(z_s | z_t, x): visible tokens stay; a mask becomes x
    with probability (alpha_s - alpha_t) / (1 - alpha_t).

    >>> from unmask.noise.log_linear import LogLinear
    >>> process = Absorbing(LogLinear(), num_ids=3, mask_id=2)
    >>> half, one = torch.tensor([0.5]), torch.tensor([1.0])
    >>> process.posterior(torch.tensor([2]), torch.tensor([[1.0, 0.0, 0.0]]), half, one)
    tensor([[0.5000, 0.0000, 0.5000]])
    """

    def corrupt(self, x_BL: Tensor, t: Tensor, key_B: Tensor, open_BL: Tensor) -> Tensor:
        return x_BL.masked_fill(self.masked(t, key_B, open_BL), self.mask_id)

    def masked(self, t: Tensor, key_B: Tensor, open_BL: Tensor) -> Tensor:
        """[B, L] which open positions are masked at time t: each independently with probability 1 - alpha_t."""
        return open_BL & (position_uniforms(key_B, open_BL) < per_position(self.level(t)))


def position_uniforms(key_B: Tensor, like_BL: Tensor) -> Tensor:
    """[B, L] the uniform number of each position, which is noised at every level above it."""
    return uniform(key_B[:, None], DRAW_MASK, torch.arange(like_BL.shape[1], device=like_BL.device))


def stays_masked(p_mask: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """The posterior probability that a masked position is still masked at s, if the mask is predicted with p_mask.

    (1 - alpha_s + alpha_s a) / (1 - alpha_t + alpha_t a); under SUBS a = 0.
    """
    return (1 - alpha_s + alpha_s * p_mask) / (1 - alpha_t + alpha_t * p_mask)
