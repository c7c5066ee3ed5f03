"""A learned schedule: the bound stands still, the variance of its estimate falls; by enumeration and quadrature."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from chains import World
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from learned_power import LearnedPower

from unmask.data.batch import make_batch
from unmask.denoisers.network import Network
from unmask.noise.learned import LearnedNoise
from unmask.noise.table import LearnedTable, Table
from unmask.objectives.mdlm import MDLM
from unmask.objectives.terms import variance_gradient

BINS = 6


def learned(world: World, noise: Table | LearnedPower) -> tuple[MDLM, Network, LearnedNoise]:
    objective, net = MDLM(noise=noise), world.denoiser()
    objective.attach(net)
    assert net.objective is not None
    return objective, net, cast(LearnedNoise, net.objective.noise).double()


def moved_table() -> LearnedTable:
    table = LearnedTable(BINS).double()
    with torch.no_grad():
        table.logits += torch.tensor([0.6, -0.5, 0.2, 0.9, -1.1, 0.3], dtype=torch.float64)
    return table


def moved_powers() -> LearnedNoise:
    return LearnedPower(low=1.5, high=2.5).build().double()


def nodes(noise: LearnedNoise) -> tuple[Tensor, Tensor]:
    """Times and weights of a quadrature of (0, 1), piece by piece where a table's slope jumps, and thick near 0."""
    ends = (
        noise._ends(torch.zeros((), dtype=torch.float64))[1]
        if isinstance(noise, LearnedTable)
        else torch.tensor([0, 1])
    )
    at, weight = (torch.from_numpy(part) / 2 for part in np.polynomial.legendre.leggauss(60))
    at = at + 0.5
    width = ends.detach().double().diff()[:, None]
    # t = width v^8 in the first piece, where the loss rises like a root
    times = [width[0] * at**8, *(low + each * at for low, each in zip(ends.detach()[1:], width[1:], strict=False))]
    shares = [width[0] * weight * 8 * at**7, *(each * weight for each in width[1:])]
    return torch.cat(times), torch.cat(shares)


def at_rates(noise: LearnedNoise, moment: Callable[[Tensor], Tensor], world: World, x: Tensor) -> Tensor:
    """E moment(nats) over times and masks, with autograd's gradient: the rates are held, their density moves.

    E g(nats) = ∫ p(l) E g(f / (l p(l))) dl with 1 / p = l'(t(l)), t(l) found by Newton's step from the drawn time.
    """
    t, share = nodes(noise)
    level, slope = (each.detach() for each in (noise.level(t), -noise.dalpha(t)))
    t = t - (noise.level(t) - level) / slope  # t(l), to first order in the parameters
    r = -noise.dalpha(t)  # 1 / p(l)
    total = torch.zeros((), dtype=torch.float64)
    for masked in world.subsets()[1:]:
        n = len(masked)
        chance = level**n * (1 - level) ** (world.L - n)
        f = masked_losses(world, x, masked, level)
        total = total + (share * slope / r * chance * moment(r / level * f)).sum()  # share x slope = dl
    return total


def masked_losses(world: World, x: Tensor, masked: tuple[int, ...], level: Tensor) -> Tensor:
    """`World.masked_loss` at many levels."""
    z = x.clone()
    z[list(masked)] = world.mask_id
    logits = world.f(z.expand(len(level), -1), level).index_fill(2, torch.tensor([world.mask_id]), -torch.inf)
    nats = -logits.log_softmax(dim=-1)[:, torch.arange(world.L), x]
    return nats[:, list(masked)].sum(dim=1)


def parameters(noise: LearnedNoise) -> list[Tensor]:
    return list(noise.parameters())


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("make", [moved_table, moved_powers])
def test_the_bound_does_not_depend_on_the_schedule(make: Callable[[], LearnedNoise], conditioned: bool) -> None:
    world = World.random(seed=4, level=conditioned)
    noise, x = make(), world.texts[5]
    mean = at_rates(noise, lambda nats: nats, world, x)
    assert float(mean.detach()) == pytest.approx(world.continuous_bound(x), rel=1e-6)
    for gradient in torch.autograd.grad(mean, parameters(noise)):
        assert float(gradient.abs().max()) < 1e-9
    for gradient in torch.autograd.grad(at_rates(noise, torch.square, world, x), parameters(noise)):
        assert float(gradient.abs().max()) > 0.1  # the second moment does


@pytest.mark.parametrize("make", [moved_table, moved_powers])
def test_the_second_moment_has_this_gradient(make: Callable[[], LearnedNoise]) -> None:
    """`variance_gradient` in the mean over times and masks, against differences of the enumerated second moment."""
    world = World.random(seed=4, level=True)
    noise, x = make(), world.texts[5]
    t, share = nodes(noise)
    level, weight = noise.level(t).detach(), noise.weight(t).detach()
    total = torch.zeros((), dtype=torch.float64)
    for masked in world.subsets()[1:]:
        n = len(masked)
        f = masked_losses(world, x, masked, level)
        chance = share * level**n * (1 - level) ** (world.L - n)
        total = total + variance_gradient(noise, t, chance.sqrt() * weight * f)
    assert float(total.detach()) == 0
    found = torch.autograd.grad(total, parameters(noise))
    for parameter, gradient in zip(parameters(noise), found, strict=True):
        for i in range(len(parameter)):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    parameter[i] += step
                    values.append(second_moment(noise, world, x))
                    parameter[i] -= step
            assert float(gradient[i]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=5e-4, abs=1e-6)


def second_moment(noise: LearnedNoise, world: World, x: Tensor) -> float:
    """∫ E nats² dt, as it is drawn: at times, with no rate held."""
    t, share = nodes(noise)
    level, weight = noise.level(t).detach(), noise.weight(t).detach()
    total = 0.0
    for masked in world.subsets()[1:]:
        n = len(masked)
        f = masked_losses(world, x, masked, level)
        total += float((share * level**n * (1 - level) ** (world.L - n) * (weight * f) ** 2).sum())
    return total


def test_a_loss_has_it_and_gives_the_network_its_own() -> None:
    """The objective's gradient is the equation's of its rows' nats; the network's is that of fixed weights."""
    world = World.random(seed=4)
    world.logits.requires_grad_()
    objective, net, noise = learned(world, Table(bins=BINS))
    batch = make_batch(world.texts.repeat(30, 1), seed=1, step=2)
    loss = objective.loss(net, batch)
    rows = objective.row_nats(net, batch)
    assert float(loss.nats.detach()) == pytest.approx(float(rows.sum()))
    scaled = rows / math.sqrt(world.L) / math.log(world.num_ids)
    expected = torch.autograd.grad(variance_gradient(noise, batch.time_B, scaled), parameters(noise))
    found = torch.autograd.grad(loss.nats, [*parameters(noise), world.logits], retain_graph=True)
    torch.testing.assert_close(found[:-1], expected)
    held = MDLM(noise=Held(noise))
    (plain,) = torch.autograd.grad(held.loss(world.denoiser(), batch).nats, world.logits)
    torch.testing.assert_close(found[-1], plain)


class Held(Table):
    """The same schedule without parameters."""

    def __init__(self, noise: LearnedNoise) -> None:
        object.__setattr__(self, "noise", noise)

    def __getattribute__(self, name: str) -> object:
        if name in ("alpha", "dalpha", "inverse", "level"):
            return lambda t: getattr(object.__getattribute__(self, "noise"), name)(t).detach()
        return (lambda: None) if name == "build" else object.__getattribute__(self, name)


def test_a_table_is_a_schedule() -> None:
    table = moved_table()
    t = torch.linspace(0, 1, 997, dtype=torch.float64)
    alpha = table.alpha(t).detach()
    assert alpha[[0, -1]].tolist() == [1.0, 0.0]
    assert (alpha.diff() < 0).all()
    torch.testing.assert_close(table.inverse(alpha).detach(), t, rtol=0, atol=1e-9)
    for low in (1e-12, 1e-6):  # small rates keep their digits
        one, two = table.level(torch.tensor([low, 2 * low], dtype=torch.float64)).tolist()
        assert two / one == pytest.approx(4, rel=1e-9)
    inner = t[1:-1].clone().requires_grad_()
    (slope,) = torch.autograd.grad(table.alpha(inner).sum(), inner)
    torch.testing.assert_close(slope, table.dalpha(inner))
    start = Table(bins=16)
    ends = torch.arange(17, dtype=torch.float64) / 16
    torch.testing.assert_close(start.alpha(ends), 1 - ends, rtol=0, atol=1e-6)


def steep_world() -> tuple[World, Tensor]:
    """A token of the text costs the more, the fewer of its neighbours are seen."""
    world = World.random(V=2, L=4)
    nats = 2.5 * ((world.states == world.mask_id).double().mean(dim=1)[:, None]) ** 4 + 0.01
    world.logits[..., 0] = -nats
    world.logits[..., 1] = torch.log(-torch.expm1(-nats))
    return world, torch.zeros(4, dtype=torch.long)


def test_training_it_lowers_the_variance_to_nearly_the_least_there_is() -> None:
    """And below the log-linear schedule's, by as many draws; the bound is where it was."""
    world, x = steep_world()
    objective, net, noise = learned(world, Table(bins=BINS))
    optimizer = torch.optim.Adam(noise.parameters(), lr=0.05)
    before = second_moment(noise, world, x)
    for step in range(300):
        batch = make_batch(x.expand(64, -1), seed=0, step=step)
        optimizer.zero_grad()
        objective.loss(net, batch).nats.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = second_moment(noise, world, x)
    # ∫ g / (l² p) dl over all densities p is least at p ∝ √g / l, where it is (∫ √g / l dl)²
    at, weight = (torch.from_numpy(part) / 2 for part in np.polynomial.legendre.leggauss(200))
    root = at + 0.5  # l = root²
    g = torch.zeros_like(root)
    for masked in world.subsets()[1:]:
        n = len(masked)
        g += root ** (2 * n) * (1 - root**2) ** (world.L - n) * world.masked_loss(x, masked, 0.0) ** 2
    least = float((weight * 2 / root * g.sqrt()).sum() ** 2)
    assert least < after < before
    assert after - least < 0.3 * (before - least), (before, after, least)
    draws = {
        name: each.bound(net if each is objective else world.denoiser(), x.expand(20_000, -1), **HOW).draws_BS[:, 0]
        for name, each in (("learned", objective), ("log-linear", MDLM()))
    }
    assert float(draws["learned"].var()) < 0.8 * float(draws["log-linear"].var())
    truth = world.count_bound(x)
    error = float(draws["learned"].std()) / math.sqrt(20_000)
    assert abs(float(draws["learned"].mean()) - truth) < 4.5 * error
    exact = MDLM(form="count").bound(net, x.expand(20_000, -1), seed=3, num_samples=1).draws_BS
    assert float(exact.mean()) == pytest.approx(truth, rel=0.01)


HOW = {"seed": 3, "num_samples": 1, "estimator": "time"}
