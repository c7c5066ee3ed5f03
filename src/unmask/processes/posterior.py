"""The forward process and its posterior for any noise prior pi: q(z_t | x) and q(z_s | z_t, x), s < t."""

from __future__ import annotations

import torch
from torch import Tensor


def q_marginal(x_NI: Tensor, alpha_t: Tensor, pi_I: Tensor) -> Tensor:
    """q(z_t | x) = Cat(alpha_t x + (1 - alpha_t) pi). x_NI is one-hot, or a distribution such as x_theta.

    >>> q_marginal(torch.tensor([[1.0, 0.0]]), torch.tensor([0.25]), torch.tensor([0.0, 1.0]))
    tensor([[0.2500, 0.7500]])
    """
    alpha_t = alpha_t[:, None]
    return alpha_t * x_NI + (1 - alpha_t) * pi_I


def q_posterior(z_N: Tensor, x_NI: Tensor, alpha_s: Tensor, alpha_t: Tensor, pi_I: Tensor) -> Tensor:
    """q(z_s | z_t, x) ∝ [alpha_ts z_t + (1 - alpha_ts) 1 (pi·z_t)] ⊙ [alpha_s x + (1 - alpha_s) pi].

    alpha_ts = alpha_t / alpha_s is the probability that what is visible at s is still visible at t.

    >>> mask = torch.tensor([0.0, 1.0])
    >>> q_posterior(torch.tensor([1]), torch.tensor([[1.0, 0.0]]), torch.tensor([0.5]), torch.tensor([0.0]), mask)
    tensor([[0.5000, 0.5000]])
    """
    alpha_ts = (alpha_t / alpha_s)[:, None]
    one_hot = torch.nn.functional.one_hot(z_N, len(pi_I)).to(x_NI.dtype)
    reached = alpha_ts * one_hot + (1 - alpha_ts) * pi_I[z_N][:, None]
    joint = reached * q_marginal(x_NI, alpha_s, pi_I)
    return joint / joint.sum(dim=-1, keepdim=True)


def stays_masked(p_mask: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """The posterior's probability that a masked position is still masked at s, if the mask is predicted with p_mask.

    (1 - alpha_s + alpha_s a) / (1 - alpha_t + alpha_t a); under SUBS a = 0.
    """
    return (1 - alpha_s + alpha_s * p_mask) / (1 - alpha_t + alpha_t * p_mask)
