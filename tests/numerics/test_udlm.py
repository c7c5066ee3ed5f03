"""Uniform-state diffusion by enumeration: divergences, bounds, their limits, and the law of the sampler."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from chains import World, fits
from uniform_worlds import chain_law, entropy_bound, flow_law, log_p, posteriors, product_law, step_bound

from unmask import objectives
from unmask.data.batch import Batch
from unmask.noise import Cosine, LogLinear, Noise
from unmask.objectives._uniform import step_divergence
from unmask.processes.base import q_posterior
from unmask.processes.uniform import Uniform
from unmask.rng import row_keys
from unmask.samplers import UniformPosterior
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

ROWS = 20_000


def assert_hits(world: World, objective: objectives.Objective, x: torch.Tensor, truth: float) -> None:
    """The mean of many estimates of one text lies within its standard error, which is small."""
    bound = objective.bound(world.denoiser(), x.expand(ROWS, -1), num_samples=1, seed=3)
    values = bound.draws_BS[:, 0]
    error = float(values.std()) / math.sqrt(ROWS)
    assert abs(float(values.mean()) - truth) < 4.5 * error
    assert error < 0.03 * truth


@pytest.mark.parametrize("mask_id", [0, 3])
@pytest.mark.parametrize(("s", "t"), [(0.0, 0.2), (0.0, 1.0), (0.3, 0.5), (0.6, 1.0)])
def test_the_divergence_is_that_of_the_general_posterior(mask_id: int, s: float, t: float) -> None:
    tokens = [v for v in range(4) if v != mask_id]
    pairs = torch.tensor(list(itertools.product(tokens, tokens)))
    z_N, x_N = pairs.T
    logits = torch.randn(len(pairs), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[:, mask_id] = -torch.inf
    log_p_NI = logits.log_softmax(dim=1)
    alpha_s, alpha_t = (torch.full((len(pairs),), 1 - time, dtype=torch.float64) for time in (s, t))
    pi_I = Uniform(LogLinear(), num_ids=4, mask_id=mask_id).pi(log_p_NI)
    q, p = (
        q_posterior(z_N, x_NI, alpha_s, alpha_t, pi_I)
        for x_NI in (torch.nn.functional.one_hot(x_N, 4).double(), log_p_NI.exp())
    )
    wanted = torch.where(q > 0, q * (q.log() - p.log()), 0.0).sum(dim=1)
    found = step_divergence(log_p_NI, z_N, x_N, 1 - alpha_s, 1 - alpha_t, mask_id)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("noise", [LogLinear(), Cosine()], ids=repr)
@pytest.mark.parametrize("level", [False, True], ids=["ignores level", "sees level"])
def test_the_step_form_equals_the_enumerated_bound(noise: Noise, level: bool) -> None:
    world = World.random(seed=2, level=level)
    x = world.texts[3]
    assert_hits(world, objectives.UDLM(noise=noise, steps=3), x, step_bound(world, x, noise, 3))


def x_bar(world: World):  # type: ignore[no-untyped-def]
    return lambda z, alpha: world.V * alpha * log_p(world, z, 1 - alpha).exp() + 1 - alpha


@pytest.mark.parametrize("noise", [LogLinear(), Cosine()], ids=repr)
def test_continuous_time_equals_the_quadrature(noise: Noise) -> None:
    world = World.random(seed=4, level=True)
    x = world.texts[6]
    assert_hits(world, objectives.UDLM(noise=noise), x, entropy_bound(world, x, noise, x_bar(world), nodes=24))


def test_steps_tend_to_continuous_time() -> None:
    world = World.random(seed=6)
    for x in world.texts[::5]:
        limit = entropy_bound(world, x, LogLinear(), x_bar(world), nodes=40)
        gaps = [abs(step_bound(world, x, LogLinear(), steps) - limit) for steps in (4, 32, 256)]
        assert gaps[2] < 0.01 * limit
        assert gaps[2] < gaps[0] / 8


@pytest.mark.parametrize("seed", range(3))
def test_bounds_lie_above_the_exact_likelihood(seed: int) -> None:
    world = World.random(seed=seed)
    noise = LogLinear()

    def moves(z: torch.Tensor, s: float, t: float) -> torch.Tensor:
        return posteriors(world, z, log_p(world, z, t).exp(), 1 - s, 1 - t)

    for steps in (1, 2, 5):
        law = chain_law(world, noise, steps, moves)
        assert float(law.sum()) == pytest.approx(1)
        for x in world.texts:
            assert step_bound(world, x, noise, steps) >= -math.log(law[world.index(x[None])]) - 1e-12


def test_the_continuous_bound_lies_above_the_master_equation() -> None:
    world = World.random(seed=8, level=True)
    law = flow_law(world, LogLinear(), x_bar(world))
    assert float(law.sum()) == pytest.approx(1, abs=1e-9)
    assert float(law.min()) > 0
    for x, p in zip(world.texts, law, strict=True):
        assert entropy_bound(world, x, LogLinear(), x_bar(world), nodes=24) >= -math.log(p) - 1e-3


def test_every_scored_position_is_scored_and_no_other() -> None:
    world = World.random(seed=1)
    x_BL = world.texts[:2]
    scored_BL = torch.tensor([[False, True, True]] * 2)
    key_B = row_keys(0, torch.arange(2))
    batch = Batch(x_BL, None, scored_BL, key_B, torch.tensor([0.4, 0.9], dtype=torch.float64))
    nats_BL = objectives.UDLM().position_nats(world.denoiser(), batch)
    assert bool((nats_BL[scored_BL] > 0).all())
    assert bool((nats_BL[~scored_BL] == 0).all())


def texts_of(world: World, sampler: UniformPosterior, canvas: Canvas) -> torch.Tensor:
    return sample(world.denoiser(), canvas, sampler, objective=objectives.UDLM(noise=Cosine())).tokens


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("mask_id", [1, 2])
def test_the_sampler_follows_the_enumerated_chain(steps: int, mask_id: int) -> None:
    """The noise is the model's, wherever the sampler was made."""
    world = World.random(seed=7, mask_id=mask_id, level=True)
    noise = Cosine()

    def moves(z: torch.Tensor, s: float, t: float) -> torch.Tensor:
        alpha_s, alpha_t = noise.alpha(torch.tensor([s, t], dtype=torch.float64)).tolist()
        return posteriors(world, z, log_p(world, z, 1 - alpha_t).exp(), alpha_s, alpha_t)

    law = chain_law(world, noise, steps, moves)
    canvas = Canvas.blank(num=ROWS, length=world.L, mask_id=mask_id, seed=5)
    assert fits(world, texts_of(world, UniformPosterior(steps=steps), canvas), law) > 1e-3


def test_what_is_given_stays_and_conditions_the_rest() -> None:
    """With a fixed token the chain is that of the other positions, given it."""
    world = World.random(seed=9)
    tokens = torch.full((ROWS, world.L), world.mask_id)
    tokens[:, 1] = 1
    found = texts_of(world, UniformPosterior(steps=2), Canvas.of(tokens, mask_id=world.mask_id, seed=2))
    assert bool((found[:, 1] == 1).all())
    noise, held = Cosine(), world.texts[world.texts[:, 1] == 1]
    law = torch.full((len(held),), 1 / len(held), dtype=torch.float64)
    for i in (2, 1):
        alpha_s, alpha_t = noise.alpha(torch.tensor([(i - 1) / 2, i / 2], dtype=torch.float64)).tolist()
        p = posteriors(world, held, log_p(world, held, 1 - alpha_t).exp(), alpha_s, alpha_t)
        p[:, 1] = torch.nn.functional.one_hot(torch.tensor(1), world.num_ids).double()
        law = law @ product_law(p, held)
    every = torch.zeros(len(world.states), dtype=torch.float64)
    every[world.index(held)] = law
    assert fits(world, found, every) > 1e-3


def test_temperature_and_cuts_act_on_x_theta() -> None:
    world = World.random(seed=3)
    canvas = Canvas.blank(num=64, length=world.L, mask_id=world.mask_id)
    likeliest = texts_of(world, UniformPosterior(steps=1, temperature=0.0), canvas)
    # in one step from t = 1 the posterior is x_theta itself
    start = Uniform(Cosine(), num_ids=world.num_ids, mask_id=world.mask_id)
    z = start.prior(canvas.key_B, canvas.open_BL, canvas.tokens)
    assert likeliest.equal(log_p(world, z, 1.0).argmax(dim=-1))
    assert texts_of(world, UniformPosterior(steps=1, top_k=1), canvas).equal(likeliest)


@pytest.mark.parametrize("steps", [2, 6])
def test_a_forbidden_token_leaves_the_law_of_the_others(steps: int) -> None:
    """The chain is that of x_theta given that the token is not it."""
    world = World.random(V=3, L=2, seed=12)
    canvas = dataclasses.replace(Canvas.blank(num=ROWS, length=world.L, mask_id=world.mask_id, seed=4), forbidden=(0,))
    noise = Cosine()

    def moves(z: torch.Tensor, s: float, t: float) -> torch.Tensor:
        alpha_s, alpha_t = noise.alpha(torch.tensor([s, t], dtype=torch.float64)).tolist()
        allowed = log_p(world, z, 1 - alpha_t).index_fill(2, torch.tensor([0]), -torch.inf).softmax(dim=-1)
        return posteriors(world, z, allowed, alpha_s, alpha_t)

    law = chain_law(world, noise, steps, moves)
    found = texts_of(world, UniformPosterior(steps=steps), canvas)
    assert bool((found != 0).all())
    assert fits(world, found, law) > 1e-3


def test_short_steps_are_accurate_in_float32() -> None:
    """With T = 100,000 a step's levels differ in the sixth digit: rounded to float32 first, a nat would be lost."""
    steps, generator = 100_000, torch.Generator().manual_seed(0)
    log_p_NI = (3 * torch.randn(500, 101, generator=generator, dtype=torch.float64)).log_softmax(dim=1)
    z_N, x_N = torch.randint(0, 100, (2, 500), generator=generator)
    step_N = torch.randint(1, steps, (500,), generator=generator).double()
    levels = step_N / steps, (step_N + 1) / steps
    exact, found = (steps * step_divergence(p, z_N, x_N, *levels, 100) for p in (log_p_NI, log_p_NI.float()))
    assert float((found - exact).abs().max()) < 0.3
