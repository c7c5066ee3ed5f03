"""Adaptive orders, ways of drawing, blocks and the end of a text: laws by enumeration, and bad options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from chains import World, data_world, fits, random_order_law
from torch import Tensor

from unmask import samplers
from unmask.denoisers.dit import DiT
from unmask.denoisers.network import as_denoiser
from unmask.errors import NonFiniteError, UsageError
from unmask.noise import LogLinear
from unmask.samplers import Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.constrained import Constrained, constrained
from unmask.sampling.loop import sample, steps

NUM = 30_000
P_MIN = 1e-4


def draw(world: World, sampler: Sampler, num: int = NUM, seed: int = 5) -> Tensor:
    canvas = Canvas.blank(num=num, length=world.L, mask_id=world.mask_id, seed=seed)
    return sample(world.denoiser(), canvas, sampler).tokens


Opens = Callable[[Tensor, list[int], int], list[int]]  # (x_theta [L, I], masked positions, round) → what opens
Changed = Callable[[Tensor, float], Tensor]  # (p [I], share written) → the law a token is drawn from


def adaptive_law(world: World, opens: Opens, changed: Changed = lambda p, share: p) -> Tensor:
    """The law of an order that is a function of the state and the round: followed from state to state, exactly."""
    level: dict[tuple[int, ...], float] = {(world.mask_id,) * world.L: 1.0}
    final = torch.zeros(len(world.states), dtype=torch.float64)
    for turn in range(world.L):
        after: dict[tuple[int, ...], float] = {}
        for state, chance in level.items():
            masked = [i for i, token in enumerate(state) if token == world.mask_id]
            p = world.x_theta(torch.tensor([state]), len(masked) / world.L)[0]
            chosen = opens(p, masked, turn)
            law = [changed(p[i], 1 - len(masked) / world.L) for i in chosen]
            for tokens in itertools.product(
                [i for i in range(world.num_ids) if i != world.mask_id], repeat=len(chosen)
            ):
                new = list(state)
                for i, token in zip(chosen, tokens, strict=True):
                    new[i] = token
                part = chance * math.prod(float(q[token]) for q, token in zip(law, tokens, strict=True))
                if world.mask_id in new:
                    after[tuple(new)] = after.get(tuple(new), 0.0) + part
                else:
                    final[world.index(torch.tensor([new]))] += part
        level = after
    assert not level
    return final


def entropy(p: Tensor) -> float:
    return float(torch.special.entr(p).sum())


def surest(p: Tensor, masked: list[int], turn: int) -> list[int]:
    return sorted(masked, key=lambda i: -float(p[i].max()))


def clearest(p: Tensor, masked: list[int], turn: int) -> list[int]:
    return sorted(masked, key=lambda i: -float(p[i].topk(2).values.diff().abs()))


def calmest(p: Tensor, masked: list[int], turn: int) -> list[int]:
    return sorted(masked, key=lambda i: entropy(p[i]))


SCORES = {samplers.Confidence: surest, samplers.Margin: clearest, samplers.Entropy: calmest}


@pytest.mark.parametrize("cls", list(SCORES), ids=lambda c: c.__name__)
@pytest.mark.parametrize("level", [False, True], ids=["ignores level", "sees level"])
def test_one_by_one_in_the_order_of_the_score(cls: type, level: bool) -> None:
    world = World.random(V=3, L=3, seed=1, level=level)
    law = adaptive_law(world, lambda *at: SCORES[cls](*at)[:1])
    assert fits(world, draw(world, cls()), law) > P_MIN


def test_orders_differ_and_the_test_would_notice() -> None:
    world = World.random(V=3, L=3, seed=1)
    tokens = draw(world, samplers.Confidence())
    assert fits(world, tokens, random_order_law(world)) < 1e-8


@pytest.mark.parametrize("cls", list(SCORES), ids=lambda c: c.__name__)
def test_tokens_a_call_and_a_number_of_calls(cls: type) -> None:
    world = World.random(V=2, L=4, seed=2)
    by_two = adaptive_law(world, lambda *at: SCORES[cls](*at)[:2])
    assert fits(world, draw(world, cls(tokens=2)), by_two) > P_MIN
    assert draw(world, cls(steps=2)).equal(draw(world, cls(tokens=2)))

    def in_three(p: Tensor, masked: list[int], turn: int) -> list[int]:
        return SCORES[cls](p, masked, turn)[: math.ceil(len(masked) / (3 - turn))]

    assert fits(world, draw(world, cls(steps=3)), adaptive_law(world, in_three)) > P_MIN


@pytest.mark.parametrize("gamma", [0.0, 0.4, 0.9, 1e9])
def test_entropy_bounded(gamma: float) -> None:
    world = World.random(V=3, L=4, seed=3)

    def largest_set(p: Tensor, masked: list[int], turn: int) -> list[int]:
        """By trying all sets: the bound is on the set, the order only a way to find it."""
        best: tuple[int, ...] = ()
        for n in range(1, len(masked) + 1):
            sets = itertools.combinations(masked, n)
            h = {s: sorted(entropy(p[i]) for i in s) for s in sets}
            least = min(h, key=lambda s: sum(h[s]))
            if n == 1 or sum(h[least][:-1]) <= gamma:
                best = least
        return list(best)

    law = adaptive_law(world, largest_set)
    assert fits(world, draw(world, samplers.EntropyBounded(gamma=gamma)), law) > P_MIN


def test_the_bound_is_one_on_what_drawing_apart_loses() -> None:
    """With the true conditionals: KL(joint || product of its parts) of what opens in the first call is within gamma."""
    world, law = data_world()
    opened = set()
    for gamma in (0.0, 0.3, 0.6, 1.0, 2.0):
        canvas = Canvas.blank(num=1, length=world.L, mask_id=world.mask_id)
        chosen = sorted(next(steps(world.denoiser(), canvas, samplers.EntropyBounded(gamma=gamma))).position_N.tolist())
        tables = law.view([world.num_ids] * world.L)
        rest = [i for i in range(world.L) if i not in chosen]
        joint = tables.sum(dim=rest) if rest else tables  # over no dimension torch would sum over all
        product = torch.ones_like(joint)
        for k, i in enumerate(chosen):
            alone = tables.sum(dim=[j for j in range(world.L) if j != i])
            product = product * alone.view([-1 if k == j else 1 for j in range(len(chosen))])
        lost = float(torch.where(joint > 0, joint * (joint / product).log(), 0.0).sum())
        assert -1e-9 <= lost <= gamma + 1e-9
        opened.add(len(chosen))
    assert len(opened) > 2


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_threshold(threshold: float) -> None:
    world = World.random(V=3, L=4, seed=4)

    def sure_or_surest(p: Tensor, masked: list[int], turn: int) -> list[int]:
        sure = [i for i in masked if float(p[i].max()) >= threshold]
        return sure or surest(p, masked, turn)[:1]

    law = adaptive_law(world, sure_or_surest)
    assert fits(world, draw(world, samplers.Threshold(threshold=threshold)), law) > P_MIN


def test_threshold_zero_is_the_one_step_chain_and_one_call() -> None:
    world = World.random(seed=4)
    sampler = samplers.Threshold(threshold=0.0)
    assert fits(world, draw(world, sampler), world.chain_law(LogLinear(), 1)) > P_MIN
    canvas = Canvas.blank(num=9, length=3, mask_id=2)
    assert len(list(steps(world.denoiser(), canvas, sampler))) == 1


WHOLLY_RANDOM = [
    samplers.Confidence(random=1.0),
    samplers.Margin(random=1.0),
    samplers.Entropy(random=1.0, tokens=1),
    samplers.EntropyBounded(random=1.0, gamma=0.0),
    samplers.Threshold(random=1.0, threshold=1.0),
]


@pytest.mark.parametrize("sampler", WHOLLY_RANDOM, ids=lambda s: type(s).__name__)
def test_wholly_random_is_the_random_order(sampler: Sampler) -> None:
    world = World.random(V=3, L=3, seed=4)
    assert fits(world, draw(world, sampler), random_order_law(world)) > P_MIN


def test_half_random_is_the_mix_it_says() -> None:
    """Three positions: the first to open is the largest of (place in the order)/2 + u/2, by quadrature over u."""
    world = World.random(V=2, L=3, seed=8)
    p = world.x_theta(torch.full((1, 3), 2), 1.0)[0]
    order = surest(p, [0, 1, 2], 0)
    g = torch.Generator().manual_seed(0)
    u = torch.rand(400_000, 3, generator=g, dtype=torch.float64)
    priority = 0.5 * u
    for place, i in enumerate(order):
        priority[:, i] += 0.5 * (1 - place / 3)
    expected = torch.bincount(priority.argmax(dim=1), minlength=3) / len(u)
    canvas = Canvas.blank(num=NUM, length=3, mask_id=2, seed=1)
    step = next(steps(world.denoiser(), canvas, samplers.Confidence(random=0.5)))
    observed = torch.bincount(step.position_N, minlength=3) / NUM
    assert (observed - expected).abs().max() < 0.015
    assert 0.01 < float(expected.min()) < float(expected.max()) < 0.9  # neither all random nor all score


# --- ways of drawing --------------------------------------------------------------------------------------------------


def hot(p: Tensor, temperature: float) -> Tensor:
    q = (p.log() / temperature).softmax(dim=-1)
    return torch.where(p > 0, q, 0.0)


def one_hot(p: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(p.argmax(), len(p)).double()


LEFT = (samplers.LeftToRight, lambda p, masked, turn: masked[:1])
SURE = (samplers.Confidence, lambda p, masked, turn: surest(p, masked, turn)[:1])


@pytest.mark.parametrize(("cls", "opens"), [LEFT, SURE], ids=["left_to_right", "confidence"])
def test_hybrid_takes_the_likeliest_where_it_is_sure(cls: type, opens: Opens) -> None:
    world = World.random(V=3, L=3, seed=6)
    law = adaptive_law(world, opens, lambda p, share: one_hot(p) if float(p.max()) >= 0.85 else hot(p, 1.5))
    tokens = draw(world, cls(draw="hybrid", sure=0.85, temperature=1.5))
    assert fits(world, tokens, law) > P_MIN
    assert len(tokens.unique(dim=0)) > 3


@pytest.mark.parametrize(("cls", "opens"), [LEFT, SURE], ids=["left_to_right", "confidence"])
def test_temperature_moves_with_the_share_that_is_written(cls: type, opens: Opens) -> None:
    world = World.random(V=3, L=3, seed=7)
    law = adaptive_law(world, opens, lambda p, share: hot(p, 2.0 + (0.5 - 2.0) * share))
    assert fits(world, draw(world, cls(temperature=2.0, temperature_end=0.5)), law) > P_MIN


def test_temperature_over_time_in_the_reverse_chains() -> None:
    """All but the first token at a lower temperature; planned and adaptive random orders agree."""
    world = World.random(V=3, L=2, seed=7)
    laws = []
    for first in (0, 1):
        order: Opens = lambda p, masked, turn, first=first: [first if turn == 0 else 1 - first]  # type: ignore[misc] # noqa: E731
        laws.append(adaptive_law(world, order, lambda p, share: hot(p, 1.0 - 0.6 * share)))
    for sampler in (
        samplers.Ancestral(steps=None, temperature_end=0.4),
        samplers.Confidence(random=1.0, temperature_end=0.4),
    ):
        assert fits(world, draw(world, sampler), (laws[0] + laws[1]) / 2) > P_MIN


@pytest.mark.parametrize(
    "make", [samplers.Ancestral, samplers.LeftToRight, samplers.Posterior, samplers.Confidence, samplers.Threshold]
)
def test_argmax_is_temperature_zero_and_a_cold_end_is_the_argmax(make: type) -> None:
    world = World.random(V=3, L=3, seed=9)
    assert draw(world, make(draw="argmax"), 50).equal(draw(world, make(temperature=0.0), 50))
    cold = make(temperature=0.0, temperature_end=0.0)
    assert draw(world, cold, 50).equal(draw(world, make(temperature=0.0), 50))


def test_the_whole_law_is_drawn_by_the_plain_draw_alone() -> None:
    """What a GPU may draw in one kernel: nothing but one temperature."""
    assert samplers.Ancestral(temperature=0.7).draws_whole_law
    for options in ({"draw": "argmax"}, {"draw": "hybrid"}, {"temperature_end": 1.0}, {"top_k": 3}):
        assert not samplers.Ancestral(**options).draws_whole_law


# --- blocks, and the end of a text ------------------------------------------------------------------------------------

INNER: list[Sampler] = [
    samplers.Ancestral(steps=None),
    samplers.LeftToRight(),
    samplers.Confidence(),
    samplers.Margin(),
    samplers.Entropy(),
    samplers.EntropyBounded(gamma=0.0),
    samplers.Confidence(random=0.5),
]


@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_blocks_one_token_a_call_with_the_true_conditionals_sample_the_data(inner: Sampler) -> None:
    """Any order that does not look at what it will draw leaves the data law alone; so do blocks around it."""
    world, law = data_world()
    assert fits(world, draw(world, samplers.Block(size=3, inner=inner)), law) > P_MIN


def test_a_block_opens_before_the_next() -> None:
    world = World.random(V=2, L=4, seed=2)

    def by_blocks(p: Tensor, masked: list[int], turn: int) -> list[int]:
        block = [i for i in masked if i // 2 == masked[0] // 2]
        return surest(p, block, turn)[:1]

    law = adaptive_law(world, by_blocks)
    assert fits(world, draw(world, samplers.Block(size=2)), law) > P_MIN
    sees = World.random(V=2, L=4, seed=2, level=True)
    assert fits(sees, draw(sees, samplers.Block(size=2)), adaptive_law(sees, by_blocks)) > P_MIN


def shown(row: list[int], given: list[int], end: int) -> list[int]:
    """The text up to the end that was written."""
    for i, token in enumerate(row):
        if token == end and given[i] != token:
            return row[:i]
    return row


ENDING: list[Sampler] = [
    *INNER,
    samplers.Ancestral(steps=3),
    samplers.Posterior(steps=3),
    samplers.Threshold(threshold=0.6),
    samplers.Block(size=2),
    samplers.Block(size=2, inner=samplers.Ancestral(steps=2)),
]


@pytest.mark.parametrize("sampler", ENDING, ids=repr)
def test_rows_that_have_ended_leave_and_show_the_same(sampler: Sampler) -> None:
    world = World.random(V=3, L=6, seed=11)
    mask = world.mask_id
    given = [[mask] * 6, [0, mask, mask, mask, 0, mask], [1, 2, mask, mask, mask, mask]] * 20
    canvas = Canvas.of(torch.tensor(given), mask_id=mask, seed=3)
    plain = sample(world.denoiser(), canvas, sampler).tokens.tolist()
    looks = []

    def count(z_BL: Tensor, level_B: Tensor | None) -> Tensor:
        looks.append(len(z_BL))
        return world.f(z_BL, level_B)

    net = as_denoiser(count, vocab_size=world.V, mask_id=mask, uses_level=False)
    ended = sample(net, replace(canvas, end_id=0), sampler).tokens.tolist()
    with_end = sum(looks)
    looks.clear()
    sample(net, canvas, sampler)
    assert all(mask not in row for row in ended)
    assert [shown(r, g, 0) for r, g in zip(ended, given, strict=True)] == [
        shown(r, g, 0) for r, g in zip(plain, given, strict=True)
    ]
    assert ended != plain
    assert with_end < sum(looks) or isinstance(sampler, samplers.Posterior)  # it looks at all rows, open or not


@pytest.mark.parametrize("inner", [s for s in ENDING if not s.left_to_right], ids=repr)
def test_windows_of_rows_that_have_ended_are_skipped(inner: Sampler) -> None:
    world = World.random(V=3, L=2, seed=11)
    sampler = samplers.SemiAR(window=2, stride=1, inner=inner)
    canvas = Canvas.blank(num=40, length=9, mask_id=3, seed=3)
    plain = sample(world.denoiser(), canvas, sampler).tokens.tolist()
    ended = sample(world.denoiser(), replace(canvas, end_id=0), sampler).tokens.tolist()
    assert all(3 not in row for row in ended)
    assert [shown(row, [3] * 9, 0) for row in ended] == [shown(row, [3] * 9, 0) for row in plain]
    world.logits[..., 0] = 100.0  # every row ends at once: one window, and no more calls
    calls = len(list(steps(world.denoiser(), replace(canvas, end_id=0), sampler)))
    assert calls <= inner.max_calls(2)
    assert (sample(world.denoiser(), replace(canvas, end_id=0), sampler).tokens == 0).all()


def test_an_autoregressive_model_stops_at_the_end_of_its_texts() -> None:
    torch.manual_seed(0)
    net = DiT(size="nano", hidden=32, blocks=1, heads=2, causal=True).build(num_ids=5, mask_id=4).eval()
    given = [[4] * 24, [0, 1] + [4] * 22, [2, 0, 3] + [4] * 21]
    canvas = Canvas.of(torch.tensor(given), mask_id=4, seed=1)
    plain = sample(net, canvas, samplers.LeftToRight()).tokens.tolist()
    seen = list(steps(net, replace(canvas, end_id=0), samplers.LeftToRight()))
    ended = seen[-1].tokens_BL.tolist()
    assert [shown(r, g, 0) for r, g in zip(ended, given, strict=True)] == [
        shown(r, g, 0) for r, g in zip(plain, given, strict=True)
    ]
    assert ended != plain
    assert len(seen) < 24
    assert all(4 not in row for row in ended)


def test_a_constrained_draw_takes_one_temperature() -> None:
    for options in ({"draw": "hybrid"}, {"temperature_end": 0.5}):
        with pytest.raises(UsageError, match="a constrained draw has one temperature"):
            constrained(samplers.Ancestral(**options))
    assert isinstance(constrained(samplers.LeftToRight(draw="argmax")), Constrained)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: samplers.Confidence(steps=2, tokens=2), "give one of them"),
    (lambda: samplers.Confidence(steps=0), r"steps must lie in 1\.\."),
    (lambda: samplers.Margin(tokens=0), r"tokens must lie in 1\.\."),
    (lambda: samplers.Entropy(random=1.5), r"random is the share of the order that is random, in \[0, 1\]"),
    (lambda: samplers.EntropyBounded(gamma=-1.0), "gamma is a bound in nats"),
    (lambda: samplers.EntropyBounded(gamma=math.nan), "gamma is a bound in nats"),
    (lambda: samplers.Threshold(threshold=1.1), "threshold is a probability"),
    (lambda: samplers.Block(size=0), "size is the number of tokens in a block"),
    (lambda: samplers.Block(inner=samplers.SemiAR(window=4)), "put block into semi_ar"),
    (lambda: samplers.Ancestral(draw="agrmax"), "did you mean 'argmax'"),
    (lambda: samplers.Ancestral(sure=2.0), "sure is a probability"),
    (lambda: samplers.LeftToRight(temperature_end=-1.0), "temperature_end must be 0 or more"),
    (lambda: samplers.LeftToRight(temperature=math.inf), "temperature must be 0 or more"),
    (lambda: replace(Canvas.blank(num=1, length=1, mask_id=2), end_id=2), "a mask cannot end a text"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_options_are_refused_in_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as e:
        make()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e39, 1e300])
@pytest.mark.parametrize("name", ["ancestral", "confidence", "posterior", "remdm", "left_to_right"])
def test_extreme_temperatures_are_only_cold_and_hot(name: str, temperature: float) -> None:
    world = World.random(V=3, L=4, seed=1)
    canvas = Canvas.blank(num=50, length=4, mask_id=world.mask_id)
    for options in ({"temperature": temperature}, {"temperature_end": temperature}):
        tokens = sample(world.denoiser(), canvas, samplers.room.get(name)(**options)).tokens
        assert not (tokens == world.mask_id).any()


@pytest.mark.parametrize("name", ["ancestral", "confidence", "posterior", "remdm", "left_to_right"])
def test_a_network_whose_answer_is_no_number_is_told(name: str) -> None:
    broken = as_denoiser(lambda z, level: torch.full((*z.shape, 3), torch.nan), vocab_size=2, mask_id=2)
    with pytest.raises(NonFiniteError, match="not a number"):
        sample(broken, Canvas.blank(num=2, length=4, mask_id=2), samplers.room.get(name)())


# --- how many a call, and how much of the order is random -------------------------------------------------------------


def opened(sampler: Sampler, tokens: list[int], seed: int = 0) -> list[list[int]]:
    """The positions of each call, of a network that finds everything equally likely."""
    coin = as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    canvas = Canvas.of(torch.tensor([tokens]), mask_id=2, seed=seed)
    return [step.position_N.tolist() for step in steps(coin, canvas, sampler)]


def test_left_to_right_opens_as_many_as_it_is_told() -> None:
    row = [2, 2, 0, 2, 2, 2, 1, 2, 2]
    assert opened(samplers.LeftToRight(tokens=3), row) == [[0, 1, 3], [4, 5, 7], [8]]
    assert opened(samplers.LeftToRight(steps=2), row) == [[0, 1, 3, 4], [5, 7, 8]]
    assert opened(samplers.LeftToRight(steps=99), row) == opened(samplers.LeftToRight(), row)
    assert [len(call) for call in opened(samplers.Ancestral(tokens=3), row)] == [3, 3, 1]
    assert [len(call) for call in opened(samplers.LeftToRight(steps=3, random=0.7), row)] == [3, 2, 2]


def test_the_random_share_of_left_to_right_goes_from_none_to_all() -> None:
    row = [2] * 40
    for random, least, most in ((0.0, 0, 0), (0.05, 1, 120), (1.0, 250, 530)):
        found = [p for call in opened(samplers.LeftToRight(random=random), row, seed=3) for p in call]
        assert sorted(found) == list(range(40))
        swapped = sum(a > b for i, a in enumerate(found) for b in found[i + 1 :])
        assert least <= swapped <= most


@pytest.mark.parametrize("sampler", [samplers.Ancestral(tokens=1), samplers.LeftToRight(random=1.0)], ids=repr)
def test_one_token_a_call_in_a_random_order_has_the_law_of_continuous_time(sampler: Sampler) -> None:
    world = World.random(V=2, L=3, seed=5)
    assert fits(world, draw(world, sampler), random_order_law(world)) > P_MIN


def test_what_the_model_decides_has_a_cap_and_an_end() -> None:
    row = [2] * 8  # all alike: everything reaches a threshold of 0.4 and nothing one of 0.6
    assert [len(call) for call in opened(samplers.Threshold(threshold=0.4, tokens=3), row)] == [3, 3, 2]
    assert [len(call) for call in opened(samplers.Threshold(threshold=0.6, steps=3), row)] == [3, 3, 2]
    assert [len(call) for call in opened(samplers.EntropyBounded(gamma=9.0, tokens=5), row)] == [5, 3]
    assert [len(call) for call in opened(samplers.EntropyBounded(gamma=0.0, steps=2, tokens=1), row)] == [4, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: samplers.LeftToRight(tokens=0), "tokens must lie in"),
        (lambda: samplers.LeftToRight(tokens=2, steps=2), "give one of them"),
        (lambda: samplers.LeftToRight(random=1.5), "random is the share"),
        (lambda: samplers.Ancestral(tokens=0), "tokens must lie in"),
        (lambda: samplers.Threshold(steps=0), "steps must lie in"),
    ],
)
def test_numbers_of_calls_that_cannot_be(make: Callable[[], Sampler], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_an_autoregressive_model_is_read_column_by_column() -> None:
    net = DiT(hidden=8, blocks=1, heads=2, causal=True).build(num_ids=3, mask_id=2)
    for sampler in (samplers.LeftToRight(tokens=2), samplers.LeftToRight(random=0.5)):
        with pytest.raises(UsageError, match="opens from left to right"):
            sample(net, Canvas.blank(num=1, length=4, mask_id=2), sampler)
