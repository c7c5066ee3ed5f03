"""Small worlds in which everything can be enumerated: V tokens and a mask on L positions, (V+1)^L states."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from unmask.denoisers.network import Network, as_denoiser
from unmask.noise import Noise


@dataclass
class World:
    """A table denoiser: random logits for every state, moved along a second table by the noise level if it looks."""

    V: int
    L: int
    mask_id: int
    logits: Tensor  # [states, L, V+1]
    slope: Tensor | None = None

    @classmethod
    def random(cls, V: int = 2, L: int = 3, mask_id: int | None = None, seed: int = 0, level: bool = False) -> World:
        g = torch.Generator().manual_seed(seed)
        shape = ((V + 1) ** L, L, V + 1)
        tables = torch.randn(2, *shape, generator=g, dtype=torch.float64) * 1.5
        return cls(V, L, V if mask_id is None else mask_id, tables[0], tables[1] if level else None)

    @property
    def num_ids(self) -> int:
        return self.V + 1

    @property
    def states(self) -> Tensor:
        return torch.tensor(list(itertools.product(range(self.num_ids), repeat=self.L)))

    @property
    def texts(self) -> Tensor:
        return self.states[(self.states != self.mask_id).all(dim=1)]

    def index(self, z_BL: Tensor) -> Tensor:
        return (z_BL * self.num_ids ** torch.arange(self.L - 1, -1, -1)).sum(dim=1)

    def f(self, z_BL: Tensor, level_B: Tensor | None) -> Tensor:
        logits = self.logits[self.index(z_BL)]
        if self.slope is not None:
            assert level_B is not None
            logits = logits + level_B.double()[:, None, None] * self.slope[self.index(z_BL)]
        return logits

    def denoiser(self) -> Network:
        return as_denoiser(self.f, vocab_size=self.V, mask_id=self.mask_id, uses_level=self.slope is not None)

    def x_theta(self, z_BL: Tensor, level: float, *, zero_masking: bool = True, carry_over: bool = True) -> Tensor:
        """[B, L, I] probabilities, both halves of SUBS as asked."""
        logits = self.f(z_BL, torch.full((len(z_BL),), level)).clone()
        if zero_masking:
            logits[..., self.mask_id] = -torch.inf
        p = logits.softmax(dim=-1)
        if carry_over:
            visible = z_BL != self.mask_id
            p[visible] = torch.nn.functional.one_hot(z_BL[visible], self.num_ids).double()
        return p

    def step_matrix(self, alpha_s: float, alpha_t: float, *, zero_masking: bool = True) -> Tensor:
        """p_theta(z_s | z_t) over all states: visible tokens stay, masked positions follow the posterior."""
        z = self.states
        p = self.x_theta(z, 1 - alpha_t, zero_masking=zero_masking)
        a = p[..., self.mask_id] * (z == self.mask_id)
        stay = (1 - alpha_s + alpha_s * a) / (1 - alpha_t + alpha_t * a)
        q = p * ((alpha_s - alpha_t) / (1 - alpha_t + alpha_t * a))[..., None]
        q[..., self.mask_id] = stay
        return self.opening(q)

    def opening(self, q: Tensor) -> Tensor:
        """[states, states] where masked positions follow q [states, L, ids] independently, and visible tokens stay."""
        z = self.states
        visible = z != self.mask_id
        q[visible] = torch.nn.functional.one_hot(z[visible], self.num_ids).double()
        law = torch.ones(len(z), len(z), dtype=torch.float64)
        for position in range(self.L):
            law *= q[:, position][:, z[:, position]]
        return law

    def chain_law(self, noise: Noise, steps: int, *, zero_masking: bool = True) -> Tensor:
        """The law of z_0 after T steps from all masks."""
        law = torch.zeros(len(self.states), dtype=torch.float64)
        law[self.index(torch.full((1, self.L), self.mask_id))] = 1
        alpha = noise.alpha(torch.arange(steps + 1, dtype=torch.float64) / steps).tolist()
        for i in range(steps, 0, -1):
            law = law @ self.step_matrix(alpha[i - 1], alpha[i], zero_masking=zero_masking)
        return law

    def masked_loss(self, x: Tensor, masked: tuple[int, ...], level: float) -> float:
        """Sum of -log x_theta[x] over the masked positions, under SUBS."""
        z = x.clone()
        z[list(masked)] = self.mask_id
        p = self.x_theta(z[None], level)[0]
        return -sum(math.log(p[position, x[position]]) for position in masked)

    def subsets(self) -> list[tuple[int, ...]]:
        return [s for n in range(self.L + 1) for s in itertools.combinations(range(self.L), n)]

    def continuous_bound(self, x: Tensor) -> float:
        """∫ over u = 1 - alpha of (1/u) E[masked loss] du: by quadrature, which is exact for these polynomials."""
        nodes, weights = np.polynomial.legendre.leggauss(40)
        total = 0.0
        for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            for masked in self.subsets()[1:]:
                n = len(masked)
                chance = node ** (n - 1) * (1 - node) ** (self.L - n)
                total += weight * chance * self.masked_loss(x, masked, node)
        return total

    def count_bound(self, x: Tensor) -> float:
        """L · E_n (1/n) sum over a uniform subset of size n."""
        total = 0.0
        for masked in self.subsets()[1:]:
            n = len(masked)
            total += self.masked_loss(x, masked, n / self.L) / (n * math.comb(self.L, n))
        return total

    def step_bound(self, x: Tensor, noise: Noise, steps: int) -> float:
        alpha = noise.alpha(torch.arange(steps + 1, dtype=torch.float64) / steps).tolist()
        total = 0.0
        for i in range(1, steps + 1):
            weight, u = (alpha[i - 1] - alpha[i]) / (1 - alpha[i]), 1 - alpha[i]
            for masked in self.subsets()[1:]:
                chance = u ** len(masked) * (1 - u) ** (self.L - len(masked))
                total += weight * chance * self.masked_loss(x, masked, u)
        return total

    def d3pm_bound(self, x: Tensor, noise: Noise, steps: int) -> float:
        """KL(q(z_s|z_t,x) || p_theta(z_s|z_t)) summed over all states by brute force, plus the reconstruction."""
        alpha = noise.alpha(torch.arange(steps + 1, dtype=torch.float64) / steps).tolist()
        states = [tuple(s) for s in self.states.tolist()]
        total = 0.0
        for i in range(1, steps + 1):
            alpha_s, alpha_t = alpha[i - 1], alpha[i]
            p = self.step_matrix(alpha_s, alpha_t, zero_masking=False)
            for masked_t in self.subsets():
                z_t = tuple(self.mask_id if j in masked_t else int(x[j]) for j in range(self.L))
                chance_t = (1 - alpha_t) ** len(masked_t) * alpha_t ** (self.L - len(masked_t))
                for masked_s in (s for s in self.subsets() if set(s) <= set(masked_t)):
                    stay = (1 - alpha_s) / (1 - alpha_t)
                    q = stay ** len(masked_s) * (1 - stay) ** (len(masked_t) - len(masked_s))
                    if q > 0:
                        z_s = tuple(self.mask_id if j in masked_s else int(x[j]) for j in range(self.L))
                        p_st = float(p[states.index(z_t), states.index(z_s)])
                        total += chance_t * q * math.log(q / p_st)
        p0 = self.x_theta(x[None], 0.0, zero_masking=False, carry_over=False)[0]
        return total - sum(math.log(p0[j, x[j]]) for j in range(self.L))


def random_order_law(world: World) -> Tensor:
    """Law over texts of opening one uniformly chosen position after another (T = infinity)."""
    law = torch.zeros(len(world.states), dtype=torch.float64)
    for order in itertools.permutations(range(world.L)):
        part = torch.zeros_like(law)
        part[world.index(torch.full((1, world.L), world.mask_id))] = 1
        for position in order:
            z = world.states
            p = world.x_theta(z, 0.0)[:, position]
            new = torch.zeros_like(part)
            for token in range(world.num_ids):
                after = z.clone()
                after[:, position] = token
                new.index_add_(0, world.index(after), part * p[:, token])
            part = new
        law += part / math.factorial(world.L)
    return law


def fits(world: World, tokens_BL: Tensor, law: Tensor) -> float:
    """Chi-square p-value of drawn texts against a law over states; a text of probability 0 fails at once.

    States expected fewer than five times count as one: with them alone the statistic would have another law.
    """
    observed = torch.bincount(world.index(tokens_BL), minlength=len(law)).numpy()
    expected = law.numpy() * len(tokens_BL)
    assert observed[expected < 1e-9].sum() == 0
    rare = expected < 5
    cells = np.append(observed[~rare], observed[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    keep = cells[1] > 0
    return float(stats.chisquare(cells[0][keep], cells[1][keep] * observed.sum() / expected.sum()).pvalue)


def data_world(V: int = 2, L: int = 4, seed: int = 3) -> tuple[World, Tensor]:
    """A random data law and the table that knows its conditionals exactly."""
    g = torch.Generator().manual_seed(seed)
    world = World.random(V, L)
    texts = world.texts
    p = torch.rand(len(texts), generator=g, dtype=torch.float64) ** 3
    p /= p.sum()
    logits = torch.full_like(world.logits, -torch.inf)
    for i, z in enumerate(world.states):
        agrees = ((texts == z) | (z == world.mask_id)).all(dim=1)
        for position in range(L):
            for token in range(V):
                logits[i, position, token] = (p * agrees * (texts[:, position] == token)).sum().log()
    world.logits = torch.where(logits.isneginf().all(-1, keepdim=True), 0.0, logits)
    law = torch.zeros(len(world.states), dtype=torch.float64)
    law[world.index(texts)] = p
    return world, law
