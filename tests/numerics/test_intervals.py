"""Draws in groups, and intervals from them that cover, also where their width decides when to stop."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from chains import World

import unmask
from unmask.errors import UsageError
from unmask.evaluation.against import Pair, difference
from unmask.evaluation.bound import Bound
from unmask.metrics.perplexity import Perplexity, until_narrow
from unmask.model import Model
from unmask.objectives.draws import Draws, bound_draws
from unmask.rng import row_keys


class Repeats:
    """A thousand repeats of an evaluation of 12 rows on a toy whose bounds are enumerated, by any draws."""

    rows, num = 12, 1000

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World.random(V=2, L=3, seed=9)
        generator = torch.Generator().manual_seed(1)
        self.chosen_RB = torch.randint(0, len(self.world.texts), (self.num, self.rows), generator=generator)
        self.bound_X = torch.tensor([self.world.count_bound(x) for x in self.world.texts], dtype=torch.float64)
        self.made: dict[Draws, torch.Tensor] = {}

    def measured(self, repeat: int, draws: Draws) -> Bound:
        if draws not in self.made:
            x_BL = self.world.texts[self.chosen_RB.flatten()]
            how: dict[str, Any] = {"num_samples": draws, "seed": 2, "estimator": "count"}
            made = unmask.objectives.MDLM().bound(self.world.denoiser(), x_BL, **how)
            self.made[draws] = made.draws_BS.view(self.num, self.rows, -1)
        return Bound(draws_BS=self.made[draws][repeat], tokens_B=torch.full((self.rows,), self.world.L))

    def given_texts(self, repeat: int) -> float:
        return float(self.bound_X[self.chosen_RB[repeat]].mean()) / self.world.L

    def over_texts(self) -> float:
        return float(self.bound_X.mean()) / self.world.L


@pytest.fixture(scope="module")
def repeats() -> Repeats:
    return Repeats()


@pytest.mark.parametrize(
    "draws",
    [Draws(4, 1), *(Draws.of(num, Repeats.rows) for num in (4, 8, 16, 32)), Draws.of(16)],
    ids=lambda draws: f"{draws.groups}x{draws.size}",
)
def test_intervals_cover(repeats: Repeats, draws: Draws) -> None:
    """That of draws alone the bound of the texts, that of both the mean over all texts; in the mean they hit both."""
    given = over = 0
    means = []
    for repeat in range(repeats.num):
        bound = repeats.measured(repeat, draws)
        assert bound.draws_BS.shape[1] == draws.groups
        lo, hi = bound.draws_ci95
        given += lo <= repeats.given_texts(repeat) <= hi
        lo, hi = bound.ci95
        over += lo <= repeats.over_texts() <= hi
        means.append(bound.nats_per_token - repeats.given_texts(repeat))
    assert 0.93 <= given / repeats.num <= 0.97, given
    assert 0.93 <= over / repeats.num <= 0.97, over
    off = torch.tensor(means)
    assert abs(float(off.mean())) < 4.5 * float(off.std()) / math.sqrt(repeats.num)


@pytest.mark.parametrize("precision", [0.08, 0.05, 0.04])
def test_the_interval_covers_where_its_width_decides_when_to_stop(repeats: Repeats, precision: float) -> None:
    given, ended = 0, set()
    for repeat in range(repeats.num):
        measure = functools.partial(repeats.measured, repeat)
        bound, draws = until_narrow(measure, repeats.rows, precision)
        assert bound.draws_half <= precision
        assert bound.draws_BS.shape[1] == draws.groups
        lo, hi = bound.draws_ci95
        given += lo <= repeats.given_texts(repeat) <= hi
        ended.add(draws.num)
    assert len(ended) > 1  # it did decide
    assert 0.93 <= given / repeats.num <= 0.97, (given, ended)


def test_the_interval_of_a_difference_covers(repeats: Repeats) -> None:
    """Of two models on the same texts with the same draws; and pairing makes it narrower than two intervals are."""
    other = World.random(V=2, L=3, seed=10)
    other.logits = 0.8 * repeats.world.logits + 0.2 * other.logits
    theirs = Repeats(other)
    apart_X = repeats.bound_X - theirs.bound_X
    draws = Draws.of(8, Repeats.rows)
    given = over = narrower = 0
    for repeat in range(repeats.num):
        ours, second = repeats.measured(repeat, draws), theirs.measured(repeat, draws)
        found = difference(ours, second, "nats per token")
        lo, hi = found.value - found.draws_half, found.value + found.draws_half
        given += lo <= float(apart_X[repeats.chosen_RB[repeat]].mean()) / repeats.world.L <= hi
        assert found.interval.ci95 is not None
        lo, hi = found.interval.ci95
        over += lo <= float(apart_X.mean()) / repeats.world.L <= hi
        narrower += found.draws_half < math.hypot(ours.draws_half, second.draws_half)
    assert 0.93 <= given / repeats.num <= 0.97, given
    assert 0.93 <= over / repeats.num <= 0.97, over
    assert narrower > 0.99 * repeats.num


def test_the_interval_of_a_difference_covers_where_its_width_decides_when_to_stop(repeats: Repeats) -> None:
    """And it stops before either bound is as narrow."""
    other = World.random(V=2, L=3, seed=10)
    other.logits = 0.8 * repeats.world.logits + 0.2 * other.logits
    theirs, precision = Repeats(other), 0.02
    apart_X = repeats.bound_X - theirs.bound_X
    given, ended = 0, set()
    for repeat in range(repeats.num):
        found, draws = until_narrow(
            lambda draws, repeat=repeat: Pair(repeats.measured(repeat, draws), theirs.measured(repeat, draws)),
            repeats.rows,
            precision,
        )
        assert found.draws_half <= precision < found.ours.draws_half
        value = found.difference.value
        truth = float(apart_X[repeats.chosen_RB[repeat]].mean()) / repeats.world.L
        given += value - found.draws_half <= truth <= value + found.draws_half
        ended.add(draws.num)
    assert len(ended) > 1
    assert 0.93 <= given / repeats.num <= 0.97, (given, ended)


def test_groups_grow_and_keep_what_they_have() -> None:
    """Doubled and joined, the draws are those of the larger `Draws`: no more, no other, none twice."""
    key_B = row_keys(3, torch.arange(5))

    def drawn(draws: Draws) -> list[list[tuple[list[int], list[float]]]]:
        return [[(key.tolist(), time.tolist()) for key, time in group] for group in bound_draws(key_B, draws)]

    four = Draws(2, 4)
    assert [a + b for a, b in zip(drawn(four), drawn(four.doubled()), strict=True)] == drawn(Draws(2, 8))
    assert drawn(four) + drawn(four.joined_by(3)) == drawn(Draws(5, 4))
    keys = [tuple(key) for group in drawn(Draws(5, 8)) for key, _ in group]
    assert len(set(keys)) == len(keys)


def test_every_number_of_draws_is_drawn_and_spread_evenly() -> None:
    for num, rows in itertools.product([*range(1, 26), 31, 32, 64, 100], (1, 1000)):
        draws = Draws.of(num, rows)
        groups = [[float(time) for _, (time,) in group] for group in bound_draws(torch.tensor([7]), draws)]
        assert sum(map(len, groups)) == num
        assert len(groups) >= min(2, num)
        for times in groups:
            assert sorted(int((1 - time) * draws.size) for time in times) == list(range(draws.size))
            gaps = torch.tensor(sorted(times)).diff() * draws.size
            assert torch.allclose(gaps, torch.ones_like(gaps), atol=1e-6)


def test_precision_draws_until_the_interval_is_narrow(model: Model, ar_model: Model) -> None:
    texts = ["the cat sat on the mat", "a dog ran"]
    fine = unmask.evaluate(model, texts, metric=Perplexity(precision=0.08))
    assert fine.bound is not None
    lo, hi = fine.bound.draws_ci95
    assert (hi - lo) / 2 <= 0.08
    assert fine.protocol["precision_reached"] is True
    assert fine.protocol["draws_per_row"] % fine.bound.draws_BS.shape[1] == 0
    assert 2 * (fine.bound.draws_BS.shape[1] - 1) >= 30  # of fewer an interval may be narrow by chance
    # what is added is new: no column of draws comes twice
    assert len({tuple(c) for c in fine.bound.draws_BS.T.tolist()}) == fine.bound.draws_BS.shape[1]
    assert unmask.evaluate(ar_model, texts, metric=Perplexity(precision=0.08)).protocol["draws_per_row"] == 1
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(UsageError, match="precision"):
            Perplexity(precision=wrong)
