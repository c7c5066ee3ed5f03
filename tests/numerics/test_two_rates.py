"""Forward rates that the reverse process does not know, by enumeration: the spindle centred on its sentence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from chains import World
from test_token_rates import assert_hits, chain_law, chance, hidden, levels, rated, set_numbers, step_law
from torch import Tensor

from unmask.data.batch import make_batch
from unmask.objectives.token_rates import TokenRates

STRENGTH = 0.3
LIMIT = 0.999 / (STRENGTH * math.pi)


def forward_levels(world: World, x: Tensor, t: Any) -> Any:
    """[L] 1 - alpha of the text's own tokens, h = 1 - (their mean H) / H(x_l), written out anew from `levels`' h."""
    told = 1 / (1 - np.linspace(-1.5, 1.0, world.num_ids)[x.numpy()])  # H(x_l), in units of the corpus's mean
    h = np.clip(1 - told.mean() / told, -LIMIT, LIMIT)
    return t + STRENGTH * np.sin(np.pi * t) * h


def two_rate_step_bound(world: World, x: Tensor, steps: int) -> float:
    """Σ_t E KL(q(z_s | z_t, x) || p_theta(z_s | z_t)) over all states, q at the text's rates and p at the corpus's."""
    total = 0.0
    for i in range(1, steps + 1):
        s, t = (i - 1) / steps, i / steps
        p = step_law(world, "spindle", s, t)
        at_s, at_t = forward_levels(world, x, s), forward_levels(world, x, t)
        for masked in world.subsets():
            p_t = p[world.index(hidden(world, x, masked)[None])][0]
            for still in (each for each in world.subsets() if set(each) <= set(masked)):
                q = math.prod(at_s[j] / at_t[j] if j in still else 1 - at_s[j] / at_t[j] for j in masked)
                if q > 0 and (seen := chance(at_t.tolist(), masked)) > 0:
                    p_st = float(p_t[world.index(hidden(world, x, still)[None])])
                    total += seen * q * math.log(q / p_st)
    return total


def two_rate_continuous_bound(world: World, x: Tensor) -> float:
    """∫ E Σ_masked [w^q log(w^q / (w^p_x x_theta[x])) - w^q + Σ x_theta w^p] dt by quadrature."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    total, tiny = 0.0, 1e-6
    for t, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        at = forward_levels(world, x, t)
        ends = [t * (1 + tiny), t * (1 - tiny)]
        q = np.subtract(*(forward_levels(world, x, end) for end in ends)) / (2 * tiny * t) / at
        p = np.subtract(*(levels("spindle", world, end) for end in ends)) / (2 * tiny * t) / levels("spindle", world, t)
        for masked in world.subsets()[1:]:
            x_hat = world.x_theta(hidden(world, x, masked)[None], t)[0].numpy()
            loss = sum(q[j] * math.log(q[j] / (p[x[j]] * x_hat[j, x[j]])) - q[j] + (x_hat[j] * p).sum() for j in masked)
            total += weight * chance(at.tolist(), masked) * loss
    return total


def test_a_token_is_compared_with_the_noised_tokens_of_its_row() -> None:
    world = World.random(V=3, L=4)
    objective, net = rated(world, "spindle", centre="sentence")
    objective.prepare(net, lambda: np.array([79, 17, 1, 0]))
    told = -np.log(np.array([80, 18, 2]) / 100)
    x_BL, open_BL = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]]), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    found = objective.process(net).forward_numbers(x_BL, open_BL, torch.zeros((), dtype=torch.float64))
    for x, is_open, h in zip(x_BL.numpy(), open_BL.numpy(), found, strict=True):
        mean = told[x][is_open].mean()
        np.testing.assert_allclose(h, np.clip(1 - mean / told[x], -LIMIT, LIMIT), rtol=1e-5)


def test_the_step_bound_is_the_enumerated_one_and_lies_above_the_chain_of_the_corpus_rates() -> None:
    world = World.random(seed=3, level=True)
    objective, net = rated(world, "spindle", centre="sentence", steps=3)
    law, x = chain_law(world, "spindle", 3), world.texts[3]
    gaps = [two_rate_step_bound(world, y, 3) + math.log(law[world.index(y[None])]) for y in world.texts]
    assert min(gaps) > -1e-12
    assert_hits(objective, net, x, two_rate_step_bound(world, x, 3))


def test_the_continuous_bound_by_quadrature() -> None:
    world = World.random(seed=2, level=True)
    objective, net = rated(world, "spindle", centre="sentence")
    fine = chain_law(world, "spindle", 128)
    for x in world.texts:
        assert two_rate_continuous_bound(world, x) >= -math.log(fine[world.index(x[None])]) - 1e-2
    x = world.texts[5]
    truth = two_rate_continuous_bound(world, x)
    assert_hits(objective, net, x, truth)
    gaps = [abs(two_rate_step_bound(world, x, steps) - truth) for steps in (8, 64)]
    assert gaps[1] < gaps[0] / 4  # as steps get short the one becomes the other
    assert gaps[1] < 0.03 * truth


@pytest.mark.parametrize("steps", [None, 4])
def test_where_the_rates_agree_it_is_the_bound_of_one_rate(steps: int | None) -> None:
    """Of a row whose mean is the corpus's, with rates that differ; of other rows it is another."""
    world = World.random(L=2, seed=8, level=True)
    one, net = rated(world, "spindle", steps=steps)
    two = TokenRates(centre="sentence", steps=steps)
    set_numbers(one.process(net).rates, torch.tensor([-0.5, 0.25, 0.0], dtype=torch.float64))  # H(v) / H: 2/3, 4/3
    for text, same in (([0, 1], True), ([0, 0], False)):
        batch = make_batch(torch.tensor([text]).repeat(50, 1), seed=0, step=0)
        assert torch.allclose(one.row_nats(net, batch), two.row_nats(net, batch), rtol=1e-9, atol=1e-12) == same


def test_every_mask_counts_its_divergence() -> None:
    """Without any draw: what a masked position counts is the KL between the two steps, also where steps are short."""
    world = World.random(V=3, L=1, seed=5)
    own_N = torch.tensor([0.9, -0.3, -1.0], dtype=torch.float64)
    for steps, i in ((1, 1), (4, 1), (4, 3), (1000, 900)):
        objective, net = rated(world, "spindle", centre="sentence", steps=steps)
        process, t = objective.process(net), torch.full((3,), i / steps, dtype=torch.float64)
        x_hat = world.x_theta(torch.tensor([[3]]), i / steps)[0]
        p = process.posterior(torch.full((3,), 3), x_hat, t - 1 / steps, t)
        opens = process.rates.opens(t, torch.full_like(t, 1 / steps), own_N)
        q = torch.cat([torch.diag(opens), 1 - opens[:, None]], dim=1)
        divergence = torch.where(q > 0, q * (q / p).log(), 0.0).sum(dim=1)
        c_I = process.rates.numbers(q)
        for dtype, rtol in ((torch.float64, 1e-6), (torch.float32, 1e-3)):
            log_p = x_hat.log().expand(3, -1).to(dtype)
            nats = objective.nats(process.rates, log_p, torch.arange(3), t, c_I, own_N)
            torch.testing.assert_close(nats.double(), steps * divergence, rtol=rtol, atol=1e-9)
