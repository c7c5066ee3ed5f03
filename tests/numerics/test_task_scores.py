"""What tasks are measured by, against hand values, textbook formulas and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from unmask.errors import UsageError
from unmask.finetuning.scores import accuracy, check_metrics, f1, macro_f1, matthews, pearson, r2, spearman
from unmask.finetuning.table import over_seeds

RNG = np.random.default_rng(0)


def confusion(tp: int, fp: int, fn: int, tn: int) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and targets with these counts of class 1."""
    predicted = [1.0] * (tp + fp) + [0.0] * (fn + tn)
    target = [1.0] * tp + [0.0] * fp + [1.0] * fn + [0.0] * tn
    return np.array(predicted), np.array(target)


@pytest.mark.parametrize("counts", [(6, 1, 2, 3), (1, 9, 9, 1), (5, 0, 0, 5), (0, 5, 5, 0), (40, 7, 3, 90)])
def test_two_classes_follow_the_textbook(counts: tuple[int, int, int, int]) -> None:
    tp, fp, fn, tn = counts
    predicted, target = confusion(*counts)
    by_hand = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert matthews(predicted, target) == pytest.approx(by_hand, abs=1e-12)
    assert matthews(predicted, target) == pytest.approx(pearson(predicted, target), abs=1e-12)  # the phi coefficient
    assert f1(predicted, target) == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert accuracy(predicted, target) == (tp + tn) / sum(counts)


def test_hand_values() -> None:
    # 6 of class 1 found, 1 taken for it, 2 missed, 3 left alone: (18 - 2) / sqrt(7 * 8 * 4 * 5)
    assert matthews(*confusion(6, 1, 2, 3)) == pytest.approx(16 / math.sqrt(1120))
    assert f1(*confusion(6, 1, 2, 3)) == 0.8
    # F1 of 1 for class 0, of 2/3 for the others
    assert macro_f1(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2])) == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    # three classes: (right * n - sum p_k t_k) / sqrt((n² - sum p_k²)(n² - sum t_k²)), p = (1, 2, 1), t = (1, 1, 2)
    assert matthews(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2])) == pytest.approx((12 - 5) / (16 - 6))


def test_one_answer_to_everything_is_worth_nothing() -> None:
    target = np.array([0.0, 1.0, 1.0, 0.0])
    for constant in (np.zeros(4), np.ones(4)):
        assert (matthews(constant, target), pearson(constant, target), spearman(constant, target)) == (0, 0, 0)
    assert f1(np.zeros(4), target) == 0
    assert matthews(target, np.zeros(4)) == 0
    assert r2(np.full(4, 0.5), target) == 0


def test_what_rounding_leaves_of_one_number_is_no_spread() -> None:
    """Three times 0.1 has the mean 0.10000000000000002."""
    same, other = np.full(3, 0.1), np.array([1.0, 2.0, 4.0])
    for predicted, target in ((same, same), (same, other), (other, same), (np.full(7, 0.3), np.full(7, 0.7))):
        assert pearson(predicted, target) == spearman(predicted, target) == 0
        if target is not other:
            assert r2(predicted, target) == 0
    assert str(pearson(np.full(150, 0.1), np.arange(150.0))) == "0.0"  # not -0.0


@pytest.mark.parametrize("ties", [False, True])
def test_correlations_are_scipys(ties: bool) -> None:
    stats = pytest.importorskip("scipy.stats")
    for n in (3, 10, 200):
        x, y = RNG.normal(size=n), RNG.normal(size=n)
        y = y + x
        if ties:
            x, y = x.round(), y.round()
            x[0], y[0] = x[1] + 1, y[1] + 1  # neither is constant
        assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_the_interval_over_seeds_is_students() -> None:
    values = [0.61, 0.58, 0.66, 0.60, 0.63]
    found = over_seeds(values)
    half = 2.776445 * float(np.std(values, ddof=1)) / math.sqrt(5)  # t of 4 degrees of freedom
    assert found["mean"] == pytest.approx(np.mean(values))
    assert found["ci95"] == pytest.approx([found["mean"] - half, found["mean"] + half], rel=1e-3)
    assert (found["least"], found["most"]) == (0.58, 0.66)


def test_metrics_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="use macro_f1"):
        check_metrics(["f1"], "classification", 3)
    with pytest.raises(UsageError, match="did you mean 'spearman'"):
        check_metrics(["spearmann"], "regression", 0)
    with pytest.raises(UsageError, match="unknown metric 'accuracy' of a regression"):
        check_metrics(["accuracy"], "regression", 0)
