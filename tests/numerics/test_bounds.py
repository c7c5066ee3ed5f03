"""Bounds by full enumeration: estimators hit them in the mean, and they lie above the exact -log p (MATH 6.1, 6.5)."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from chains import World, random_order_law

from unmask import objectives
from unmask.data.batch import Batch, make_batch
from unmask.denoisers.dit import DiT
from unmask.errors import UsageError
from unmask.noise import Cosine, CosineSquared, Geometric, Linear, LogLinear, Noise, Polynomial
from unmask.objectives.terms import d3pm_nats, step_weight
from unmask.processes.absorbing import Absorbing
from unmask.rng import row_keys

ROWS = 20_000
NOISES = [LogLinear(), Cosine(), CosineSquared(), Linear(), Geometric(), Polynomial(power=2.0)]


def estimate(world: World, objective: objectives.MDLM, x: torch.Tensor, estimator: str) -> tuple[float, float]:
    """Mean and standard error of many independent estimates for one text."""
    bound = objective.bound(world.denoiser(), x.expand(ROWS, -1), estimator=estimator, num_samples=1, seed=11)
    values = bound.draws_BS[:, 0]
    return float(values.mean()), float(values.std()) / math.sqrt(ROWS)


def assert_hits(world: World, objective: objectives.MDLM, x: torch.Tensor, estimator: str, truth: float) -> None:
    mean, error = estimate(world, objective, x, estimator)
    assert abs(mean - truth) < 4.5 * error, (mean, truth, error)
    # A test with wide error bars could not fail; the time form's weight 1/t has the heaviest tail of the three.
    assert error < (0.04 if estimator == "time" else 0.02) * truth


@pytest.mark.parametrize("mask_id", [0, 2])
def test_count_and_continuous_forms_equal_the_enumerated_bound(mask_id: int) -> None:
    world = World.random(mask_id=mask_id)
    for x in world.texts[:3]:
        truth = world.continuous_bound(x)
        assert truth == pytest.approx(world.count_bound(x), rel=1e-10)
        assert_hits(world, objectives.MDLM(), x, "count", truth)
        assert_hits(world, objectives.MDLM(), x, "time", truth)


@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_continuous_bound_does_not_depend_on_the_schedule(noise: Noise) -> None:
    world = World.random(V=3, L=3, seed=1)
    x = world.texts[5]
    assert_hits(world, objectives.MDLM(noise=noise), x, "time", world.continuous_bound(x))


@pytest.mark.parametrize("noise", NOISES, ids=repr)
@pytest.mark.parametrize("level", [False, True], ids=["ignores level", "sees level"])
def test_step_form_equals_the_enumerated_bound(noise: Noise, level: bool) -> None:
    world = World.random(seed=2, level=level)
    x = world.texts[3]
    assert_hits(world, objectives.MDLM(noise=noise, steps=3), x, "T=3", world.step_bound(x, noise, 3))


def test_conditioned_continuous_bound() -> None:
    world = World.random(seed=4, level=True)
    x = world.texts[6]
    for noise in (LogLinear(), Cosine()):
        assert_hits(world, objectives.MDLM(noise=noise), x, "time", world.continuous_bound(x))
    with pytest.raises(UsageError, match="ignores the noise level"):
        objectives.MDLM().bound(world.denoiser(), x[None], estimator="count")


@pytest.mark.parametrize("noise", [LogLinear(), Cosine()], ids=repr)
def test_d3pm_equals_the_brute_force_bound(noise: Noise) -> None:
    world = World.random(seed=5)
    x = world.texts[4]
    assert_hits(world, objectives.D3PM(noise=noise, steps=3), x, "T=3", world.d3pm_bound(x, noise, 3))


def test_step_bound_tends_to_continuous_time() -> None:
    world = World.random(seed=6)
    for x in world.texts[::3]:
        gaps = [abs(world.step_bound(x, Cosine(), T) - world.continuous_bound(x)) for T in (8, 64, 512)]
        assert gaps[2] < 0.02 * world.continuous_bound(x)
        assert gaps[2] < gaps[0] / 8


@pytest.mark.parametrize("seed", range(4))
def test_bounds_lie_above_the_exact_likelihood(seed: int) -> None:
    world = World.random(V=2, L=3, seed=seed)
    log_p_inf = random_order_law(world).log()
    for steps in (1, 2, 5):
        log_p = world.chain_law(LogLinear(), steps).log()
        for x in world.texts:
            assert world.step_bound(x, LogLinear(), steps) >= -log_p[world.index(x[None])].item() - 1e-12
    for x in world.texts:
        assert world.continuous_bound(x) >= -log_p_inf[world.index(x[None])].item() - 1e-12


def test_d3pm_bound_lies_above_the_exact_likelihood() -> None:
    world = World.random(seed=7)
    law = world.chain_law(LogLinear(), 3, zero_masking=False)
    p0 = world.x_theta(world.states, 0.0, zero_masking=False, carry_over=False)
    for x in world.texts:
        p_x = (law * p0[:, torch.arange(world.L), x].prod(dim=1)).sum()
        assert world.d3pm_bound(x, LogLinear(), 3) >= -math.log(p_x) - 1e-12


def test_d3pm_with_both_switches_is_mdlm_term_by_term() -> None:
    log_p = -torch.rand(50).double() * 5
    level_t = torch.rand(50).double()
    level_s = level_t * torch.rand(50).double()
    torch.testing.assert_close(
        d3pm_nats(log_p, torch.zeros(50).double(), level_s, level_t), -step_weight(level_s, level_t) * log_p
    )
    world = World.random(seed=8)
    batch = make_batch(world.texts, seed=0, step=0)
    both = objectives.D3PM(steps=7, carry_over=True, zero_masking=True)
    rows = both.row_nats(world.denoiser(), batch)
    torch.testing.assert_close(rows, objectives.MDLM(steps=7).row_nats(world.denoiser(), batch), rtol=1e-12, atol=0)


def test_d3pm_first_step_is_finite() -> None:
    """At s=0 the last bracket has weight 0 and value 0, not NaN, and its gradient is finite too."""
    log_p = torch.tensor([-1.0], requires_grad=True)
    p_mask = torch.tensor([0.5], requires_grad=True)
    nats = d3pm_nats(log_p, p_mask, torch.tensor([0.0]), torch.tensor([0.2]))
    nats.sum().backward()
    assert torch.isfinite(nats).all()
    assert p_mask.grad is not None
    assert torch.isfinite(p_mask.grad).all()
    tiny = d3pm_nats(torch.tensor([-1.0]), torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1e-9]))
    assert torch.isfinite(tiny).all()  # in float32, where 1 - alpha would be 0


def test_d3pm_short_steps_are_accurate_in_float32() -> None:
    """Levels that differ in the seventh digit are subtracted before they are rounded."""
    network = DiT(hidden=8, blocks=1, heads=2, conditioning="none").build(num_ids=5, mask_id=4)
    torch.nn.init.normal_(network.output.weight, generator=torch.Generator().manual_seed(0))
    batch = make_batch(torch.arange(64).view(8, 8) % 4, seed=0, step=0)
    found, exact = (objectives.D3PM(steps=10**6).row_nats(net, batch) for net in (network, deepcopy(network).double()))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("zero_masking", [True, False])
@pytest.mark.parametrize("carry_over", [True, False])
def test_each_switch_alone(zero_masking: bool, carry_over: bool) -> None:
    """Each row's estimate equals the equations written out for that draw of masks."""
    world = World.random(seed=9)
    objective = objectives.MDLM(steps=4, zero_masking=zero_masking, carry_over=carry_over)
    batch = make_batch(world.texts, seed=1, step=2)
    noised = objective.noised(batch, Absorbing(objective.noise, num_ids=world.mask_id + 1, mask_id=world.mask_id))
    got = objective.row_nats(world.denoiser(), batch)
    for b, x in enumerate(world.texts):
        i = math.ceil(float(batch.time_B[b]) * 4)
        alpha_s, alpha_t = 1 - (i - 1) / 4, 1 - i / 4
        p = world.x_theta(noised.z_BL[b : b + 1], 1 - alpha_t, zero_masking=zero_masking, carry_over=False)[0]
        want = 0.0
        for j in noised.masked_BL[b].nonzero().flatten().tolist():
            a = float(p[j, world.mask_id])
            at_t = math.log(alpha_t * a / (1 - alpha_t) + 1)
            at_s = math.log(alpha_s * a / (1 - alpha_s) + 1) if alpha_s < 1 else 0.0
            opens, stays = (alpha_s - alpha_t) / (1 - alpha_t), (1 - alpha_s) / (1 - alpha_t)
            want += 4 * (opens * (at_t - math.log(p[j, x[j]])) + stays * (at_t - at_s))
        if not carry_over:
            p0 = world.x_theta(x[None], 0.0, zero_masking=zero_masking, carry_over=False)[0]
            want -= sum(math.log(p0[j, x[j]]) for j in range(world.L))
        assert float(got[b]) == pytest.approx(want, rel=1e-6)


def test_prompts_and_padding_are_neither_noised_nor_scored() -> None:
    """The bound of a row with a prompt is that of the rest, given the prompt."""
    world = World.random(V=2, L=3, seed=10)
    x = world.texts[5]
    valid, prefix = torch.tensor([3]), torch.tensor([1])
    batch = make_batch(x[None], valid, prefix, seed=0, step=0)
    assert batch.scored_BL.tolist() == [[False, True, True]]
    scored = batch.scored_BL.expand(ROWS, -1)
    draws = objectives.MDLM().bound(
        world.denoiser(), x.expand(ROWS, -1), scored_BL=scored, num_samples=1, estimator="count"
    )
    truth = 0.0
    for masked in [(1,), (2,), (1, 2)]:
        truth += world.masked_loss(x, masked, 0.0) / (len(masked) * math.comb(2, len(masked)))
    values = draws.draws_BS[:, 0]
    assert abs(values.mean() - truth) < 4.5 * values.std() / math.sqrt(ROWS)
    assert draws.tokens_B[0] == 2


def test_masking_rate_is_the_level_and_positions_are_independent() -> None:
    x = torch.zeros(50_000, 2, dtype=torch.long)
    time = torch.full((50_000,), 0.3, dtype=torch.float64)
    ones = torch.ones_like(x, dtype=torch.bool)
    batch = Batch(x, None, ones, row_keys(2, torch.arange(50_000)), time)
    for noise in NOISES:
        masked = objectives.MDLM(noise=noise).noised(batch, Absorbing(noise, num_ids=2, mask_id=1)).masked_BL.double()
        level = float(noise.level(torch.tensor(0.3, dtype=torch.float64)))
        assert masked.mean().item() == pytest.approx(level, abs=4.5 * math.sqrt(level * (1 - level) / 100_000))
        both = (masked[:, 0] * masked[:, 1]).mean().item()
        assert both == pytest.approx(level**2, abs=4.5 * math.sqrt(level**2 * (1 - level**2) / 50_000))


def test_interval_covers_the_truth_at_its_rate() -> None:
    """95% intervals of small evaluations, repeated: they hold the exact bound in about 95% of the cases."""
    world = World.random(seed=12)
    x = world.texts[torch.arange(8).repeat(5)]
    truth = sum(world.continuous_bound(t) for t in x) / x.numel()
    hits = 0
    for seed in range(100):
        lo, hi = objectives.MDLM().bound(world.denoiser(), x, seed=seed, num_samples=4).ci95
        hits += lo <= truth <= hi
    # The interval is also over texts as a sample; these are fixed, so it may cover more often, never much less.
    assert hits >= 90
    one = world.texts[2:3]
    assert math.isnan(objectives.MDLM().bound(world.denoiser(), one, num_samples=1).standard_error)
    truth = world.continuous_bound(one[0]) / world.L
    hits = 0
    for seed in range(100):
        lo, hi = objectives.MDLM().bound(world.denoiser(), one, seed=seed, num_samples=32).ci95
        hits += lo <= truth <= hi
    assert 86 <= hits <= 99
