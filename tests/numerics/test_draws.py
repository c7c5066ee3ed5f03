"""The hash is uniform, its streams are independent, and categorical draws are exact in the tail."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from unmask.data.batch import low_discrepancy_times
from unmask.rng import categorical, fold, row_keys, uniform

N = 200_000


def test_uniform_by_chi_square_and_ks() -> None:
    key = row_keys(3, torch.arange(N // 100))
    u = uniform(key[:, None], 1, torch.arange(100)).flatten().numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    assert stats.chisquare(np.histogram(u, 1000, (0, 1))[0]).pvalue > 1e-4


def test_neighbouring_counters_and_keys_are_independent() -> None:
    key = row_keys(0, torch.arange(N))
    streams = [uniform(key, 0, 0), uniform(key, 1, 0), uniform(key, 0, 1), uniform(row_keys(1, torch.arange(N)), 0, 0)]
    streams.append(uniform(key + 1, 0, 0))
    for i, a in enumerate(streams):
        for b in streams[:i]:
            cells = np.histogram2d(a.numpy(), b.numpy(), bins=20, range=[[0, 1], [0, 1]])[0]
            assert stats.chisquare(cells.flatten()).pvalue > 1e-5
            assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(N)


def test_every_output_bit_is_fair() -> None:
    bits = fold(row_keys(5, torch.arange(N)), 2)
    for shift in range(64):
        ones = int(((bits >> shift) & 1).sum())
        assert abs(ones - N / 2) < 4.5 * np.sqrt(N) / 2, shift


def test_big_and_negative_seeds_have_keys_of_their_own() -> None:
    rows = torch.arange(4)
    keys = [tuple(row_keys(seed, rows).tolist()) for seed in (0, 1, -1, 2**63, 2**64, 2**80, 2**80 + 1)]
    assert len(set(keys)) == len(keys)


def test_categorical_follows_its_law_far_into_the_tail() -> None:
    """50,000 tokens: one of probability 1/2, the rest share the other half; truncated draws miss most."""
    num = 50_000
    p = torch.full((num,), 0.5 / (num - 1), dtype=torch.float64)
    p[7] = 0.5
    u = uniform(row_keys(0, torch.arange(6_000)), 0)
    drawn = torch.cat([categorical(p.log().float().expand(len(part), num), part) for part in u.split(500)])
    heads = int((drawn == 7).sum())
    assert stats.binomtest(heads, len(u), 0.5).pvalue > 1e-4
    tail = drawn[drawn != 7].numpy()
    assert stats.kstest(tail / num, "uniform").pvalue > 1e-4


def test_categorical_never_draws_probability_zero() -> None:
    log_p = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, 5)
    u = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert categorical(log_p, u).tolist() == [1, 3, 3]


def test_low_discrepancy_times_are_spread_and_each_uniform() -> None:
    first = []
    for step in range(4000):
        t = low_discrepancy_times(fold(torch.tensor(1), step), torch.arange(8), 8)
        assert ((t > 0) & (t <= 1)).all()
        assert sorted(((1 - t) * 8).floor().int().tolist()) == list(range(8))  # one in each eighth
        first.append(float(t[0]))
    assert stats.kstest(first, "uniform").pvalue > 1e-4
