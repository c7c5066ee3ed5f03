"""The equations of the losses, one function each; everything else in this folder is bookkeeping around them.

Numbers are those of MDLM, arXiv 2406.07524.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.noise import Noise
from unmask.noise.learned import LearnedNoise


def continuous_weight(noise: Noise, t: Tensor) -> Tensor:
    """-alpha'_t / (1 - alpha_t): the weight of the masked-token loss at time t in continuous time (MDLM, 10 and 11)."""
    return noise.weight(t)


def step_weight(level_s: Tensor, level_t: Tensor) -> Tensor:
    """(alpha_s - alpha_t) / (1 - alpha_t): the probability that a token masked at t was still visible at s (MDLM, 8).

    Written in terms of level = 1 - alpha, which is accurate where alpha is close to 1.
    """
    return (level_t - level_s) / level_t


def count_weight(num_tokens: Tensor, num_masked: Tensor) -> Tensor:
    """L / n: the count form's weight, from ∫ u^(n-1) (1-u)^(L-n) C(L,n) du = 1/n."""
    return num_tokens / num_masked


def variance_gradient(noise: LearnedNoise, t: Tensor, nats: Tensor) -> Tensor:
    """0, with the gradient that trains a schedule: the gradient of the estimates' mean square, E Σ nats².

    In terms of the masking rate l the bound is ∫ E[f(z_l)] dl / l for every schedule (MDLM). If the schedule draws
    rates with density p(l), an estimate is nats = f / (l p(l)), and only E nats² = ∫ E[f²] / (l² p) dl depends on p.
    Its gradient is therefore E[nats² ∇ -log p(l)] with the drawn rates and masks held fixed: no draw depends on p.
    -log p(l) is log l'(t) at the time t whose rate is l; as the parameters change, that time moves by -∇l / l'.
    """
    t, nats = t.to(nats), nats.detach()
    with torch.no_grad():
        level, slope = noise.level(t), -noise.dalpha(t)
    tiny = torch.finfo(t.dtype).tiny
    held = t - (noise.level(t) - level) / slope.clamp(min=tiny)  # the number t, with that gradient
    square = (nats.square() * (-noise.dalpha(held)).clamp(min=tiny).log()).sum()
    return square - square.detach()


def subs_log_probs(logits_NI: Tensor, mask_id: int, zero_masking: bool = True) -> Tensor:
    """log x_theta in at least float32. Zero masking (MDLM, 3.2.3): the mask gets probability 0 before the softmax."""
    logits_NI = logits_NI.to(torch.promote_types(logits_NI.dtype, torch.float32))
    if zero_masking:
        mask = torch.zeros_like(logits_NI[0] if len(logits_NI) else logits_NI.sum(0), dtype=torch.bool)
        mask[mask_id] = True
        logits_NI = logits_NI.masked_fill(mask, -torch.inf)
    return torch.log_softmax(logits_NI, dim=-1)


def d3pm_nats(log_p_x: Tensor, p_mask: Tensor, level_s: Tensor, level_t: Tensor) -> Tensor:
    """KL(q(z_s|z_t,x) || p_theta(z_s|z_t)) at a masked position, for a network that may predict the mask (MDLM, 9).

    With p_mask = 0 (zero masking) both logarithms vanish and the T-step MDLM loss remains. The levels should be float64
    if the steps are short: their differences are taken before they are rounded to the network's precision.
    """
    # log(alpha a / (1 - alpha) + 1); at alpha=1 (s=0) its weight is 0 and the term must be 0, not NaN.
    clean = level_s <= 0
    whole_s = torch.where(clean, 1.0, level_s)
    ratio_s = torch.where(clean, 0.0, (1 - level_s) / whole_s)
    fall = torch.where(clean, 0.0, (level_t - level_s) / (whole_s * level_t))  # of (1 - level) / level from s to t
    excess_t = torch.log1p(((1 - level_t) / level_t).to(p_mask) * p_mask)
    gap = torch.log1p(-fall.to(p_mask) * p_mask / (1 + ratio_s.to(p_mask) * p_mask))  # of t and s
    opens = step_weight(level_s, level_t).to(p_mask)
    stays = (level_s / level_t).to(p_mask)  # (1 - alpha_s) / (1 - alpha_t)
    return opens * (excess_t - log_p_x) + stays * gap
