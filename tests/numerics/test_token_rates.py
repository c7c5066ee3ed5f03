"""Rates of the tokens' own, by enumeration: the chain, its bounds, the gradient of learned powers, the sampler."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from chains import World, fits
from torch import Tensor

from unmask import objectives, samplers
from unmask.data.batch import DRAW_TWIN, Batch, make_batch
from unmask.denoisers.network import Network
from unmask.errors import UsageError
from unmask.objectives.token_rates import TokenRates
from unmask.processes.token_rates import Power, Rates, Spindle
from unmask.rng import fold
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

ROWS = 20_000
RATES = ["spindle", "power"]
# h_v, of which the first is clipped, and log k_v: powers above 1, whose weights k/t have a finite variance under masks
NUMBERS = {"spindle": (-1.5, 1.0), "power": (0.2, 1.4)}


def rated(world: World, rates: str, **options: Any) -> tuple[TokenRates, Network]:
    """An objective and the table's network with rates that differ much."""
    objective, net = TokenRates(rates=rates, **options), world.denoiser()  # type: ignore[arg-type]
    objective.attach(net)
    module = objective.process(net).rates.double()
    set_numbers(module, torch.linspace(*NUMBERS[rates], world.num_ids, dtype=torch.float64))
    return objective, net


def set_numbers(rates: Rates, numbers_I: Tensor) -> None:
    """Whatever there is one of a token."""
    [stored_I] = rates.state_dict().values()
    stored_I.copy_(numbers_I)


def levels(rates: str, world: World, t: Any) -> Any:
    """[..., I] 1 - alpha_v(t), written out anew."""
    c = np.linspace(*NUMBERS[rates], world.num_ids)
    if rates == "power":
        return np.asarray(t)[..., None] ** np.exp(c)
    limit = 0.999 / (0.3 * math.pi)
    return np.asarray(t)[..., None] + 0.3 * np.sin(np.pi * np.asarray(t))[..., None] * np.clip(c, -limit, limit)


def step_law(world: World, rates: str, s: float, t: float) -> Tensor:
    """[states, states] p_theta(z_s | z_t): a mask becomes v with x_theta[v] rho_v."""
    at_s, at_t = levels(rates, world, s), levels(rates, world, t)
    q = world.x_theta(world.states, t) * torch.from_numpy((at_t - at_s) / at_t)
    q[..., world.mask_id] = 0
    q[..., world.mask_id] = 1 - q.sum(dim=-1)
    return world.opening(q)


def chain_law(world: World, rates: str, steps: int) -> Tensor:
    law = torch.zeros(len(world.states), dtype=torch.float64)
    law[world.index(torch.full((1, world.L), world.mask_id))] = 1
    for i in range(steps, 0, -1):
        law = law @ step_law(world, rates, (i - 1) / steps, i / steps)
    return law


def chance(level: list[float], masked: tuple[int, ...]) -> float:
    return math.prod(u if j in masked else 1 - u for j, u in enumerate(level))


def hidden(world: World, x: Tensor, masked: tuple[int, ...]) -> Tensor:
    z = x.clone()
    z[list(masked)] = world.mask_id
    return z


def step_bound(world: World, x: Tensor, rates: str, steps: int) -> float:
    """Σ_t E KL(q(z_s | z_t, x) || p_theta(z_s | z_t)) over all states, by brute force."""
    total = 0.0
    for i in range(1, steps + 1):
        s, t = (i - 1) / steps, i / steps
        p = step_law(world, rates, s, t)
        at_s, at_t = (levels(rates, world, time)[x.numpy()].tolist() for time in (s, t))
        for masked in world.subsets():
            p_t = p[world.index(hidden(world, x, masked)[None])][0]
            for still in (each for each in world.subsets() if set(each) <= set(masked)):
                q = math.prod(at_s[j] / at_t[j] if j in still else 1 - at_s[j] / at_t[j] for j in masked)
                if q > 0:
                    p_st = float(p_t[world.index(hidden(world, x, still)[None])])
                    total += chance(at_t, masked) * q * math.log(q / p_st)
    return total


def continuous_bound(world: World, x: Tensor, rates: str) -> float:
    """∫ E Σ_masked [-w_x log x_theta[x] - w_x + Σ x_theta w] dt by quadrature, t = u^4 for the powers' steep ends."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    total, tiny = 0.0, 1e-6
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        t = node**4
        at = levels(rates, world, t)
        w = (levels(rates, world, t * (1 + tiny)) - levels(rates, world, t * (1 - tiny))) / (2 * tiny * t) / at
        for masked in world.subsets()[1:]:
            p = world.x_theta(hidden(world, x, masked)[None], t)[0].numpy()
            loss = sum(-w[x[j]] * (math.log(p[j, x[j]]) + 1) + (p[j] * w).sum() for j in masked)
            total += weight * 4 * node**3 * chance(at[x.numpy()].tolist(), masked) * loss
    return total


def assert_hits(objective: TokenRates, net: Network, x: Tensor, truth: float) -> None:
    values = objective.bound(net, x.expand(ROWS, -1), num_samples=1, seed=11).draws_BS[:, 0]
    error = float(values.std()) / math.sqrt(ROWS)
    assert abs(float(values.mean()) - truth) < 4.5 * error, (float(values.mean()), truth, error)
    assert error < 0.04 * truth


# --- the rates ---


@pytest.mark.parametrize("rates", [Spindle(5, 0.3), Spindle(5, 2.0), Power(5, 1.0)], ids=["spindle", "steep", "power"])
def test_the_rates_are_schedules(rates: Rates) -> None:
    """Exact ends, falling alpha, and weights and steps that are those of the levels."""
    set_numbers(rates, torch.tensor([-30.0, -1.0, 0.0, 0.4, 30.0]))
    c_I = rates.numbers(torch.zeros((), dtype=torch.float64)).detach()
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None]
    assert rates.level(ends, c_I).tolist() == [[0.0] * 5, [1.0] * 5]
    t = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)[:, None].requires_grad_()
    level = rates.level(t.expand(-1, 5), c_I)
    for v in range(5):
        (slope,) = torch.autograd.grad(level[:, v].sum(), t, retain_graph=True)
        if v in (0, 4) and isinstance(rates, Power):
            continue  # t^150: beyond what floats tell apart
        assert (slope > 0).all()
        torch.testing.assert_close(slope[:, 0], rates.weight(t, c_I)[:, v] * level[:, v], rtol=1e-6, atol=1e-12)
        step = t.detach() / 3
        torch.testing.assert_close(
            rates.opens(t.detach(), step, c_I)[:, v],
            1 - rates.level(t.detach() - step, c_I)[:, v] / level[:, v].detach(),
            rtol=1e-9,
            atol=1e-12,
        )
    assert (rates.opens(t, t, c_I) == 1).all()


def test_short_steps_keep_their_digits_in_float32() -> None:
    for rates in (Spindle(2, 0.3), Power(2, 1.0)):
        c = torch.tensor([-0.7, 0.4])
        t, step = torch.tensor(0.95), torch.tensor(1e-5)
        exact = rates.opens(t.double(), step.double(), c.double())
        torch.testing.assert_close(rates.opens(t, step, c).double(), exact, rtol=1e-5, atol=0)


def test_the_spindle_masks_first_what_tells_most() -> None:
    world = World.random(V=3)
    objective, net = TokenRates(), world.denoiser()
    objective.attach(net)
    with pytest.raises(UsageError, match="nobody has counted"):
        objective.bound(net, world.texts[:1])
    with pytest.raises(UsageError, match="nobody has counted"):
        sample(net, Canvas.blank(num=1, length=3, mask_id=3), samplers.TokenPosterior(), objective=objective)
    objective.prepare(net, lambda: np.array([79, 17, 1, 0]))
    share = np.array([80, 18, 2]) / 100
    told = -np.log(share)
    [h_I] = objective.process(net).rates.state_dict().values()
    np.testing.assert_allclose(h_I[:3], 1 - (share * told).sum() / told, rtol=1e-6)
    assert h_I[3] == 0  # the mask
    x_BL, half = torch.tensor([[0, 1, 2]]), torch.tensor([0.5], dtype=torch.float64)
    level_BL = objective.process(net).levels(x_BL, half, torch.ones_like(x_BL, dtype=torch.bool))
    assert level_BL[0, 0] < level_BL[0, 1] < level_BL[0, 2]


# --- the bounds ---


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("mask_id", [0, 2])
def test_the_step_bound_is_the_enumerated_one_and_lies_above_the_chain(rates: str, mask_id: int) -> None:
    world = World.random(seed=3, level=True, mask_id=mask_id)
    objective, net = rated(world, rates, steps=3)
    law = chain_law(world, rates, 3)
    assert float(law[world.index(world.texts)].sum()) == pytest.approx(1)
    for x in world.texts:
        assert step_bound(world, x, rates, 3) >= -math.log(law[world.index(x[None])]) - 1e-12
    assert_hits(objective, net, world.texts[3], step_bound(world, world.texts[3], rates, 3))


@pytest.mark.parametrize("rates", RATES)
def test_every_mask_counts_its_divergence(rates: str) -> None:
    """Without any draw: at a masked position the T-step term is the KL between the two steps."""
    world = World.random(V=3, L=1, seed=5)
    for steps, i in ((1, 1), (4, 1), (4, 3), (1000, 900)):
        objective, net = rated(world, rates, steps=steps)
        process, t = objective.process(net), torch.full((3,), i / steps, dtype=torch.float64)
        x_hat = world.x_theta(torch.tensor([[3]]), i / steps)[0]
        z, s = torch.full((3,), 3), t - 1 / steps
        q, p = process.posterior(z, torch.eye(4, dtype=torch.float64)[:3], s, t), process.posterior(z, x_hat, s, t)
        divergence = torch.where(q > 0, q * (q / p).log(), 0.0).sum(dim=1)
        c_I = process.rates.numbers(q).detach()
        nats = objective.nats(process.rates, x_hat.log().expand(3, -1), torch.arange(3), t, c_I)
        torch.testing.assert_close(nats.detach(), steps * divergence.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rates", RATES)
def test_the_continuous_bound_by_quadrature(rates: str) -> None:
    world = World.random(seed=2, level=True)
    objective, net = rated(world, rates)
    x = world.texts[5]
    truth = continuous_bound(world, x, rates)
    assert_hits(objective, net, x, truth)
    gaps = [abs(step_bound(world, x, rates, steps) - truth) for steps in (8, 128)]
    assert gaps[1] < gaps[0] / 4  # as steps get short the one becomes the other
    assert gaps[1] < 0.03 * truth
    assert truth >= -math.log(chain_law(world, rates, 256)[world.index(x[None])]) - 1e-2


@pytest.mark.parametrize("steps", [None, 4])
def test_with_equal_rates_it_is_mdlm(steps: int | None) -> None:
    world = World.random(seed=8, level=True)
    batch = make_batch(world.texts.repeat(20, 1), seed=0, step=0)
    net = world.denoiser()
    mdlm = objectives.MDLM(steps=steps).row_nats(net, batch)
    power = TokenRates(rates="power", steps=steps)
    torch.testing.assert_close(power.row_nats(net, batch), mdlm, rtol=1e-6, atol=1e-9)
    spindle = TokenRates(steps=steps)
    spindle.attach(net)
    spindle.prepare(net, lambda: np.array([7, 7, 0]))  # alike, so that no token tells more than the mean
    torch.testing.assert_close(spindle.row_nats(net, batch), mdlm, rtol=1e-6, atol=1e-9)


# --- learned powers ---


def bound_by_k(world: World, objective: TokenRates, x: Tensor, log_k_I: Tensor) -> Tensor:
    """The bound as a function of k, masks enumerated: autograd has its whole gradient."""
    rates, c_I, total = Power(world.num_ids, 1.0), log_k_I.exp(), torch.zeros((), dtype=torch.float64)
    nodes, weights = ((part / 2).tolist() for part in np.polynomial.legendre.leggauss(40))
    times = [((node + 0.5) ** 4, weight * 4 * (node + 0.5) ** 3) for node, weight in zip(nodes, weights, strict=True)]
    if objective.steps is not None:
        times = [(i / objective.steps, 1 / objective.steps) for i in range(1, objective.steps + 1)]
    for time, share in times:
        t = torch.tensor(time, dtype=torch.float64)
        level = rates.level(t, c_I)[x]
        for masked in world.subsets()[1:]:
            hit = torch.tensor([j in masked for j in range(world.L)])
            if time == 1 and not hit.all():
                continue  # at t = 1 all is masked
            q = torch.where(hit, level, 1 - level).prod()
            log_p = world.x_theta(hidden(world, x, masked)[None], float(t))[0, hit].log()
            total = total + share * q * objective.nats(rates, log_p, x[hit], t.expand(len(masked)), c_I).sum()
    return total


def test_one_power_for_all_does_not_move_the_continuous_bound() -> None:
    """Of a network that ignores time: it only changes when masks come, not which come together."""
    world = World.random(seed=7)
    x, log_k = world.texts[6], torch.zeros(1, dtype=torch.float64, requires_grad=True)
    for shift in (0.0, 0.8):
        nats = bound_by_k(world, TokenRates(rates="power"), x, (log_k + shift).expand(world.num_ids))
        assert float(nats.detach()) == pytest.approx(world.continuous_bound(x), rel=1e-9)
        assert float(torch.autograd.grad(nats, log_k)[0].abs()) < 1e-9


@pytest.mark.parametrize("steps", [3, None])
def test_the_gradient_of_k_is_the_bound_s(steps: int | None) -> None:
    """In the mean, with the masks' own dependence on k, without which it would be another."""
    world = World.random(seed=6, level=True)
    objective, net = rated(world, "power", steps=steps)
    rates, x = objective.process(net).rates, world.texts[3]
    assert isinstance(rates, Power)
    log_k_I = rates.log_k_I.detach().clone().requires_grad_()
    truth_nats = bound_by_k(world, objective, x, log_k_I)
    (truth,) = torch.autograd.grad(truth_nats, log_k_I)
    enumerated = continuous_bound(world, x, "power") if steps is None else step_bound(world, x, "power", steps)
    assert float(truth_nats.detach()) == pytest.approx(enumerated, rel=1e-6)
    found, direct = [], []
    for step in range(40):
        batch = make_batch(x.expand(500, -1), seed=1, step=step)
        (grad,) = torch.autograd.grad(objective.loss(net, batch).nats, rates.log_k_I)
        found.append(grad / 500)
        held = held_masks(objective, net, batch)
        direct.append(torch.autograd.grad(held, rates.log_k_I)[0] / 500)
    mean, error = torch.stack(found).mean(dim=0), torch.stack(found).std(dim=0) / math.sqrt(40)
    seen = truth.abs() > 1e-9
    assert ((mean - truth).abs()[seen] < 4 * error[seen]).all(), (mean, truth, error)
    assert ((torch.stack(direct).mean(dim=0) - truth).abs()[seen] > 8 * error[seen]).any()


def held_masks(objective: TokenRates, net: Network, batch: Batch) -> Tensor:
    """The loss whose gradient leaves the masks as they are: what a naive one would be."""
    h_ND, term, _, _ = objective._positions(net, batch)
    return term(net.head(h_ND), 0, len(h_ND)).sum()


def test_a_loss_is_the_mean_of_its_twins() -> None:
    world = World.random(seed=6)
    objective, net = rated(world, "power")
    batch = make_batch(world.texts.repeat(400, 1), seed=3, step=0)
    rows = objective.row_nats(net, batch)
    loss = objective.loss(net, batch)
    twin = dataclasses.replace(batch, key_B=fold(batch.key_B, DRAW_TWIN))
    both = rows.sum() + objective.row_nats(net, twin).sum()
    assert float(loss.nats.detach()) == pytest.approx(float(both) / 2)
    assert int(loss.tokens) == batch.x_BL.numel()


# --- the sampler ---


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_the_sampler_follows_the_chain(rates: str, steps: int) -> None:
    world = World.random(seed=4, level=True)
    objective, net = rated(world, rates)
    canvas = Canvas.blank(num=ROWS, length=world.L, mask_id=world.mask_id, seed=1)
    found = sample(net, canvas, samplers.TokenPosterior(steps=steps), objective=objective).tokens
    assert fits(world, found, chain_law(world, rates, steps)) > 1e-3
    if steps > 1:  # equal rates are another law, which as many texts tell apart
        assert fits(world, found, world.chain_law(objectives.MDLM().noise, steps)) < 1e-6
