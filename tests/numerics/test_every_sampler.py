"""What holds for every sampler in the room, whatever its order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from chains import World
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmask import samplers
from unmask.denoisers.network import as_denoiser
from unmask.samplers import Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

PLAIN: list[Sampler] = [
    samplers.Ancestral(steps=2),
    samplers.Ancestral(steps=None, draw="hybrid", sure=0.7),
    samplers.Ancestral(steps=4, temperature=1.5, temperature_end=0.2),
    samplers.LeftToRight(),
    samplers.LeftToRight(temperature_end=0.0, top_k=2),
    samplers.LeftToRight(tokens=2, random=0.5),
    samplers.LeftToRight(steps=2),
    samplers.Ancestral(tokens=2),
    samplers.Posterior(steps=3),
    samplers.Posterior(steps=2, draw="hybrid", temperature_end=0.5),
    samplers.Confidence(),
    samplers.Confidence(steps=2, random=0.3),
    samplers.Confidence(tokens=2, draw="argmax", random=1.0),
    samplers.Margin(steps=3, temperature_end=0.1),
    samplers.Margin(tokens=3),
    samplers.Entropy(draw="hybrid", sure=0.5),
    samplers.Entropy(steps=1),
    samplers.EntropyBounded(gamma=0.5),
    samplers.EntropyBounded(gamma=1.0, random=0.5, tokens=2),
    samplers.Threshold(threshold=0.6, steps=2),
    samplers.Threshold(threshold=0.9, random=1.0, top_p=0.8),
    samplers.ReMDM(variant="cap", eta=0.4, steps=4),
    samplers.ReMDM(variant="rescale", eta=1.0, steps=3, draw="argmax"),
    samplers.ReMDM(variant="confidence", eta=1.0, steps=5),
    samplers.ReMDM(variant="loop", eta=0.5, steps=3, hold=0.3, loop=2, temperature_end=0.5),
    samplers.PredictorCorrector(steps=3, corrections=2, eta=0.5),
    samplers.Gibbs(sweeps=2),
    samplers.Gibbs(sweeps=1, scan="systematic", steps=2, draw="hybrid", temperature_end=0.3),
]
AROUND: list[Sampler] = [
    *(samplers.Refine(inner=inner, rounds=2, share=0.4) for inner in PLAIN[::4]),
    *(samplers.Block(size=2, inner=inner) for inner in PLAIN),
    samplers.Block(size=3, inner=samplers.Refine(rounds=1)),
]
EVERY = [*PLAIN, *AROUND]
WINDOWS: list[Sampler] = [
    samplers.SemiAR(window=3, stride=2, inner=inner) for inner in EVERY if not inner.left_to_right
]


def test_no_sampler_is_left_out_and_each_says_its_law() -> None:
    here = {samplers.room.name_of(sampler) for sampler in [*EVERY, *WINDOWS]}
    for name in samplers.room.names():
        cls = samplers.room.get(name)
        if cls.__module__.startswith("unmask."):
            # what is run here draws from log x_theta of absorbing states; others have tests of their own
            assert name in here or (isinstance(cls.accepts, tuple) and ("absorbing", "x0") not in cls.accepts)
            assert cls.law
            assert "\n" not in cls.law
            assert {"law", "cost"} <= vars(cls).keys()
            assert cls.__doc__.startswith("Order: ")
            assert "Calls: " in cls.__doc__.partition("\n")[0]


def check(
    net_of: World, sampler: Sampler, rows: list[list[int]], seed: int, end: int | None, forbidden: tuple[int, ...]
) -> None:
    mask, length = net_of.mask_id, len(rows[0])
    calls = 0

    def count(z_BL: Tensor, level_B: Tensor | None) -> Tensor:
        nonlocal calls
        calls += 1
        return net_of.f(z_BL, level_B)

    net = as_denoiser(count, vocab_size=net_of.V, mask_id=mask, uses_level=net_of.slope is not None)
    canvas = replace(Canvas.of(torch.tensor(rows), mask_id=mask, seed=seed), end_id=end, forbidden=forbidden)
    tokens = sample(net, canvas, sampler).tokens.tolist()
    assert calls <= sampler.max_calls(length)
    for i, (row, text) in enumerate(zip(rows, tokens, strict=True)):
        assert mask not in text
        assert all(a == b or (a == mask and b not in forbidden) for a, b in zip(row, text, strict=True))
        alone = replace(
            canvas, tokens=canvas.tokens[i : i + 1], open_BL=canvas.open_BL[i : i + 1], key_B=canvas.key_B[i : i + 1]
        )
        assert sample(net, alone, sampler).tokens[0].tolist() == text
    if end is not None:
        plain = sample(net, replace(canvas, end_id=None), sampler).tokens.tolist()
        for row, text, other in zip(rows, tokens, plain, strict=True):
            written = [j for j in range(length) if text[j] == end and row[j] == mask]
            stop = written[0] + 1 if written else length
            assert text[:stop] == other[:stop]


ENDS, FORBIDDEN = st.sampled_from([None, 0]), st.sampled_from([(), (1,)])


@st.composite
def canvases(draw: st.DrawFn, length: int) -> list[list[int]]:
    token = st.sampled_from([3, 3, 3, 0, 1, 2])  # mostly masks
    return draw(st.lists(st.lists(token, min_size=length, max_size=length), min_size=1, max_size=4))


@pytest.mark.parametrize("sampler", EVERY, ids=repr)
@given(rows=canvases(4), seed=st.integers(0, 10**6), level=st.booleans(), end=ENDS, forbidden=FORBIDDEN)
@settings(max_examples=8)
def test_every_sampler(
    sampler: Sampler, rows: list[list[int]], seed: int, level: bool, end: int | None, forbidden: tuple[int, ...]
) -> None:
    """Fixed positions never change, neither a mask nor a forbidden id is written, no more calls than promised, each row
    as if it were alone, and the same text up to its end whether or not rows leave there."""
    check(World.random(V=3, L=4, seed=seed % 13, level=level), sampler, rows, seed, end, forbidden)


@pytest.mark.parametrize("sampler", WINDOWS, ids=repr)
@given(rows=canvases(7), seed=st.integers(0, 10**6), end=ENDS, forbidden=FORBIDDEN)
@settings(max_examples=3)
def test_every_sampler_in_windows(
    sampler: Sampler, rows: list[list[int]], seed: int, end: int | None, forbidden: tuple[int, ...]
) -> None:
    check(World.random(V=3, L=3, seed=seed % 13), sampler, rows, seed, end, forbidden)


@pytest.mark.parametrize("sampler", EVERY, ids=repr)
def test_a_longer_neighbour_changes_nothing(sampler: Sampler) -> None:
    """Ragged rows; the network looks one position to the left, so that it sees no padding."""
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def left(z_BL: Tensor, level_B: Tensor | None) -> Tensor:
        before_BL = torch.cat([torch.zeros_like(z_BL[:, :1]), z_BL[:, :-1]], dim=1)
        return table[before_BL] + 0.3 * table[z_BL].flip(-1)

    net = as_denoiser(left, vocab_size=3, mask_id=3, uses_level=False)
    net.trunk = lambda z, level=None, *, valid_BL=None, at_BK, **_: (  # type: ignore[method-assign]
        left(z, level).gather(1, at_BK[..., None].expand(-1, -1, 4))
    )
    short, long = [3, 3, 1, 3, 3], [3] * 9
    alone = sample(net, Canvas.of_rows([short], mask_id=3, pad_id=0, seed=1), sampler).tokens
    among = sample(net, Canvas.of_rows([short, long], mask_id=3, pad_id=0, seed=1), sampler).tokens
    assert alone[0].equal(among[0, :5])
    assert (among[0, 5:] == 0).all()


def test_promised_calls_are_those_of_the_table() -> None:
    assert samplers.Confidence().max_calls(10) == 10
    assert samplers.Confidence(tokens=3).max_calls(10) == math.ceil(10 / 3)
    assert samplers.Entropy(steps=4).max_calls(10) == 4
    assert samplers.ReMDM(steps=8).max_calls(10) == 8
    assert samplers.ReMDM(steps=8, variant="loop", loop=3).max_calls(10) == 11
    assert samplers.PredictorCorrector(steps=4, corrections=2).max_calls(10) == 10
    assert samplers.Gibbs(sweeps=2).max_calls(10) == 30
    assert samplers.Refine(inner=samplers.Confidence(steps=2), rounds=3).max_calls(10) == 2 + 3 * (2 + 2)
    assert samplers.Block(size=4, inner=samplers.Confidence(steps=2)).max_calls(10) == 3 * 2
