"""Score entropy by enumeration: its identity with MDLM, its bounds above the exact law, in both states."""

from __future__ import annotations

import math

import pytest
import torch
from chains import World, fits
from torch import Tensor
from uniform_worlds import chain_law, entropy_bound, flow_law

from unmask import objectives
from unmask.data.batch import make_batch
from unmask.noise import Cosine, LogLinear, Noise
from unmask.objectives.sedd import SEDD
from unmask.samplers import Ancestral, Euler, Tweedie
from unmask.samplers._chains import ChainSampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import begun, sample

ROWS = 20_000


@pytest.mark.parametrize("noise", [LogLinear(), Cosine()], ids=repr)
@pytest.mark.parametrize("mask_id", [0, 2])
def test_sedd_is_mdlm_and_the_price_of_not_normalising(noise: Noise, mask_id: int) -> None:
    """Term by term: the same rows, times and masks."""
    world = World.random(seed=3, mask_id=mask_id, level=True)
    batch = make_batch(world.texts.repeat(16, 1), seed=1, step=0)
    sedd, net = SEDD(noise=noise), world.denoiser()
    price = sedd.price(net, batch)
    assert bool((price >= 0).all())
    assert float(price.sum()) > 0
    mdlm = objectives.MDLM(noise=noise).row_nats(net, batch)
    torch.testing.assert_close(sedd.row_nats(net, batch), mdlm + price, rtol=1e-9, atol=1e-12)


def normalised(world: World, shift: float = 0.0) -> World:
    """The same table with Σ_{v≠m} e^l = V everywhere, as a network that has learned to be normalised."""
    logits = world.logits.clone()
    logits[..., world.mask_id] = -torch.inf
    logits = logits.log_softmax(dim=-1) + math.log(world.V) + shift
    logits[..., world.mask_id] = 0.3  # nobody looks
    return World(world.V, world.L, world.mask_id, logits)


def test_normalised_it_costs_nothing_more() -> None:
    world = normalised(World.random(seed=5))
    batch = make_batch(world.texts, seed=0, step=2)
    assert float(SEDD().price(world.denoiser(), batch).abs().max()) < 1e-12
    uniform, udlm = SEDD(state="uniform"), objectives.UDLM()
    torch.testing.assert_close(
        uniform.row_nats(world.denoiser(), batch), udlm.row_nats(world.denoiser(), batch), rtol=1e-9, atol=1e-12
    )


def jump_law(world: World) -> Tensor:
    """[texts] of the reverse process with absorbing states, exactly: for a network that ignores time its clock does not
    matter, so a masked position l becomes v next with probability e^{l_v} / Σ_masked Σ_v e^{l_v}."""
    rate = world.logits.exp()
    rate[..., world.mask_id] = 0
    states = world.states
    law = torch.zeros(len(states), dtype=torch.float64)
    law[world.index(torch.full((1, world.L), world.mask_id))] = 1
    for masks in range(world.L, 0, -1):
        for index in ((states == world.mask_id).sum(dim=1) == masks).nonzero().flatten().tolist():
            z = states[index]
            masked = (z == world.mask_id).nonzero().flatten().tolist()
            whole = sum(float(rate[index, position].sum()) for position in masked)
            for position in masked:
                for v in range(world.num_ids):
                    after = z.clone()
                    after[position] = v
                    law[world.index(after[None])] += law[index] * float(rate[index, position, v]) / whole
    return law[world.index(world.texts)]


def absorbing_bound(world: World, x: Tensor) -> float:
    """Σ over masked sets of the count form's weight times [Z - l_x + log V - 1]."""
    total = 0.0
    for masked in world.subsets()[1:]:
        z, n = x.clone(), len(masked)
        z[list(masked)] = world.mask_id
        logits = world.f(z[None], torch.zeros(1))[0]
        for position in masked:
            l = [float(logits[position, v]) for v in range(world.num_ids) if v != world.mask_id]  # noqa: E741
            bracket = sum(map(math.exp, l)) / world.V - float(logits[position, x[position]]) + math.log(world.V) - 1
            total += bracket / (n * math.comb(world.L, n))
    return total


@pytest.mark.parametrize("seed", range(4))
def test_the_absorbing_bound_lies_above_the_master_equation(seed: int) -> None:
    world = World.random(seed=seed)
    law = jump_law(world)
    assert float(law.sum()) == pytest.approx(1)
    for x, p in zip(world.texts, law, strict=True):
        assert absorbing_bound(world, x) >= -math.log(p) - 1e-12


def test_the_estimate_hits_the_enumerated_bound() -> None:
    world = World.random(seed=2)
    for x in world.texts[2:4]:
        values = SEDD().bound(world.denoiser(), x.expand(ROWS, -1), num_samples=1, seed=5).draws_BS[:, 0]
        error = float(values.std()) / math.sqrt(ROWS)
        assert abs(float(values.mean()) - absorbing_bound(world, x)) < 4.5 * error


def y(world: World):  # type: ignore[no-untyped-def]
    def of(z: Tensor, alpha: float) -> Tensor:
        level_B = torch.full((len(z),), 1 - alpha, dtype=torch.float64)
        return alpha * world.f(z, level_B).exp() + 1 - alpha

    return of


def test_the_uniform_bound_by_quadrature_and_above_the_master_equation() -> None:
    world = World.random(seed=6, level=True)
    noise = LogLinear()
    law = flow_law(world, noise, y(world))
    assert float(law.sum()) == pytest.approx(1, abs=1e-9)
    for x, p in zip(world.texts, law, strict=True):
        assert entropy_bound(world, x, noise, y(world), nodes=24) >= -math.log(p) - 1e-3
    x = world.texts[5]
    values = SEDD(state="uniform").bound(world.denoiser(), x.expand(ROWS, -1), num_samples=1).draws_BS[:, 0]
    error = float(values.std()) / math.sqrt(ROWS)
    assert abs(float(values.mean()) - entropy_bound(world, x, noise, y(world), nodes=24)) < 4.5 * error


# --- samplers ---


def absorbing_chain(world: World, noise: Noise, steps: int, cls: type[ChainSampler]) -> Tensor:
    """[states] the law of the T-step chain, written out: each masked position opens by itself."""
    z = world.states
    law = torch.zeros(len(z), dtype=torch.float64)
    law[world.index(torch.full((1, world.L), world.mask_id))] = 1
    for i in range(steps, 0, -1):
        s, t = (torch.tensor(k / steps, dtype=torch.float64) for k in (i - 1, i))
        level_B = noise.level(t).expand(len(z))
        p = world.f(z, level_B).exp() / world.V
        p[..., world.mask_id] = 0
        rate = (noise.alpha(s) - noise.alpha(t)) / noise.level(t) if cls is Tweedie else (t - s) * noise.weight(t)
        opening = (rate * p.sum(dim=-1)).clamp(max=1) if i > 1 else torch.ones(p.shape[:2], dtype=torch.float64)
        q = p / p.sum(dim=-1, keepdim=True) * opening[..., None]
        q[..., world.mask_id] = 1 - opening
        visible = z != world.mask_id
        q[visible] = torch.nn.functional.one_hot(z[visible], world.num_ids).double()
        move = torch.ones(len(z), len(z), dtype=torch.float64)
        for position in range(world.L):
            move *= q[:, position][:, z[:, position]]
        law = law @ move
    return law


@pytest.mark.parametrize("cls", [Tweedie, Euler])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_absorbing_samplers_follow_their_chain(cls: type[ChainSampler], steps: int) -> None:
    world, noise = World.random(seed=4, level=True), Cosine()
    canvas = Canvas.blank(num=ROWS, length=world.L, mask_id=world.mask_id, seed=1)
    found = sample(world.denoiser(), canvas, cls(steps=steps), objective=SEDD(noise=noise)).tokens
    assert fits(world, found, absorbing_chain(world, noise, steps, cls)) > 1e-3


def test_of_a_normalised_network_tweedie_is_ancestral() -> None:
    world = normalised(World.random(seed=8))
    tweedie, ancestral = absorbing_chain(world, LogLinear(), 4, Tweedie), world.chain_law(LogLinear(), 4)
    torch.testing.assert_close(tweedie, ancestral)
    canvas = Canvas.blank(num=ROWS, length=world.L, mask_id=world.mask_id, seed=9)
    assert fits(world, sample(world.denoiser(), canvas, Ancestral(steps=4)).tokens, tweedie) > 1e-3


def uniform_moves(world: World, noise: Noise, cls: type[ChainSampler]):  # type: ignore[no-untyped-def]
    """The analytic and the Euler step in uniform states, entry by entry, clipped and renormalised."""

    def moves(z: Tensor, s: float, t: float) -> Tensor:
        alpha_s, alpha_t = noise.alpha(torch.tensor([s, t], dtype=torch.float64)).clamp(min=1e-12).tolist()
        score = y(world)(z, alpha_t)
        score = score / score.gather(2, z[..., None])
        score[..., world.mask_id] = 0
        at_z = torch.nn.functional.one_hot(z, world.num_ids).double()
        if cls is Tweedie:
            e = alpha_t / alpha_s
            p = (score / e - (1 - e) / (world.V * e) * score.sum(dim=-1, keepdim=True)) * ((1 - e) / world.V + e * at_z)
            p[..., world.mask_id] = 0
            p = p.clamp(min=0)
        else:
            time = torch.tensor(t, dtype=torch.float64)
            p = (t - s) * float(-noise.dalpha(time)) / (world.V * alpha_t) * score * (1 - at_z)
            p = p / p.sum(dim=-1, keepdim=True).clamp(min=1)
            p = p + at_z * (1 - p.sum(dim=-1, keepdim=True))
        return p / p.sum(dim=-1, keepdim=True)

    return moves


@pytest.mark.parametrize("cls", [Tweedie, Euler])
@pytest.mark.parametrize("steps", [2, 5])
def test_uniform_samplers_follow_their_chain(cls: type[ChainSampler], steps: int) -> None:
    world, noise = World.random(seed=4), LogLinear()
    canvas = Canvas.blank(num=ROWS, length=world.L, mask_id=world.mask_id, seed=2)
    found = sample(world.denoiser(), canvas, cls(steps=steps), objective=SEDD(state="uniform", noise=noise)).tokens
    assert fits(world, found, chain_law(world, noise, steps, uniform_moves(world, noise, cls))) > 1e-3


@pytest.mark.parametrize("cls", [Tweedie, Euler])
def test_with_many_steps_they_tend_to_the_master_equation(cls: type[ChainSampler]) -> None:
    world, noise = World.random(seed=6), LogLinear()
    law = flow_law(world, noise, y(world))
    gaps = []
    for steps in (8, 64):
        chain = chain_law(world, noise, steps, uniform_moves(world, noise, cls))[world.index(world.texts)]
        gaps.append(float((chain - law).abs().sum()))
    assert gaps[1] < gaps[0] / 3
    assert gaps[1] < 0.05


@pytest.mark.parametrize("shift", [2.0, 0.0])
def test_clips_are_counted(shift: float) -> None:
    """Z = e^2 > 1 opens faster than a step allows; a normalised network never does."""
    world = normalised(World.random(seed=5), shift=shift)
    predictor, sampler = SEDD().predictor(world.denoiser()), Tweedie(steps=2, state="absorbing")
    run = sampler.start(begun(predictor, Canvas.blank(num=50, length=world.L, mask_id=world.mask_id)))
    while (query := sampler.ask(run)) is not None:
        sampler.tell(run, predictor(query))
    assert (run.clips > 0) == (shift > 0)
