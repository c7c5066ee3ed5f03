"""The equations of uniform-state diffusion, one function each: score entropy and the T-step divergence.

i = z_t, x̄ = V alpha x + (1 - alpha), r_j = x̄_j / x̄_i (the true ratios), s_j = y_j / y_i (the network's), where y is x̄
with the prediction in place of x. SEDD leaves the prediction unnormalised, UDLM uses x_theta; both share one function
for the bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.noise import Noise


def score_entropy(log_y_NI: Tensor, z_N: Tensor, x_N: Tensor, level_N: Tensor, mask_id: int) -> Tensor:
    """[N] (1/V) Σ_{j≠i} [s_j - r_j log s_j + K(r_j)] with K(r) = r (log r - 1), over the V tokens.

    Each summand is r_j φ(log s_j - log r_j) with φ(u) = e^u - 1 - u, which stays accurate where s is close to r.
    """
    num_tokens = log_y_NI.shape[1] - 1
    # log r_j: x̄ has one value at x and another everywhere else; in the level's own precision, as alpha may be tiny
    log_rho_N1 = torch.log1p(num_tokens * (1 - level_N) / level_N)[:, None].to(log_y_NI)  # log(x̄_x / x̄_other)
    is_x_NI = torch.zeros_like(log_y_NI, dtype=torch.bool).scatter_(1, x_N[:, None], True)
    log_r_NI = log_rho_N1 * (is_x_NI.to(log_y_NI) - (z_N == x_N)[:, None].to(log_y_NI))
    log_s_NI = log_y_NI - log_y_NI.gather(1, z_N[:, None])
    u_NI = log_s_NI - log_r_NI
    nats_NI = log_r_NI.exp() * (torch.expm1(u_NI) - u_NI)
    counts_NI = torch.ones_like(is_x_NI).scatter_(1, z_N[:, None], False)  # j ≠ i
    counts_NI[:, mask_id] = False
    return torch.where(counts_NI, nats_NI, 0.0).sum(dim=1) / num_tokens


def reverse_weight(noise: Noise, t: Tensor) -> Tensor:
    """-alpha'/alpha, finite at t = 1 too, where the weighted term is 0."""
    return -noise.dalpha(t) / noise.alpha(t).clamp(min=1e-12)


def step_divergence(
    log_p_NI: Tensor, z_N: Tensor, x_N: Tensor, level_s_N: Tensor, level_t_N: Tensor, mask_id: int
) -> Tensor:
    """[N] KL(q(z_s | z_t, x) ‖ q(z_s | z_t, x_theta)), the general posterior with pi uniform on the V tokens.

    The two posteriors differ only in the factor [alpha_s x + (1 - alpha_s) pi], and both normalisers are q(z_t | .), so
    the network's posterior need not be normalised explicitly. At s = 0 this is the reconstruction, -log p(x | z_t).
    """
    num_tokens = log_p_NI.shape[1] - 1
    # The mask's column is never used, but log(0 + 0) in it, at s = 0, would give a NaN gradient.
    log_p_NI = log_p_NI.index_fill(1, torch.tensor([mask_id], device=log_p_NI.device), 0.0)
    # of the levels in their own precision, where the difference of a short step is not rounded away
    alpha_ts, jump = (1 - level_t_N) / (1 - level_s_N), (level_t_N - level_s_N) / (1 - level_s_N) / num_tokens
    alpha_s, alpha_t = (1 - level_s_N).to(log_p_NI), (1 - level_t_N).to(log_p_NI)
    share_s, share_t = (level_s_N / num_tokens).to(log_p_NI), (level_t_N / num_tokens).to(log_p_NI)

    def at(log_NI: Tensor, id_N: Tensor) -> Tensor:
        return log_NI.gather(1, id_N[:, None]).squeeze(1)

    # log[alpha_s x_theta + (1 - alpha_s)/V], and the norm log[alpha_t x_theta[z] + (1 - alpha_t)/V]
    model_NI = torch.logaddexp(log_p_NI + alpha_s[:, None].log(), share_s[:, None].log().expand_as(log_p_NI))
    norm_model_N = torch.logaddexp(at(log_p_NI, z_N) + alpha_t.log(), share_t.log())
    same_N = (z_N == x_N).to(log_p_NI)
    norm_true_N = torch.log(alpha_t * same_N + share_t)
    # q(z_s | z_t, x): [alpha_ts 1(z) + (1 - alpha_ts)/V] ⊙ [alpha_s 1(x) + (1 - alpha_s)/V] / norm
    is_z, is_x = (torch.zeros_like(log_p_NI).scatter_(1, id_N[:, None], 1.0) for id_N in (z_N, x_N))
    stays_NI = alpha_ts.to(log_p_NI)[:, None] * is_z + jump.to(log_p_NI)[:, None]
    true_NI = alpha_s[:, None] * is_x + share_s[:, None]
    q_NI = stays_NI * true_NI / norm_true_N.exp()[:, None]
    q_NI = q_NI.index_fill(1, torch.tensor([mask_id], device=q_NI.device), 0.0)
    gap_NI = true_NI.log() - model_NI
    return torch.where(q_NI > 0, q_NI * gap_NI, 0.0).sum(dim=1) - norm_true_N + norm_model_N
