"""Gaussian states of one number: bounds by quadrature, and the law of the T-step chain on a grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.denoisers.network import Network, as_denoiser
from unmask.processes.gamma import Gamma
from unmask.processes.gaussian import Gaussian, alpha_of, sigma_of, snr_drop

# log_p(z_N1, t): [N, I] log x_theta of one position alone
LogP = Callable[[Tensor, Tensor], Tensor]


def crooked(vocab: int, *, seed: int = 0, level: bool = True) -> Network:
    """Logits that bend with the state, those beside it and the level: no denoiser that anybody would learn.

    And with its own estimate, if it is given one: a second number of each position.
    """
    g = torch.Generator().manual_seed(seed)
    a, b, c, d = torch.randn(4, vocab + 1, generator=g, dtype=torch.float64)
    d, e = d * level, torch.randn(vocab + 1, generator=g, dtype=torch.float64)

    def f(z: Tensor, level: Tensor) -> Tensor:
        z_BL1 = z.double()[..., :1]
        others_BL1 = z_BL1.sum(dim=1, keepdim=True) - z_BL1
        logits = a * torch.sin(2 * z_BL1) + b * z_BL1 + c * torch.tanh(others_BL1) + d * level.double()[:, None, None]
        return logits if z.shape[2] == 1 else logits + e * torch.tanh(2 * z.double()[..., 1:])

    return as_denoiser(f, vocab_size=vocab, mask_id=vocab)


def hermite(num: int) -> tuple[Tensor, Tensor]:
    """Points and weights of a standard normal number."""
    x, w = np.polynomial.hermite_e.hermegauss(num)
    return torch.from_numpy(x), torch.from_numpy(w / w.sum())


def legendre(num: int) -> tuple[Tensor, Tensor]:
    """Points and weights of [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(num)
    return torch.from_numpy((x + 1) / 2), torch.from_numpy(w / 2)


def log_p_of(objective: Any, network: Network, process: Gaussian) -> LogP:
    """log x_theta of a text of one position, as the objective reads the network."""

    def log_p(z_N1: Tensor, t: Tensor) -> Tensor:
        gamma_N, level_N = (f(t).expand(len(z_N1)) for f in (process.gamma.gamma, process.level))
        zero_N, row_N = torch.zeros(len(z_N1), dtype=torch.long), torch.arange(len(z_N1))

        def one_pass(x_hat_N1: Tensor | None) -> Tensor:
            read = objective.vectors(network, zero_N[:, None], row_N, zero_N, z_N1, gamma_N, x_hat_N1)
            return objective.log_probs(process, network(read, level_N)[:, 0], z_N1, gamma_N)

        first = one_pass(None)
        return one_pass(process.mean(first.exp())) if objective.self_conditioning else first

    return log_p


def expected_errors(process: Gaussian, log_p: LogP, x: int, t_T: Tensor, nodes: int) -> Tensor:
    """[T] E ‖e_x - x_hat(z_t)‖² over z_t, at each time."""
    eps_N, w_N = hermite(nodes)
    t_M, x_M = t_T.repeat_interleave(nodes), torch.full((len(t_T) * nodes,), x)
    eps_M1 = process.noise_std * eps_N.repeat(len(t_T))[:, None]
    z_M1 = process.noised(x_M, process.gamma.gamma(t_M), eps_M1)
    return process.squared_error(log_p(z_M1, t_M).exp(), x_M).view(-1, nodes) @ w_N


def ends(process: Gaussian, log_p: LogP, x: int, nodes: int) -> Tensor:
    """Prior and reconstruction."""
    eps_N, w_N = hermite(nodes)
    zero, x_N = torch.zeros((), dtype=torch.float64), torch.full((nodes,), x)
    gamma_N = process.gamma.gamma(zero).expand(nodes)
    z_N1 = process.noised(x_N, gamma_N, process.noise_std * eps_N[:, None])
    return process.prior_nats(x_N[:1])[0] - (w_N * rounding(process, log_p, z_N1)[:, x]).sum()


def rounding(process: Gaussian, log_p: LogP, z_N1: Tensor) -> Tensor:
    """[N, I] log p(x | z_0)."""
    zero = torch.zeros((), dtype=torch.float64)
    if process.reads_z0:
        return log_p(z_N1, zero)
    fit_NI = process.log_likelihood(z_N1, process.gamma.gamma(zero).expand(len(z_N1))).clone()
    fit_NI[:, process.mask_id] = -torch.inf
    return fit_NI.log_softmax(dim=1)


def continuous_bound(
    process: Gaussian, log_p: LogP, x: int, *, nodes: int = 60, pieces: int = 32, power: int = 1
) -> Tensor:
    """pieces: those of a learned gamma, which has corners between them. power: u is summed over, t = u^power,
    for a gamma that is steep at first."""
    gamma, (node_K, w_K) = process.gamma, legendre(3)
    u_T = ((torch.arange(pieces)[:, None] + node_K) / pieces).flatten()
    t_T, w_T = u_T**power, power * u_T ** (power - 1) * w_K.repeat(pieces) / pieces
    weight_T = gamma.rate(t_T) * torch.exp(-gamma.gamma(t_T)) / 2
    return ends(process, log_p, x, nodes) + (w_T * weight_T) @ expected_errors(process, log_p, x, t_T, nodes)


def step_bound(process: Gaussian, log_p: LogP, x: int, steps: int, *, nodes: int = 60) -> Tensor:
    gamma_T = process.gamma.gamma(torch.arange(steps + 1, dtype=torch.float64) / steps)
    t_T = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    weight_T = snr_drop(gamma_T[:-1], gamma_T[1:]) / 2
    return ends(process, log_p, x, nodes) + weight_T @ expected_errors(process, log_p, x, t_T, nodes)


def normal_density(z: Tensor, mean: Tensor, std: Tensor | float) -> Tensor:
    return torch.exp(-(((z - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))


def chain_law(process: Gaussian, log_p: LogP, steps: int, *, reach: float = 9.0, points: int = 1201) -> Tensor:
    """[I] p(x) of the T-step chain of one position, whose densities are summed on a grid."""
    z_G = torch.linspace(-reach, reach, points, dtype=torch.float64)
    width = float(z_G[1] - z_G[0])
    density_G = normal_density(z_G, torch.zeros(()), process.noise_std)
    for i in range(steps, 0, -1):
        s, t = torch.tensor([i - 1, i], dtype=torch.float64) / steps
        x_hat_GE = process.mean(log_p(z_G[:, None], t).exp())
        mean_GE, std_G1 = process.posterior(z_G[:, None], x_hat_GE, s, t)
        density_G = (density_G[:, None] * normal_density(z_G[None], mean_GE, std_G1)).sum(dim=0) * width
    return (density_G[:, None] * rounding(process, log_p, z_G[:, None]).exp()).sum(dim=0) * width


@torch.no_grad()
def aggregate_divergence(process: Gaussian, p_I: Tensor, *, reach: float = 12.0, points: int = 4001) -> float:
    """KL(q(z_1) ‖ N(0, 1)) of the data's mixture at t = 1."""
    z_G = torch.linspace(-reach, reach, points, dtype=torch.float64)
    gamma = process.gamma.gamma(torch.ones((), dtype=torch.float64))
    mean_V1 = alpha_of(gamma) * process.points(torch.arange(len(p_I)))
    q_G = (p_I[:, None] * normal_density(z_G, mean_V1, sigma_of(gamma))).sum(dim=0)
    n_G = normal_density(z_G, torch.zeros(()), 1.0)
    return float((torch.where(q_G > 0, q_G * (q_G / n_G).log(), 0.0)).sum() * (z_G[1] - z_G[0]))


def check_gamma(gamma: Gamma) -> None:
    """It rises, and its rate is its derivative."""
    t = torch.linspace(0.003, 0.997, 240, dtype=torch.float64)
    step = 1e-6
    slope = (gamma.gamma(t + step) - gamma.gamma(t - step)) / (2 * step)
    torch.testing.assert_close(gamma.rate(t), slope, rtol=1e-4, atol=1e-6)
    assert bool((gamma.rate(t) > 0).all())
    torch.testing.assert_close(gamma.of_level(gamma.level(t)), gamma.gamma(t))
