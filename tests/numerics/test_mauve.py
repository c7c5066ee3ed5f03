"""MAUVE against the integral of its frontier, its cells against blobs, its interval against leaving texts out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from unmask.evaluation.judging.mauve import SCALE, area, mauve, quantise


def blobs(seed: int, num: int, at: list[float]) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num, len(at))) * 0.1 + np.array(at)


def test_disjoint_histograms_have_the_area_of_the_beta_integral() -> None:
    """Of P = (1, 0) and Q = (0, 1) the frontier is ((1-w)^c, w^c): its area is c B(c + 1, c)."""
    exact = SCALE * math.gamma(SCALE + 1) * math.gamma(SCALE) / math.gamma(2 * SCALE + 1)
    assert area(np.array([3.0, 0.0]), np.array([0.0, 7.0])) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(("p", "q"), [((1, 1), (1, 3)), ((5, 1, 0), (1, 2, 3)), ((1, 2, 3, 4), (4, 3, 2, 1))])
def test_the_area_is_the_integral_of_the_frontier(p: tuple[int, ...], q: tuple[int, ...]) -> None:
    p_K, q_K = np.array(p) / sum(p), np.array(q) / sum(q)
    w = np.linspace(1e-9, 1 - 1e-9, 40_001)[:, None]
    r = w * p_K + (1 - w) * q_K

    def divergence(of_K: np.ndarray) -> np.ndarray:
        return np.where(of_K > 0, of_K * np.log(np.where(of_K > 0, of_K, 1) / r), 0).sum(axis=1)

    x, y = np.exp(-SCALE * divergence(q_K)), np.exp(-SCALE * divergence(p_K))
    exact = float(np.trapezoid(np.r_[1.0, y[::-1]], np.r_[0.0, x[::-1]]))  # from (0, 1) to R = Q at x = 1
    assert area(np.array(p, float), np.array(q, float)) == pytest.approx(exact, rel=0.02)
    assert area(p_K, q_K) == pytest.approx(area(q_K, p_K))


def test_the_same_set_is_near_one_and_a_far_one_near_zero() -> None:
    here, there = blobs(0, 60, [1.0, 0.0, 0.0]), blobs(1, 60, [0.0, 0.0, 1.0])
    assert mauve(here, here)[0] == pytest.approx(1.0)
    assert mauve(here, blobs(2, 60, [1.0, 0.0, 0.0]))[0] > 0.8
    assert mauve(here, there)[0] < 0.01
    half = np.concatenate([here[:30], there[:30]])
    assert 0.1 < mauve(here, half)[0] < 0.9  # one of two modes dropped


def test_cells_are_the_blobs() -> None:
    x = np.concatenate([blobs(k, 20, [float(k == i) for i in range(4)]) for k in range(4)])
    cell_N = quantise(x, 4)
    assert [len(set(cell_N[20 * k : 20 * k + 20].tolist())) for k in range(4)] == [1, 1, 1, 1]
    assert len(set(cell_N.tolist())) == 4
    assert quantise(x, 4).tolist() == cell_N.tolist()  # of the seed alone


def test_fewer_vectors_than_cells() -> None:
    x = np.ones((6, 3))
    assert quantise(x, 3).tolist() == [0] * 6
    assert mauve(x, x, cells=3)[0] == pytest.approx(1.0)


def test_the_interval_is_that_of_leaving_texts_out() -> None:
    p, q = blobs(0, 20, [1.0, 0.0]), np.concatenate([blobs(1, 12, [1.0, 0.0]), blobs(2, 10, [0.0, 1.0])])
    cell_N = quantise(np.concatenate([p, q]), 2)

    def counts(cells: np.ndarray) -> np.ndarray:
        return np.bincount(cells, minlength=2).astype(float)

    variance = 0.0
    for mine, other in ((cell_N[:20], cell_N[20:]), (cell_N[20:], cell_N[:20])):
        without = np.array([area(counts(np.delete(mine, i)), counts(other)) for i in range(len(mine))])
        variance += (len(mine) - 1) / len(mine) * ((without - without.mean()) ** 2).sum()
    value, (lo, hi) = mauve(p, q)
    assert value == pytest.approx(area(counts(cell_N[:20]), counts(cell_N[20:])))
    assert (lo, hi) == pytest.approx((value - 1.96 * math.sqrt(variance), value + 1.96 * math.sqrt(variance)))
    assert lo > 0
    assert hi < 1
