"""Samplers follow the laws they claim, by chi-square against enumeration (MATH 6.3, 6.4)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from chains import World, data_world, fits, random_order_law

from unmask import objectives, samplers
from unmask.denoisers.network import as_denoiser
from unmask.errors import UsageError
from unmask.noise import Cosine, LogLinear, Noise, Polynomial
from unmask.samplers import Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample, steps

NUM = 30_000
P_MIN = 1e-4


def draw(world: World, sampler: Sampler, objective: objectives.Objective | None = None, num: int = NUM) -> torch.Tensor:
    canvas = Canvas.blank(num=num, length=world.L, mask_id=world.mask_id, seed=5)
    return sample(world.denoiser(), canvas, sampler, objective=objective).tokens


@pytest.mark.parametrize("noise", [LogLinear(), Cosine(), Polynomial(power=2.0)], ids=repr)
@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("level", [False, True], ids=["ignores level", "sees level"])
def test_planned_sampler_has_the_chains_law(noise: Noise, num_steps: int, level: bool) -> None:
    world = World.random(seed=1, level=level)
    tokens = draw(world, samplers.Ancestral(steps=num_steps, noise=noise))
    assert fits(world, tokens, world.chain_law(noise, num_steps)) > P_MIN


def test_the_test_would_notice_another_law() -> None:
    """The chains of 1 and 4 steps are told apart with this many draws."""
    world = World.random(seed=1)
    tokens = draw(world, samplers.Ancestral(steps=4))
    assert fits(world, tokens, world.chain_law(LogLinear(), 1)) < 1e-8


@pytest.mark.parametrize("noise", [LogLinear(), Cosine()], ids=repr)
def test_textbook_sampler_has_the_same_law(noise: Noise) -> None:
    world = World.random(seed=2, mask_id=1)
    tokens = draw(world, samplers.Posterior(steps=3, noise=noise))
    assert fits(world, tokens, world.chain_law(noise, 3)) > P_MIN


def test_posterior_sampler_without_subs() -> None:
    """The mask may be predicted: the chain ends with masks, which x_theta at t=0, without the mask, then fills."""
    world = World.random(seed=3)
    law = world.chain_law(LogLinear(), 3, zero_masking=False)
    p0 = world.x_theta(world.states, 0.0)
    final = torch.zeros_like(law)
    for i, x in enumerate(world.states):
        final[i] = (law * p0[:, torch.arange(world.L), x].prod(dim=1)).sum()
    objective = objectives.D3PM(steps=3)
    tokens = draw(world, samplers.Posterior(steps=3), objective)
    assert fits(world, tokens, final) > P_MIN
    with pytest.raises(UsageError, match="posterior"):
        draw(world, samplers.Ancestral(steps=3), objective, num=1)


def test_infinite_steps_is_a_random_order() -> None:
    world = World.random(V=3, L=3, seed=4)
    tokens = draw(world, samplers.Ancestral(steps=None))
    assert fits(world, tokens, random_order_law(world)) > P_MIN


def test_infinite_steps_shows_a_conditioned_network_the_hitting_times() -> None:
    world = World.random(seed=5, level=True)
    tokens = draw(world, samplers.Ancestral(steps=None))
    assert fits(world, tokens, world.chain_law(LogLinear(), 1500)) > P_MIN


@pytest.mark.parametrize("sampler", [samplers.Ancestral(steps=None), samplers.LeftToRight()], ids=repr)
def test_one_token_a_call_with_the_true_conditionals_samples_the_data(sampler: Sampler) -> None:
    world, law = data_world()
    assert fits(world, draw(world, sampler), law) > P_MIN


def test_few_steps_with_the_true_conditionals_do_not() -> None:
    world, law = data_world()
    tokens = draw(world, samplers.Ancestral(steps=1))
    observed = torch.bincount(world.index(tokens), minlength=len(law)) / len(tokens)
    assert (observed - law).abs().sum() > 0.05


def test_prompts_condition_the_law() -> None:
    """Fixed positions stay, and the rest follows the data law given them."""
    world, law = data_world()
    fixed = torch.tensor([1, world.mask_id, world.mask_id, 0])
    canvas = Canvas.of(fixed.repeat(NUM, 1), mask_id=world.mask_id, seed=2)
    tokens = sample(world.denoiser(), canvas, samplers.Ancestral(steps=None)).tokens
    agrees = (world.states[:, 0] == 1) & (world.states[:, 3] == 0)
    assert fits(world, tokens, law * agrees / (law * agrees).sum()) > P_MIN


@pytest.mark.parametrize("level", [False, True], ids=["ignores level", "sees level"])
def test_semi_ar_is_the_chain_of_each_window_given_what_it_keeps(level: bool) -> None:
    """Beyond the window, of any network and in few steps: window 3, stride 2, five tokens, by enumeration."""
    world = World.random(V=2, L=3, seed=6, level=level)
    noise, steps = LogLinear(), 2
    first = world.chain_law(noise, steps)
    matrix = torch.eye(len(world.states), dtype=torch.double)
    for i in range(steps, 0, -1):
        matrix = matrix @ world.step_matrix(1 - (i - 1) / steps, 1 - i / steps)
    canvas = Canvas.blank(num=NUM, length=5, mask_id=2, seed=3)
    sampler = samplers.SemiAR(window=3, stride=2, inner=samplers.Ancestral(steps=steps))
    tokens = sample(world.denoiser(), canvas, sampler).tokens
    big = World.random(V=2, L=5)
    law = torch.zeros(len(big.states), dtype=torch.double)
    for i, x in enumerate(big.states):
        if 2 not in x:
            kept = world.index(torch.tensor([[x[2], 2, 2]]))
            law[i] = (first[world.index(x[None, :3])] * matrix[kept, world.index(x[None, 2:])]).item()
    assert law.sum() == pytest.approx(1.0)
    assert fits(big, tokens, law) > P_MIN
    # as a first window would go on, without what is kept, is another law
    fresh = torch.tensor([first[world.index(x[None, 2:])].item() if 2 not in x else 0.0 for x in big.states])
    assert fits(big, tokens, (law.sign() * fresh.double()) / fresh.sum()) < 1e-8


def test_semi_ar_windows_follow_their_law() -> None:
    """Two tokens at a time, stride 1, with the conditionals of an order-1 chain: the law of the whole text is exact."""
    g = torch.Generator().manual_seed(0)
    start, move = (
        torch.rand(2, generator=g).softmax(0).double(),
        torch.rand(2, 2, generator=g).mul(3).softmax(1).double(),
    )
    start = torch.linalg.matrix_power(move, 50)[0]  # stationary, so that every window has the same law
    world = World.random(V=2, L=2)
    pair = start[:, None] * move
    for i, z in enumerate(world.states):
        for j in range(2):
            for token in range(2):
                agrees = pair.clone()
                if z[1 - j] != 2:
                    keep = torch.zeros(2, dtype=torch.double)
                    keep[z[1 - j]] = 1
                    agrees = agrees * (keep[None, :] if j == 0 else keep[:, None])
                world.logits[i, j, token] = agrees.sum(dim=1 - j)[token].log()
    canvas = Canvas.blank(num=NUM, length=4, mask_id=2, seed=1)
    inner = samplers.Ancestral(steps=None)
    tokens = sample(world.denoiser(), canvas, samplers.SemiAR(window=2, stride=1, inner=inner)).tokens
    big = World.random(V=2, L=4)
    law = torch.zeros(len(big.states), dtype=torch.double)
    for i, x in enumerate(big.states.tolist()):
        if 2 not in x:
            law[i] = start[x[0]] * move[x[0], x[1]] * move[x[1], x[2]] * move[x[2], x[3]]
    assert fits(big, tokens, law) > P_MIN


def test_temperature_top_k_top_p() -> None:
    world = World.random(V=4, L=1, seed=6)
    p = world.x_theta(torch.tensor([[4]]), 1.0)[0, 0]
    order = p[:4].argsort(descending=True)

    def law(q: torch.Tensor) -> torch.Tensor:
        return torch.cat([q[:4], torch.zeros(1).double()]) / q[:4].sum()

    assert fits(world, draw(world, samplers.Ancestral(temperature=0.5)), law(p**2)) > P_MIN
    top2 = torch.zeros(5).double()
    top2[order[:2]] = p[order[:2]]
    assert fits(world, draw(world, samplers.Ancestral(top_k=2)), law(top2)) > P_MIN
    just_over = float(p[order[:2]].sum()) - 1e-6
    assert fits(world, draw(world, samplers.Ancestral(top_p=just_over)), law(top2)) > P_MIN
    assert (draw(world, samplers.Ancestral(top_p=1e-9), num=100) == order[0]).all()
    assert (draw(world, samplers.Ancestral(temperature=0), num=100) == order[0]).all()


def test_calls_stay_below_the_limit_and_plans_skip_empty_steps() -> None:
    world = World.random(V=2, L=3)
    for sampler in (samplers.Ancestral(steps=1000), samplers.Ancestral(steps=2), samplers.Ancestral(steps=None)):
        canvas = Canvas.blank(num=50, length=3, mask_id=2)
        count = sum(1 for _ in steps(world.denoiser(), canvas, sampler))
        assert count <= sampler.max_calls(3)


def test_a_row_depends_on_its_key_alone() -> None:
    world = World.random(seed=9)
    for sampler in (samplers.Ancestral(steps=2), samplers.Posterior(steps=4), samplers.LeftToRight()):
        canvas = Canvas.blank(num=20, length=3, mask_id=2, seed=3)
        together = sample(world.denoiser(), canvas, sampler).tokens
        for i in (0, 7, 19):
            alone = dataclasses.replace(
                canvas,
                tokens=canvas.tokens[i : i + 1],
                open_BL=canvas.open_BL[i : i + 1],
                key_B=canvas.key_B[i : i + 1],
            )
            assert sample(world.denoiser(), alone, sampler).tokens.equal(together[i : i + 1])


def test_forbidden_tokens_are_never_written() -> None:
    world = World.random(V=3, L=3)
    canvas = dataclasses.replace(Canvas.blank(num=500, length=3, mask_id=3), forbidden=(0,))
    tokens = sample(world.denoiser(), canvas, samplers.Ancestral()).tokens
    assert set(tokens.flatten().tolist()) == {1, 2}


def test_a_tiny_temperature_is_the_argmax_and_top_k_keeps_k_of_equals() -> None:
    world = World.random(V=4, L=2, seed=6)
    cold, zero = (draw(world, samplers.Ancestral(steps=2, temperature=t), num=50) for t in (1e-38, 0.0))
    assert cold.equal(zero)
    world.logits[:] = 0
    assert len(draw(world, samplers.Ancestral(top_k=1), num=200).unique()) == 1


def test_a_window_does_not_depend_on_the_longest_row() -> None:
    """Ragged rows: a neighbour that is longer moves none of the row's windows."""
    g = torch.Generator().manual_seed(0)
    table = torch.randn(4, 4, generator=g)

    def neighbours(z_BL: torch.Tensor, level_B: torch.Tensor | None) -> torch.Tensor:
        return table[z_BL.roll(1, dims=1)] + table[z_BL.roll(2, dims=1)].flip(-1)

    net = as_denoiser(neighbours, vocab_size=3, mask_id=3, uses_level=False)
    net.trunk = lambda z, level=None, *, valid_BL=None, at_BK, **_: (  # type: ignore[method-assign]
        neighbours(z, level).gather(1, at_BK[..., None].expand(-1, -1, 4))
    )
    sampler = samplers.SemiAR(window=6, stride=3, inner=samplers.Ancestral(steps=3))
    short, long = [3] * 13, [3] * 20
    alone = sample(net, Canvas.of_rows([short], mask_id=3, pad_id=0, seed=1), sampler).tokens
    among = sample(net, Canvas.of_rows([short, long], mask_id=3, pad_id=0, seed=1), sampler).tokens
    # The wrapped toy sees padding at its left edge (roll), so only what lies before the last window is compared.
    assert alone[0, :9].equal(among[0, :9])
