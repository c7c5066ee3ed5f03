"""Remasking: chains against their enumerated law, marginals that stay where they should, and refining."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from chains import World, data_world, fits
from torch import Tensor

from unmask import objectives, samplers
from unmask.denoisers.network import as_denoiser
from unmask.errors import UsageError
from unmask.noise import Cosine, LogLinear
from unmask.samplers import Sampler
from unmask.samplers.remasking import Move, RemaskingSampler, largest_sigma
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample, steps

NUM = 30_000
P_MIN = 1e-4


def draw(world: World, sampler: Sampler, num: int = NUM) -> Tensor:
    canvas = Canvas.blank(num=num, length=world.L, mask_id=world.mask_id, seed=5)
    return sample(world.denoiser(), canvas, sampler).tokens


def move_matrix(world: World, move: Move, fixed: dict[int, int] | None = None) -> Tensor:
    """p(z_s | z_t) over all states: a token stays with 1 - sigma, a mask opens as the marginals ask."""
    z = world.states
    opening = (move.alpha_s - (1 - move.sigma) * move.alpha_t) / (1 - move.alpha_t)
    q = world.x_theta(z, 1 - move.alpha_t) * opening
    q[..., world.mask_id] = 1 - opening
    visible = z != world.mask_id
    q[visible] = (1 - move.sigma) * torch.nn.functional.one_hot(z[visible], world.num_ids).double()
    q[..., world.mask_id] += move.sigma * visible
    for position, token in (fixed or {}).items():
        q[:, position] = torch.nn.functional.one_hot(torch.tensor(token), world.num_ids).double()
    law = torch.ones(len(z), len(z), dtype=torch.float64)
    for position in range(world.L):
        law *= q[:, position][:, z[:, position]]
    return law


def chain(world: World, moves: list[Move], fixed: dict[int, int] | None = None) -> Tensor:
    start = torch.tensor([[(fixed or {}).get(i, world.mask_id) for i in range(world.L)]])
    law = torch.zeros(len(world.states), dtype=torch.float64)
    law[world.index(start)] = 1
    for move in moves:
        law = law @ move_matrix(world, move, fixed)
    return law


def by_hand(sampler: RemaskingSampler) -> list[Move]:
    """The moves again, from MATH alone, for the log-linear schedule: alpha = 1 - t."""
    if isinstance(sampler, samplers.PredictorCorrector):
        T, found = sampler.steps, []
        for i in range(T, 0, -1):
            found.append(Move(1 - i / T, 1 - (i - 1) / T, 0.0))
            a = 1 - (i - 1) / T
            found += [Move(a, a, min(sampler.eta, (1 - a) / a))] * (sampler.corrections if i > 1 else 0)
        return found
    assert isinstance(sampler, samplers.ReMDM)
    T = sampler.steps
    if sampler.variant == "loop":
        n, a = T // 2, 1 - sampler.hold
        up = [Move(a * i / n, a * (i + 1) / n, 0.0) for i in range(n)]
        rest = T - n
        on = [Move(a + (1 - a) * i / rest, a + (1 - a) * (i + 1) / rest, 0.0) for i in range(rest)]
        return [*up, *[Move(a, a, min(sampler.eta, (1 - a) / a))] * sampler.loop, *on]
    found = []
    for i in range(T, 0, -1):
        most = min(1.0, ((i - 1) / T) / (1 - i / T)) if i < T else 1.0
        sigma = min(sampler.eta, most) if sampler.variant == "cap" else sampler.eta * most
        found.append(Move(1 - i / T, 1 - (i - 1) / T, sigma))
    return found


CHAINS: list[RemaskingSampler] = [
    samplers.ReMDM(variant="cap", eta=0.3, steps=4),
    samplers.ReMDM(variant="cap", eta=1.0, steps=3),
    samplers.ReMDM(variant="rescale", eta=0.6, steps=4),
    samplers.ReMDM(variant="loop", eta=0.5, steps=4, hold=0.4, loop=3),
    samplers.PredictorCorrector(steps=3, corrections=1, eta=0.4),
    samplers.PredictorCorrector(steps=2, corrections=3, eta=1.0),
]


@pytest.mark.parametrize("sampler", CHAINS, ids=repr)
@pytest.mark.parametrize("level", [False, True], ids=["ignores level", "sees level"])
def test_the_chains_law(sampler: RemaskingSampler, level: bool) -> None:
    world = World.random(seed=1, level=level)
    assert fits(world, draw(world, sampler), chain(world, by_hand(sampler))) > P_MIN


@pytest.mark.parametrize("sampler", CHAINS, ids=repr)
def test_the_test_would_notice_the_plain_chain(sampler: RemaskingSampler) -> None:
    world = World.random(seed=1)
    plain = world.chain_law(LogLinear(), sampler.steps)  # type: ignore[attr-defined]
    assert fits(world, draw(world, sampler), plain) < 1e-4


def test_nothing_masked_again_is_the_plain_chain() -> None:
    world = World.random(seed=1)
    law = world.chain_law(Cosine(), 3)
    for sampler in (
        samplers.ReMDM(eta=0.0, steps=3, noise=Cosine()),
        samplers.ReMDM(eta=0.0, steps=3, noise=Cosine(), variant="confidence"),
        samplers.PredictorCorrector(steps=3, corrections=0, noise=Cosine()),
    ):
        assert fits(world, draw(world, sampler), law) > P_MIN


def test_what_is_fixed_is_never_masked_again() -> None:
    world = World.random(seed=3)
    sampler = samplers.ReMDM(variant="rescale", eta=1.0, steps=4)
    canvas = Canvas.of(torch.tensor([[2, 1, 2]]).repeat(NUM, 1), mask_id=2, seed=1)
    seen = [step.tokens_BL for step in steps(world.denoiser(), canvas, sampler)]
    assert all((tokens[:, 1] == 1).all() for tokens in seen)
    assert fits(world, seen[-1], chain(world, by_hand(sampler), {1: 1})) > P_MIN


@pytest.mark.parametrize("sampler", CHAINS, ids=repr)
def test_moves_keep_the_marginals_of_the_forward_process(sampler: RemaskingSampler) -> None:
    """q(z_t|x) goes to q(z_s|x) under each move, if the network knows x: enumerated, for one x."""
    world = World.random(seed=1)
    x = torch.tensor([0, 1, 1])
    world.logits[:] = torch.where(torch.nn.functional.one_hot(x, 3).bool(), 0.0, -torch.inf)

    def q(alpha: float) -> Tensor:
        z = world.states
        return torch.where(z == x, alpha, torch.where(z == world.mask_id, 1 - alpha, 0.0)).double().prod(dim=1)

    for move in by_hand(sampler):
        assert 0 <= move.sigma <= largest_sigma(move.alpha_t, move.alpha_s) + 1e-12
        assert torch.allclose(q(move.alpha_t) @ move_matrix(world, move), q(move.alpha_s), atol=1e-12)


@pytest.mark.parametrize("sampler", CHAINS, ids=repr)
def test_as_many_are_visible_as_the_schedule_says(sampler: RemaskingSampler) -> None:
    """The sampler itself, move by move: the visible share is alpha_s, within five standard errors."""
    world = World.random(seed=1)
    state = sampler.start(Canvas.blank(num=NUM, length=3, mask_id=2, seed=8))
    predictor = objectives.MDLM().predictor(world.denoiser())
    while (query := sampler.ask(state)) is not None:
        alpha = state.moves[state.at].alpha_s
        visible = float((sampler.tell(state, predictor(query)).tokens_BL != 2).double().mean())
        assert abs(visible - alpha) <= 5 * math.sqrt(alpha * (1 - alpha) / (3 * NUM)) + 1e-12


def confidence_law(world: World, sampler: RemaskingSampler) -> Tensor:
    """States with the probability that each token had when it was drawn, followed from step to step."""
    assert isinstance(sampler, samplers.ReMDM)
    T, mask = sampler.steps, world.mask_id
    law: dict[tuple[tuple[int, float], ...], float] = {((mask, 0.0),) * world.L: 1.0}
    for i in range(T, 0, -1):
        alpha_t, alpha_s = 1 - i / T, 1 - (i - 1) / T
        most = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0
        after: dict[tuple[tuple[int, float], ...], float] = defaultdict(float)
        for state, chance in law.items():
            p = world.x_theta(torch.tensor([[token for token, _ in state]]), 1 - alpha_t)[0].tolist()
            total = sum(math.exp(-told) for token, told in state if token != mask)
            ways = []
            for position, (token, told) in enumerate(state):
                if token == mask:
                    opening = (alpha_s - alpha_t) / (1 - alpha_t)
                    opened = [((v, p[position][v]), opening * p[position][v]) for v in range(world.V)]
                    ways.append([*opened, ((mask, 0.0), 1 - opening)])
                else:
                    sigma = sampler.eta * most * math.exp(-told) / total
                    ways.append([((token, told), 1 - sigma), ((mask, 0.0), sigma)])
            for way in itertools.product(*ways):
                part = chance * math.prod(c for _, c in way)
                if part > 0:
                    after[tuple(cell for cell, _ in way)] += part
        law = after
    final = torch.zeros(len(world.states), dtype=torch.float64)
    for state, chance in law.items():
        final[world.index(torch.tensor([[token for token, _ in state]]))] += chance
    return final


@pytest.mark.parametrize(("L", "num_steps"), [(2, 4), (3, 3)])
def test_by_confidence(L: int, num_steps: int) -> None:
    world = World.random(L=L, seed=2)
    sampler = samplers.ReMDM(variant="confidence", eta=1.0, steps=num_steps)
    tokens = draw(world, sampler)
    assert fits(world, tokens, confidence_law(world, sampler)) > P_MIN
    assert fits(world, tokens, world.chain_law(LogLinear(), num_steps)) < 1e-4


def test_corrections_bring_a_short_chain_nearer_to_the_data() -> None:
    """By enumeration: with the true conditionals, three steps with corrections miss the data law by less."""
    world, data = data_world()
    missed = []
    for corrections in (0, 4, 16):
        law = chain(world, by_hand(samplers.PredictorCorrector(steps=3, corrections=corrections, eta=0.2)))
        missed.append(float((law - data).abs().sum()) / 2)
    assert missed[0] > missed[1] > missed[2]


def test_a_position_that_is_drawn_again_gets_fresh_numbers() -> None:
    coin = as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    canvas = Canvas.blank(num=2000, length=4, mask_id=2)
    for sampler in (
        samplers.ReMDM(variant="loop", eta=1.0, steps=2, hold=0.5, loop=2),
        samplers.Refine(inner=samplers.Ancestral(steps=2), share=0.5, rounds=2),
    ):
        first: dict[tuple[int, int], int] = {}
        again, same = 0, 0
        for step in steps(coin, canvas, sampler):
            for at in zip(step.row_N.tolist(), step.position_N.tolist(), step.token_N.tolist(), strict=True):
                if at[:2] in first:
                    again, same = again + 1, same + (first[at[:2]] == at[2])
                first[at[:2]] = at[2]
        assert again > 3000
        assert abs(same / again - 0.5) < 5 * math.sqrt(0.25 / again)


# --- refine -----------------------------------------------------------------------------------------------------------


def test_no_round_is_the_inner_sampler() -> None:
    world = World.random(seed=1)
    inner = samplers.Ancestral(steps=2)
    assert draw(world, samplers.Refine(inner=inner, rounds=0), 200).equal(draw(world, inner, 200))


def test_the_least_sure_are_written_anew() -> None:
    """A finished text with one token given, one draft the network likes, and two that it does not."""
    favourite = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0], [0.0, 4.0, 1.0], [5.0, 0.0, 1.0]])
    net = as_denoiser(lambda z, level: favourite.expand(len(z), 4, 3), vocab_size=2, mask_id=2)
    text = torch.tensor([[0, 0, 0, 1]])
    draft_BL = torch.tensor([[False, True, True, True]])
    canvas = replace(Canvas.of(text, mask_id=2), draft_BL=draft_BL)
    inner = samplers.Confidence(draw="argmax")

    def after(share: float, rounds: int) -> list[int]:
        sampler = samplers.Refine(inner=inner, share=share, rounds=rounds)
        return sample(net, canvas, sampler).tokens[0].tolist()

    assert after(1 / 3, 1) == [0, 0, 0, 0]  # position 3 was the least likely
    assert after(1 / 3, 2) == [0, 0, 1, 0]  # then position 2
    assert after(2 / 3, 1) == [0, 0, 1, 0]
    assert after(1.0, 3) == [0, 0, 1, 0]  # what is given stays, however unlikely
    nothing = sample(net, replace(canvas, draft_BL=None), samplers.Refine(inner=inner)).tokens
    assert nothing.equal(text)


def test_refining_makes_texts_likelier() -> None:
    world, data = data_world(V=2, L=4)
    plain = draw(world, samplers.Ancestral(steps=1), 2000)
    refined = draw(
        world,
        samplers.Refine(inner=samplers.Ancestral(steps=1), rounds=6, share=0.25, parts=4),
        2000,
    )
    likely = (
        data[world.index(refined)].log().clamp(min=-20).mean() - data[world.index(plain)].log().clamp(min=-20).mean()
    )
    assert float(likely) > 0.1


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: samplers.ReMDM(variant="kap"), "did you mean 'cap'"),
    (lambda: samplers.ReMDM(eta=1.5), r"eta says how much is masked again, in \[0, 1\]"),
    (lambda: samplers.ReMDM(steps=0), r"steps must lie in 1\.\."),
    (lambda: samplers.ReMDM(variant="loop", steps=1), "at least 2 steps"),
    (lambda: samplers.ReMDM(hold=1.0), "hold is a time between"),
    (lambda: samplers.ReMDM(loop=-1), r"loop must lie in 0\.\."),
    (lambda: samplers.PredictorCorrector(corrections=-1), r"corrections must lie in 0\.\."),
    (lambda: samplers.PredictorCorrector(eta=-0.1), "eta says how much"),
    (lambda: samplers.PredictorCorrector(steps=1000, corrections=1000), "corrections"),
    (lambda: samplers.Refine(share=0.0), "share is how much of the text"),
    (lambda: samplers.Refine(rounds=-1), r"rounds must lie in 0\.\."),
    (lambda: samplers.Refine(parts=0), r"parts must lie in 1\.\."),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_options_are_refused_in_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as e:
        make()
    assert "\n" not in str(e.value)
