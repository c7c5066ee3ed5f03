"""Gibbs sampling: its chain against the enumerated one, the stationary law, and what it keeps."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chains import World, data_world, fits, random_order_law
from torch import Tensor

from unmask import objectives, samplers
from unmask.constraints.automaton import Automaton
from unmask.errors import UsageError
from unmask.samplers import Gibbs
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample, steps

NUM = 20_000
P_MIN = 1e-4
MASK = 2


def redraw(world: World, *positions: int) -> Tensor:
    """[states, states] the positions masked, then each drawn from x_theta; by enumeration of all states."""
    masked = world.states.clone()
    masked[:, positions] = world.mask_id
    matrix = torch.zeros(len(masked), len(masked), dtype=torch.float64)
    for i, z in enumerate(masked):
        p = world.x_theta(z[None], int((z == world.mask_id).sum()) / world.L)[0]
        for tokens in itertools.product(range(world.num_ids), repeat=len(positions)):
            after = z.clone()
            after[list(positions)] = torch.tensor(tokens)
            matrix[i, world.index(after[None])] += p[list(positions), list(tokens)].prod()
    return matrix


def groups(order: tuple[int, ...], steps: int | None) -> list[tuple[int, ...]]:
    """The order in so many parts, the larger ones first."""
    size, more = divmod(len(order), min(steps or len(order), len(order)))
    sizes = [size + 1] * more + [size] * (min(steps or len(order), len(order)) - more)
    ends = [0, *itertools.accumulate(sizes)]
    return [order[lo:hi] for lo, hi in itertools.pairwise(ends)]


def chain(world: World, sampler: Gibbs, row: list[int]) -> Tensor:
    """The law over states after the fill and the sweeps, from a canvas: transition matrices to their powers."""
    open_positions = tuple(i for i, token in enumerate(row) if token == world.mask_id)
    orders = list(itertools.permutations(open_positions)) if sampler.scan == "random" else [open_positions]
    start, law = torch.zeros(2, len(world.states), dtype=torch.float64)
    start[world.index(torch.tensor([row]))] = 1
    matrix = functools.cache(functools.partial(redraw, world))
    for order in orders:
        part = start
        for group in groups(order, sampler.steps):
            part = part @ matrix(*group)
        law += part / len(orders)
    if sampler.scan == "random":
        mean = torch.stack([matrix(i) for i in open_positions]).mean(dim=0)
        return law @ torch.linalg.matrix_power(mean, sampler.sweeps * len(open_positions))
    for i in open_positions * sampler.sweeps:
        law = law @ matrix(i)
    return law


def draw(world: World, sampler: Gibbs, row: list[int], seed: int = 5) -> Tensor:
    canvas = Canvas.of(torch.tensor([row]).repeat(NUM, 1), mask_id=world.mask_id, seed=seed)
    return sample(world.denoiser(), canvas, sampler).tokens


EVERY: list[Gibbs] = [
    Gibbs(sweeps=0),
    Gibbs(sweeps=1),
    Gibbs(sweeps=2),
    Gibbs(sweeps=0, scan="systematic"),
    Gibbs(sweeps=2, scan="systematic"),
    Gibbs(sweeps=1, steps=2),
    Gibbs(sweeps=1, steps=2, scan="systematic"),
    Gibbs(sweeps=0, steps=1),
    Gibbs(sweeps=1, steps=9),
]


@pytest.mark.parametrize("sampler", EVERY, ids=repr)
@pytest.mark.parametrize("level", [False, True], ids=["ignores level", "sees level"])
def test_the_chains_law(sampler: Gibbs, level: bool) -> None:
    world = World.random(seed=1, level=level)
    assert fits(world, draw(world, sampler, [MASK] * 3), chain(world, sampler, [MASK] * 3)) > P_MIN


@pytest.mark.parametrize("scan", ["random", "systematic"])
def test_what_is_fixed_stays_and_is_seen(scan: Any) -> None:
    world, row = World.random(L=4, seed=3), [MASK, 1, MASK, 0]
    sampler = Gibbs(sweeps=2, scan=scan)
    canvas = Canvas.of(torch.tensor([row]).repeat(NUM, 1), mask_id=MASK, seed=1)
    seen = [step.tokens_BL for step in steps(world.denoiser(), canvas, sampler)]
    assert len(seen) == 2 * 3  # the open ones alone are redrawn
    assert all((tokens[:, 1] == 1).all() and (tokens[:, 3] == 0).all() for tokens in seen)
    assert fits(world, seen[-1], chain(world, sampler, row)) > P_MIN


def test_the_tests_would_notice_another_chain() -> None:
    """A sweep more or less, another order, another fill: each is seen by the same chi-square."""
    world = World.random(seed=1)
    drawn = draw(world, Gibbs(sweeps=1), [MASK] * 3)
    others = Gibbs(sweeps=0), Gibbs(sweeps=2), Gibbs(sweeps=1, scan="systematic"), Gibbs(sweeps=1, steps=1)
    for other in others:
        assert fits(world, drawn, chain(world, other, [MASK] * 3)) < P_MIN


def test_without_sweeps_it_is_the_random_order() -> None:
    world = World.random(seed=4)
    row = [MASK] * 3
    torch.testing.assert_close(chain(world, Gibbs(sweeps=0), row), random_order_law(world), rtol=1e-9, atol=1e-12)
    assert fits(world, draw(world, Gibbs(sweeps=0), row), random_order_law(world)) > P_MIN


@pytest.mark.parametrize("scan", ["random", "systematic"])
def test_with_the_conditionals_of_a_law_that_law_is_stationary(scan: Any) -> None:
    """p M = p for every redraw; what the fill draws from p stays p; and from anywhere else the chain comes to p."""
    world, p = data_world(V=2, L=3)
    for position in range(world.L):
        torch.testing.assert_close(p @ redraw(world, position), p, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(chain(world, Gibbs(sweeps=3, scan=scan), [MASK] * 3), p, rtol=1e-9, atol=1e-12)
    assert fits(world, draw(world, Gibbs(sweeps=2, scan=scan), [MASK] * 3), p) > P_MIN
    mean = torch.stack([redraw(world, i) for i in range(3)]).mean(dim=0)
    far = torch.linalg.matrix_power(mean, 20_000)
    for text in world.index(world.texts):
        torch.testing.assert_close(far[text], p, rtol=1e-6, atol=1e-9)


def test_a_wrong_fill_is_forgotten() -> None:
    """A network right about one missing token and wrong about several: the fill is not p's, many sweeps later it is."""
    world, p = data_world(V=2, L=3, seed=0)
    several = (world.states == MASK).sum(dim=1) > 1
    world.logits[several] = 0.0
    world.logits[several, :, 0] = 3.0
    row, long = [MASK] * 3, Gibbs(sweeps=16)
    assert fits(world, draw(world, Gibbs(sweeps=0), row), p) < 1e-6
    assert (chain(world, long, row) - p).abs().max() < 1e-3
    assert fits(world, draw(world, long, row), p) > P_MIN


def test_a_constraint_makes_the_law_that_given_the_constraint() -> None:
    """No two ones in a row: every redraw is the conditional of p given that, which is then stationary."""
    world, p = data_world(V=2, L=3, seed=0)
    next_SI = np.array([[0, 1, -1], [0, -1, -1]], dtype=np.int32)
    automaton = Automaton.of(next_SI, np.array([True, True]), over="text")
    allowed = ((world.states[:, :-1] + world.states[:, 1:] != 2) | (world.states == MASK)[:, :-1]).all(dim=1)
    given = torch.where(allowed, p, 0.0) / p[allowed].sum()
    kept = torch.stack([redraw(world, i) for i in range(3)]) * allowed.double()
    mean = torch.nan_to_num(kept / kept.sum(dim=2, keepdim=True)).mean(dim=0)
    sampler = Gibbs(sweeps=12)
    late = torch.linalg.matrix_power(mean, 12 * 3)[world.index(world.texts)]
    assert (late[given[world.index(world.texts)] > 0] - given).abs().max() < 1e-3  # from wherever the fill ends
    canvas = Canvas.blank(num=4000, length=3, mask_id=MASK, seed=2)
    drawn = sample(world.denoiser(), replace(canvas, constraint=automaton), sampler).tokens
    assert fits(world, drawn, given) > P_MIN


def test_a_row_is_driven_by_its_key_alone() -> None:
    world = World.random(L=4, seed=2)
    rows = torch.tensor([[MASK] * 4, [MASK, 0, 1, MASK], [1, 1, 0, 0]])
    canvas = Canvas.of(rows, mask_id=MASK, seed=9)
    found = sample(world.denoiser(), canvas, Gibbs()).tokens
    assert found.equal(sample(world.denoiser(), canvas, Gibbs()).tokens)
    for i in range(3):
        alone = Canvas(rows[i : i + 1], MASK, canvas.key_B[i : i + 1])
        assert sample(world.denoiser(), alone, Gibbs()).tokens[0].equal(found[i])
    many = Canvas.blank(num=64, length=4, mask_id=MASK, seed=9), Canvas.blank(num=64, length=4, mask_id=MASK, seed=8)
    assert not sample(world.denoiser(), many[0], Gibbs()).tokens.equal(
        sample(world.denoiser(), many[1], Gibbs()).tokens
    )


def test_bad_options_and_models_are_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"sweeps must lie in 0\.\."):
        Gibbs(sweeps=-1)
    with pytest.raises(UsageError, match=r"steps must lie in 1\.\."):
        Gibbs(steps=0)
    with pytest.raises(UsageError, match="did you mean 'random'"):
        Gibbs(scan="randm")  # type: ignore[arg-type]
    world, canvas = World.random(), Canvas.blank(num=1, length=3, mask_id=MASK)
    for objective in (objectives.D3PM(steps=4), objectives.UDLM(), objectives.SEDD()):
        with pytest.raises(UsageError, match="Gibbs cannot follow this model"):
            sample(world.denoiser(), canvas, samplers.Gibbs(), objective=objective)
