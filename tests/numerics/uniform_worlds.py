"""Uniform-state chains on tiny vocabularies, written out over all V^L states."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from chains import World
from torch import Tensor

from unmask.noise import Noise
from unmask.processes.base import q_posterior


def log_p(world: World, z_BL: Tensor, level: float) -> Tensor:
    """[B, L, I] log x_theta over the V tokens."""
    logits = world.f(z_BL, torch.full((len(z_BL),), level, dtype=torch.float64)).clone()
    logits[..., world.mask_id] = -torch.inf
    return logits.log_softmax(dim=-1)


def pi(world: World) -> Tensor:
    prior = torch.full((world.num_ids,), 1 / world.V, dtype=torch.float64)
    prior[world.mask_id] = 0
    return prior


def posteriors(world: World, z: Tensor, x_BLI: Tensor, alpha_s: float, alpha_t: float) -> Tensor:
    """[B, L, I] q(z_s | z_t, x) position by position."""
    flat = x_BLI.flatten(0, 1)
    alphas = (torch.full((len(flat),), a, dtype=torch.float64) for a in (alpha_s, alpha_t))
    return q_posterior(z.flatten(), flat, *alphas, pi(world)).view(x_BLI.shape)


def product_law(p_BLI: Tensor, texts: Tensor) -> Tensor:
    """[B, texts] of independent positions."""
    law = torch.ones(len(p_BLI), len(texts), dtype=torch.float64)
    for position in range(texts.shape[1]):
        law *= p_BLI[:, position][:, texts[:, position]]
    return law


def chain_law(world: World, noise: Noise, steps: int, moves: Callable[[Tensor, float, float], Tensor]) -> Tensor:
    """Over all states: the law of z_0 from z_1 uniform; moves(z, s, t) is [states, L, I], each position's own law."""
    texts = world.texts
    law = torch.full((len(texts),), 1 / len(texts), dtype=torch.float64)
    for i in range(steps, 0, -1):
        law = law @ product_law(moves(texts, (i - 1) / steps, i / steps), texts)
    every = torch.zeros(len(world.states), dtype=torch.float64)
    every[world.index(texts)] = law
    return every


def marginal(world: World, x: Tensor, alpha: float) -> Tensor:
    """[texts] q(z_t | x)."""
    one_hot = torch.nn.functional.one_hot(x, world.num_ids).double()
    return product_law((alpha * one_hot + (1 - alpha) * pi(world))[None], world.texts)[0]


def step_bound(world: World, x: Tensor, noise: Noise, steps: int) -> float:
    """Σ_i E KL(q(z_s|z_t,x) ‖ q(z_s|z_t,x_theta)), with the general posterior, over all z_t."""
    times = torch.arange(steps + 1, dtype=torch.float64) / steps
    alpha, total, texts = noise.alpha(times).tolist(), 0.0, world.texts
    one_hot = torch.nn.functional.one_hot(x, world.num_ids).double().expand(len(texts), -1, -1)
    for i in range(1, steps + 1):
        q = posteriors(world, texts, one_hot, alpha[i - 1], alpha[i])
        p = posteriors(world, texts, log_p(world, texts, 1 - alpha[i]).exp(), alpha[i - 1], alpha[i])
        kl = torch.where(q > 0, q * (q.log() - p.log()), 0.0).sum(dim=(1, 2))
        total += float((marginal(world, x, alpha[i]) * kl).sum())
    return total


def entropy_bound(world: World, x: Tensor, noise: Noise, y: Callable[[Tensor, float], Tensor], nodes: int) -> float:
    """∫ (-alpha'/(V alpha)) E Σ_{j≠i} [s - r log s + K(r)] dt with s_j = y_j / y_i, by quadrature over t."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    total, texts = 0.0, world.texts
    tokens = [v for v in range(world.num_ids) if v != world.mask_id]
    for t, weight in zip((points + 1) / 2, weights / 2, strict=True):
        time = torch.tensor(t, dtype=torch.float64)
        alpha, rate = float(noise.alpha(time)), float(-noise.dalpha(time) / noise.alpha(time) / world.V)
        y_BLI, chance = y(texts, alpha), marginal(world, x, alpha)
        for (b, z), position in itertools.product(enumerate(texts.tolist()), range(world.L)):
            i = z[position]
            x_bar = [world.V * alpha * (v == int(x[position])) + 1 - alpha for v in range(world.num_ids)]
            for j in tokens:
                if j != i:
                    s, r = y_BLI[b, position, j] / y_BLI[b, position, i], torch.tensor(x_bar[j] / x_bar[i])
                    total += weight * rate * float(chance[b] * (s - r * s.log() + r * (r.log() - 1)))
    return total


def flow_law(world: World, noise: Noise, y: Callable[[Tensor, float], Tensor], steps: int = 4000) -> Tensor:
    """[texts] the law at time 0 of the reverse process whose rates are (-alpha'/(V alpha)) y_j / y_i: master equation.

    Midpoint rule from t just below 1, where z is uniform: the rate's pole there moves nothing, since the law is uniform
    and y is even.
    """
    texts = world.texts
    differ = (texts[:, None] != texts[None]).sum(dim=2) == 1
    position = (texts[:, None] != texts[None]).long().argmax(dim=2)
    to = texts.gather(1, position.T).T  # [from, to] the token that a single change writes

    def rates(t: float) -> Tensor:
        time = torch.tensor(t, dtype=torch.float64)
        alpha = float(noise.alpha(time))
        y_BLI = y(texts, alpha)
        b = torch.arange(len(texts))[:, None].expand_as(position)
        ratio = y_BLI[b, position, to] / y_BLI[b, position, texts.gather(1, position)]
        speed = float(-noise.dalpha(time) / noise.alpha(time)) / world.V
        move = torch.where(differ, speed * ratio, 0.0)
        return move - torch.diag(move.sum(dim=1))

    law = torch.full((len(texts),), 1 / len(texts), dtype=torch.float64)
    top = 1 - 1e-3
    for k in range(steps):
        dt = top / steps
        generator = rates(top - (k + 0.5) * dt)
        law = law + dt * (law + dt / 2 * law @ generator) @ generator
    return law
