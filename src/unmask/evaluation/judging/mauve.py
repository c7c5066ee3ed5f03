"""MAUVE: how close the distributions of two sets of texts are, computed from a vector for each text.

Pillutla et al., "MAUVE: Measuring the Gap Between Neural Text and Human Text using Divergence Frontiers" (arXiv
2102.01454, section 2): both sets are quantised together, P and Q are the shares of their texts in each cell, R = w P +
(1 - w) Q, and MAUVE is the area under the curve (exp(-c KL(Q | R)), exp(-c KL(P | R))) over w. As in the authors'
package, vectors are normalised to length 1 and projected to the principal components that hold 90% of the variance;
there are a tenth as many cells as texts, c = 5, and 25 weights. Unlike there, the cells come from our own seeded
k-means, and the caller chooses the vectors. So numbers are comparable only if they use the same vectors.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.rng import row_keys, uniform

Array = NDArray[np.float64]
SCALE = 5.0  # the paper's c
WEIGHTS = np.linspace(1e-6, 1 - 1e-6, 25)
EXPLAINED = 0.9  # share of the variance to keep
STARTS, ROUNDS = 5, 100  # restarts and iterations of k-means


def mauve(p_ND: Array, q_ND: Array, *, cells: int | None = None, seed: int = 0) -> tuple[float, tuple[float, float]]:
    """MAUVE of two sets of vectors, with a 95% interval: 1 for equal distributions, near 0 if they share no cell.

    cells: None: a tenth of the size of the smaller set, at least 2. The interval is a jackknife over the texts of both
    sets with fixed cells. A bootstrap would be biased: drawing a text twice makes a set coarser, which lowers the value
    itself. Small sets lower it, too, so compare sets of the same size.

    >>> import numpy as np
    >>> same = np.sin(np.arange(120.0)).reshape(40, 3)
    >>> round(mauve(same, same)[0], 6)
    1.0
    """
    cells = cells or max(2, round(min(len(p_ND), len(q_ND)) / 10))
    cell_N = quantise(np.concatenate([p_ND, q_ND]), cells, seed=seed)
    p_K = np.bincount(cell_N[: len(p_ND)], minlength=cells).astype(np.float64)
    q_K = np.bincount(cell_N[len(p_ND) :], minlength=cells).astype(np.float64)
    value = area(p_K, q_K)
    half = 1.96 * math.sqrt(_jackknife(p_K, q_K) + _jackknife(q_K, p_K))
    return value, (max(0.0, value - half), min(1.0, value + half))


def area(p_K: Array, q_K: Array) -> float:
    """The area under the divergence frontier of two histograms of counts or shares.

    >>> import numpy as np
    >>> round(area(np.array([1.0, 0.0]), np.array([0.0, 1.0])), 3)
    0.004
    """
    p_K, q_K = p_K / p_K.sum(), q_K / q_K.sum()
    curve = [(1.0, 0.0)]  # both ends of the frontier: R = Q and R = P
    for w in WEIGHTS:
        r_K = w * p_K + (1 - w) * q_K
        curve.append((float(np.exp(-SCALE * _kl(q_K, r_K))), float(np.exp(-SCALE * _kl(p_K, r_K)))))
    x, y = np.array([*curve, (0.0, 1.0)]).T
    # Along both axes, as the authors do: with only 25 weights the trapezoids of one axis differ from those of the
    # other.
    return float(0.5 * (_under(x, y) + _under(y, x)))


def quantise(x_ND: Array, cells: int, *, seed: int = 0) -> NDArray[np.int64]:
    """[N] the cell of each vector: k-means on its direction, in the principal components.

    >>> import numpy as np
    >>> quantise(np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]), 2).tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    True
    """
    norm_N1 = np.linalg.norm(x_ND, axis=1, keepdims=True)
    x_ND = x_ND / np.where(norm_N1 > 0, norm_N1, 1.0)
    x_ND = x_ND - x_ND.mean(axis=0)
    u_NK, s_K, _ = np.linalg.svd(x_ND, full_matrices=False)
    if not s_K.sum():
        return np.zeros(len(x_ND), dtype=np.int64)
    kept = int(np.argmax(np.cumsum(s_K**2) / np.sum(s_K**2) >= EXPLAINED)) + 1
    x_ND = u_NK[:, :kept] * s_K[:kept]
    runs = [_k_means(x_ND, cells, row_keys(seed, torch.tensor(start))) for start in range(STARTS)]
    return min(runs, key=lambda run: run[1])[0]


def _k_means(x_ND: Array, cells: int, key: Tensor) -> tuple[NDArray[np.int64], float]:
    """Lloyd's algorithm from a k-means++ initialisation; the cells and the sum of squares within them."""
    weight_N, centre_KD = np.ones(len(x_ND)), x_ND[:0]
    while len(centre_KD) < cells and weight_N.sum():  # 0: fewer distinct vectors than cells
        u = float(uniform(key, len(centre_KD))) * weight_N.sum()
        chosen = min(int(np.searchsorted(np.cumsum(weight_N), u, side="right")), len(x_ND) - 1)
        centre_KD = np.concatenate([centre_KD, x_ND[[chosen]]])
        weight_N = _squares(x_ND, centre_KD).min(axis=1)
    cell_N: NDArray[np.int64] = _squares(x_ND, centre_KD).argmin(axis=1)
    for _ in range(ROUNDS):
        held = np.unique(cell_N)
        centre_KD = np.stack([x_ND[cell_N == k].mean(axis=0) for k in held])
        nearest_N = _squares(x_ND, centre_KD).argmin(axis=1)
        if np.array_equal(held[nearest_N], cell_N):
            break
        cell_N = nearest_N
    return cell_N, float(_squares(x_ND, centre_KD).min(axis=1).sum())


def _squares(x_ND: Array, centre_KD: Array) -> Array:
    squares: Array = (x_ND**2).sum(axis=1)[:, None] - 2 * x_ND @ centre_KD.T + (centre_KD**2).sum(axis=1)
    return np.maximum(squares, 0.0)


def _jackknife(p_K: Array, q_K: Array) -> float:
    """The variance of the area over the texts of p; leaving out any text of the same cell has the same effect."""
    n = p_K.sum()
    if n < 2:
        return 0.0
    held = np.flatnonzero(p_K)
    without = np.array([area(p_K - (np.arange(len(p_K)) == k), q_K) for k in held])
    mean = (without * p_K[held]).sum() / n
    return float((n - 1) / n * (p_K[held] * (without - mean) ** 2).sum())


def _kl(p_K: Array, r_K: Array) -> float:
    some = p_K > 0
    return max(0.0, float((p_K[some] * np.log(p_K[some] / r_K[some])).sum()))


def _under(x: Array, y: Array) -> float:
    order = np.lexsort((-y, x))
    return float(np.trapezoid(y[order], x[order]))
