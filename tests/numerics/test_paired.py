"""Gaps between systems: hand values, what pairing takes away, and how often an interval holds the true gap."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unmask.evaluation.paired import Interval, gap, level, seed_noise, slope

T2 = 4.302652729911275  # Student's t, 97.5%, 2 degrees of freedom
SIMULATIONS = 1500


def test_a_gap_over_texts_by_hand() -> None:
    """Three texts of 1, 2 and 3 tokens, differences 1, 1 and 4: the ratio is 1, the residuals 0, -1 and 1."""
    ours, theirs = torch.tensor([3.0, 2.0, 9.0]), torch.tensor([2.0, 1.0, 5.0])
    found = gap({0: ours}, {0: theirs}, torch.tensor([1, 2, 3]))
    assert found.value == pytest.approx(1.0)
    error = math.sqrt((0 + 1 + 1) * 3 / 2) / 6
    assert found.texts_half == pytest.approx(T2 * error, rel=1e-3)
    assert found.seeds_half is None
    assert found.ci95 == pytest.approx((1 - T2 * error, 1 + T2 * error), rel=1e-3)


def test_a_gap_over_seeds_by_hand() -> None:
    """Seeds whose gaps are 1, 2 and 3 on every text: no spread over texts, and over seeds t times 1/sqrt(3)."""
    tokens = torch.tensor([2, 2])
    theirs = {seed: torch.tensor([5.0, 7.0]) + 10 * seed for seed in range(3)}  # a seed's own level leaves the gap
    ours = {seed: theirs[seed] + 2.0 * (seed + 1) for seed in range(3)}
    found = gap(ours, theirs, tokens)
    assert found.value == pytest.approx(2.0)
    assert found.texts_half == pytest.approx(0.0, abs=1e-12)
    assert found.seeds_half == pytest.approx(T2 / math.sqrt(3), rel=1e-3)
    assert found.seeds_from == "paired seeds"
    assert found.verdict == "not visible"


def test_half_widths_add_as_squares() -> None:
    assert Interval(1.0, 0.3, 0.4, "paired seeds").half == pytest.approx(0.5)


def test_seeds_that_are_not_shared_take_the_noise_of_others() -> None:
    noise = seed_noise([[1.0, 2.0, 3.0], [7.0]])
    assert noise is not None
    assert (noise.deviation, noise.freedom) == (1.0, 2)
    texts = torch.tensor([4.0, 4.0])
    found = gap({0: texts + 2}, {0: texts, 1: texts, 2: texts}, torch.tensor([1, 1]), noise)
    assert found.seeds_half == pytest.approx(T2 * math.sqrt(1 + 1 / 3), rel=1e-3)
    assert found.seeds_from == "noise of other systems"
    assert found.verdict == "not visible"  # a gap of 2 is nothing beside it
    assert gap({0: texts + 2}, {0: texts}, torch.tensor([1, 1])).verdict == "one seed"
    assert gap({0: texts + 20}, {0: texts, 1: texts, 2: texts}, torch.tensor([1, 1]), noise).verdict == "visible"


def test_pairing_takes_away_what_texts_have_in_common() -> None:
    torch.manual_seed(0)
    tokens, hard = torch.full((200,), 30), 30 * torch.rand(200) * 5
    ours, theirs = hard + 1.5 + torch.randn(200) * 0.1, hard + torch.randn(200) * 0.1
    paired = gap({0: ours}, {0: theirs}, tokens)
    each = [level({0: nats}, tokens) for nats in (ours, theirs)]
    assert paired.half is not None
    assert paired.half < 0.01 * math.hypot(*(one.half or 0.0 for one in each))
    assert paired.value == pytest.approx(each[0].value - each[1].value)


def test_the_slope_in_one_over_T() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(5, 9, (40,))
    base, per = torch.randn(40) + 3, torch.randn(40) * 0.2 + 2
    nats = {T: (base + per / T) * tokens for T in (4, 16, 64, 1000)}
    limit, found = slope(nats, tokens)
    for fitted, true in ((limit, base), (found, per)):
        mean = float((true * tokens).sum() / tokens.sum())
        assert fitted.value == pytest.approx(mean)
        assert fitted.ci95 == pytest.approx(level({0: true * tokens}, tokens).ci95)


Draw = Callable[[torch.Generator], tuple[dict[int, Tensor], dict[int, Tensor], Tensor]]


def world(seeds: int, *, seed_sd: float, text_sd: float, rest_sd: float, texts: int = 60) -> Draw:
    """Differences 0.5 + a seed's + a text's + the rest, per token, under levels that vary far more."""

    def draw(g: torch.Generator) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        tokens = torch.randint(20, 40, (texts,), generator=g)
        hard = torch.randn(texts, generator=g, dtype=torch.float64) * 3 + 5
        own = torch.randn(texts, generator=g, dtype=torch.float64) * text_sd
        theirs = {s: (hard + torch.randn(1, generator=g).double()) * tokens for s in range(seeds)}
        shift = torch.randn(seeds, generator=g, dtype=torch.float64) * seed_sd
        rest = torch.randn(seeds, texts, generator=g, dtype=torch.float64) * rest_sd
        ours = {s: theirs[s] + (0.5 + shift[s] + own + rest[s]) * tokens for s in range(seeds)}
        return ours, theirs, tokens

    return draw


@pytest.mark.parametrize(
    ("draw", "least", "most"),
    [
        (world(1, seed_sd=0.0, text_sd=1.0, rest_sd=0.0), 0.93, 0.97),  # texts alone
        (world(3, seed_sd=1.0, text_sd=0.1, rest_sd=0.1), 0.93, 0.97),  # seeds alone, nearly
        (world(5, seed_sd=1.0, text_sd=0.1, rest_sd=0.1), 0.93, 0.97),
        (world(3, seed_sd=0.3, text_sd=1.0, rest_sd=0.3), 0.93, 0.98),  # both: never too narrow
        (world(5, seed_sd=0.1, text_sd=1.0, rest_sd=0.3), 0.93, 0.985),
    ],
    ids=["texts", "seeds", "five-seeds", "both", "texts-mostly"],
)
def test_the_interval_holds_the_true_gap_as_often_as_it_says(draw: Draw, least: float, most: float) -> None:
    g = torch.Generator().manual_seed(1)
    held = 0
    for _ in range(SIMULATIONS):
        ci95 = gap(*draw(g)).ci95
        assert ci95 is not None
        held += ci95[0] <= 0.5 <= ci95[1]
    assert least <= held / SIMULATIONS <= most
