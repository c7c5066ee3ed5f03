"""Masked diffusion in its textbook form, for comparison: full logits everywhere, and a network call at every step.

Network and optimizer are unmask's own, without its kernels, so that a ratio measures the method and its implementation,
not the backbone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.denoisers.network import Network


def log_x_theta(net: Network, z_BL: Tensor) -> Tensor:
    """SUBS over the whole logits: the mask's logit is -inf, a visible token is its own prediction."""
    logits_BLI = net(z_BL).float()
    logits_BLI[..., net.mask_id] = -torch.inf
    log_p = torch.log_softmax(logits_BLI, dim=-1)
    visible = z_BL != net.mask_id
    carried = torch.full_like(log_p, -torch.inf).scatter(-1, z_BL.unsqueeze(-1), 0.0)
    return torch.where(visible.unsqueeze(-1), carried, log_p)


def loss(net: Network, x_BL: Tensor) -> Tensor:
    """Continuous time, log-linear noise: E_t (1/t) sum over masked tokens of -log x_theta[x], per token."""
    B, L = x_BL.shape
    t_B = (torch.rand(1, device=x_BL.device) + torch.arange(B, device=x_BL.device) / B) % 1
    t_B = t_B.clamp(min=1e-3)
    z_BL = torch.where(torch.rand(B, L, device=x_BL.device) < t_B[:, None], net.mask_id, x_BL)
    nats_BL = -log_x_theta(net, z_BL).gather(-1, x_BL.unsqueeze(-1)).squeeze(-1)
    return (nats_BL / t_B[:, None]).mean()


@torch.no_grad()
def sample(net: Network, z_BL: Tensor, steps: int, calls: int) -> Tensor:
    """Ancestral sampling: at each of T steps the network sees everything and every position draws from q(z_s | z_t).

    Stops after the first `calls` steps, for timing: every step does the same work.
    """
    for i in range(steps, steps - calls, -1):
        t, s = i / steps, (i - 1) / steps
        p_BLI = log_x_theta(net, z_BL).exp()
        q_BLI = p_BLI * (t - s) / t
        q_BLI[..., net.mask_id] = s / t
        gumbel = -torch.log(-torch.log(torch.rand_like(q_BLI).clamp(min=1e-20)))
        drawn_BL = (q_BLI.log() + gumbel).argmax(dim=-1)
        z_BL = torch.where(z_BL == net.mask_id, drawn_BL, z_BL)
    return z_BL


@torch.no_grad()
def next_tokens(net: Network, z_BL: Tensor, calls: int) -> Tensor:
    """Autoregression with a cache, one token per call, stopped after `calls`."""
    cache = net.new_cache(*z_BL.shape)
    for position in range(calls):
        logits_BI = net.head(net.trunk(z_BL, cache=cache, span=(position, position + 1))[:, -1]).float()
        logits_BI[:, net.mask_id] = -torch.inf
        z_BL[:, position] = torch.multinomial(torch.softmax(logits_BI, dim=-1), 1).squeeze(1)
    return z_BL
