"""Guidance follows the laws it claims: the mixed prediction's chain, and the score's tilted law."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from chains import World, fits
from torch import Tensor

from unmask import samplers
from unmask.denoisers.dit import DiT
from unmask.errors import UsageError
from unmask.noise import LogLinear
from unmask.objectives import MDLM
from unmask.samplers import Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.guidance import Guidance
from unmask.sampling.loop import sample
from unmask.sampling.particles import particles

P_MIN = 1e-4


def guided_world(world: World, fixed: int, weight: float) -> World:
    """The table whose own prediction is the guided one, for states with position 0 given."""
    free = world.states.clone()
    free[:, 0] = world.mask_id
    given, hidden = (world.x_theta(z, 0.0, carry_over=False).log() for z in (world.states, free))
    mixed = (1 + weight) * given - weight * hidden
    mixed[..., world.mask_id] = 0  # zero masking removes it again
    return dataclasses.replace(world, logits=mixed)


def chain_from(world: World, start: Tensor, steps: int) -> Tensor:
    law = torch.zeros(len(world.states), dtype=torch.float64)
    law[world.index(start[None])] = 1
    alpha = LogLinear().alpha(torch.arange(steps + 1, dtype=torch.float64) / steps).tolist()
    for i in range(steps, 0, -1):
        law = law @ world.step_matrix(alpha[i - 1], alpha[i])
    return law


@pytest.mark.parametrize("weight", [0.0, 1.5, -1.0])
def test_guided_sampling_has_the_mixed_predictions_law(weight: float) -> None:
    world = World.random(V=2, L=3, seed=6)
    start = torch.tensor([1, world.mask_id, world.mask_id])
    canvas = Canvas.of(start.repeat(30_000, 1), mask_id=world.mask_id, seed=1)
    tokens = sample(world.denoiser(), canvas, samplers.Ancestral(steps=2), guidance=Guidance(weight)).tokens
    assert fits(world, tokens, chain_from(guided_world(world, 1, weight), start, 2)) > P_MIN
    if weight:  # the test would notice an unguided law
        assert fits(world, tokens, chain_from(world, start, 2)) < 1e-8


def test_a_wish_that_guidance_cannot_follow_is_refused() -> None:
    world = World.random()
    blank = Canvas.blank(num=1, length=world.L, mask_id=world.mask_id)
    with pytest.raises(UsageError, match="needs a condition"):
        sample(world.denoiser(), blank, samplers.Ancestral(), guidance=Guidance(1.0))
    with pytest.raises(UsageError, match="must be a number"):
        Guidance(float("nan"))
    prompted = Canvas.of(torch.tensor([[0, world.mask_id, world.mask_id]]), mask_id=world.mask_id)
    windows = samplers.SemiAR(window=2, stride=1, inner=samplers.Ancestral())
    with pytest.raises(UsageError, match="within one window"):
        sample(world.denoiser(), prompted, windows, guidance=Guidance(1.0))


def tilt(z_BL: Tensor) -> Tensor:
    """Ones are liked, and a one behind a zero is liked more; what is masked says nothing yet."""
    return 0.9 * (z_BL == 1).sum(dim=1) + 0.8 * ((z_BL[:, :-1] == 0) & (z_BL[:, 1:] == 1)).sum(dim=1)


def tilted_law(world: World, law: Tensor) -> Tensor:
    tilted = law * torch.exp(tilt(world.states).double())
    return tilted / tilted.sum()


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0], ids=["never", "when poor", "always"])
@pytest.mark.parametrize("sampler", [samplers.Ancestral(steps=3), samplers.LeftToRight()], ids=repr)
def test_particles_follow_the_tilted_law(threshold: float, sampler: Sampler) -> None:
    world = World.random(V=2, L=3, seed=7)
    plain = world.chain_law(LogLinear(), 3) if isinstance(sampler, samplers.Ancestral) else left_to_right_law(world)
    canvas = Canvas.blank(num=4000, length=world.L, mask_id=world.mask_id, seed=2)
    tokens = particles(world.denoiser(), canvas, sampler, tilt, num=48, threshold=threshold).tokens
    assert fits(world, tokens, tilted_law(world, plain)) > P_MIN
    assert fits(world, tokens, plain) < 1e-8  # and not the untilted one


def test_a_score_that_is_silent_until_the_end_tilts_all_the_same() -> None:
    """-inf for everything unfinished: nothing is drawn anew, and the weights at the end are right."""
    world = World.random(V=2, L=3, seed=7)

    def silent(z_BL: Tensor) -> Tensor:
        return tilt(z_BL).masked_fill((z_BL == world.mask_id).any(dim=1), -torch.inf)

    canvas = Canvas.blank(num=4000, length=world.L, mask_id=world.mask_id, seed=2)
    tokens = particles(world.denoiser(), canvas, samplers.Ancestral(steps=3), silent, num=48, threshold=0.0).tokens
    assert fits(world, tokens, tilted_law(world, world.chain_law(LogLinear(), 3))) > P_MIN


def test_particles_refuse_what_they_cannot_steer() -> None:
    net = DiT(hidden=8, blocks=1, heads=2, causal=True).build(num_ids=3, mask_id=2)
    canvas = Canvas.blank(num=1, length=3, mask_id=2)
    with pytest.raises(UsageError, match="cache cannot follow"):
        particles(net, canvas, samplers.LeftToRight(), tilt)
    world = World.random()
    blank = Canvas.blank(num=1, length=world.L, mask_id=world.mask_id)
    with pytest.raises(UsageError, match="use more particles"):
        particles(world.denoiser(), blank, samplers.Ancestral(), lambda z: torch.full((len(z),), -torch.inf))
    with pytest.raises(UsageError, match="use posterior"):
        particles(world.denoiser(), blank, samplers.Ancestral(), tilt, objective=MDLM(zero_masking=False, steps=5))


def left_to_right_law(world: World) -> Tensor:
    law = torch.zeros(len(world.states), dtype=torch.float64)
    law[world.index(torch.full((1, world.L), world.mask_id))] = 1
    for position in range(world.L):
        new = torch.zeros_like(law)
        p = world.x_theta(world.states, 0.0)
        for i, z in enumerate(world.states):
            if law[i] > 0:
                for v in range(world.num_ids):
                    to = z.clone()
                    to[position] = v
                    new[world.index(to[None])] += law[i] * p[i, position, v]
        law = new
    return law


def test_greedy_particles_score_higher_and_keep_what_is_fixed() -> None:
    world = World.random(V=2, L=3, seed=8)
    tokens = torch.tensor([[0, world.mask_id, world.mask_id]]).repeat(200, 1)
    canvas = Canvas.of(tokens, mask_id=world.mask_id, seed=3)
    plain = sample(world.denoiser(), canvas, samplers.Ancestral(steps=None)).tokens
    best = particles(world.denoiser(), canvas, samplers.Ancestral(steps=None), tilt, num=8, greedy=True).tokens
    assert (best[:, 0] == 0).all()
    assert not (best == world.mask_id).any()
    assert tilt(best).mean() > tilt(plain).mean() + 0.5


@pytest.mark.parametrize("sampler", [samplers.Ancestral(steps=None), samplers.LeftToRight()], ids=repr)
def test_a_rows_particles_do_not_depend_on_its_neighbours(sampler: Sampler) -> None:
    world = World.random(V=2, L=4, seed=9)
    tokens = torch.full((20, world.L), world.mask_id)
    tokens[::3, 0], tokens[::4, 2] = 1, 0  # rows with more and less to write
    canvas = Canvas.of(tokens, mask_id=world.mask_id, seed=4)
    together = particles(world.denoiser(), canvas, sampler, tilt, num=8, threshold=0.9).tokens
    for i in (0, 3, 7, 8, 19):
        alone = dataclasses.replace(
            canvas, tokens=canvas.tokens[i : i + 1], open_BL=canvas.open_BL[i : i + 1], key_B=canvas.key_B[i : i + 1]
        )
        assert particles(world.denoiser(), alone, sampler, tilt, num=8, threshold=0.9).tokens.equal(together[i : i + 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num": 0}, "num must be at least 1"),
        ({"threshold": 1.5}, r"threshold in \[0, 1\]"),
        ({"score": lambda z: z.float()}, "one number a row"),
        ({"score": lambda z: torch.full((len(z),), torch.nan)}, "not a number"),
        ({"sampler": samplers.Posterior(steps=2), "threshold": 1.0}, "cannot copy rows"),
    ],
)
def test_bad_wishes(options: dict[str, object], message: str) -> None:
    world = World.random()
    canvas = Canvas.blank(num=1, length=world.L, mask_id=world.mask_id)
    given = {"sampler": samplers.Ancestral(), "score": tilt, "num": 4} | options
    with pytest.raises(UsageError, match=message):
        particles(world.denoiser(), canvas, **given)  # type: ignore[arg-type]
