"""The metrics of tasks: accuracy, F1, Matthews' correlation; Pearson's, Spearman's and R². Higher is better for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from unmask.errors import UsageError, did_you_mean
from unmask.heads.task import Kind

Numbers = NDArray[np.float64]
Score = Callable[[Numbers, Numbers], float]


def tallied(predicted: Numbers, target: Numbers, classes: int) -> Numbers:
    """[3, K] for every class: the number of its correct answers, of its answers, and of its examples.

    >>> tallied(np.array([0, 1, 1]), np.array([0, 1, 0]), 2).tolist()
    [[1.0, 1.0], [1.0, 2.0], [2.0, 1.0]]
    """
    of_each = [
        np.bincount(x.astype(np.int64), minlength=classes) for x in (target[predicted == target], predicted, target)
    ]
    counts: Numbers = np.stack(of_each).astype(np.float64)
    return counts


# Each takes counts [..., 3, K], so that many sets of answers, such as those of resamples, are scored at once.


def _accuracy(counts: Numbers) -> Numbers:
    share: Numbers = counts[..., 0, :].sum(axis=-1) / counts[..., 2, :].sum(axis=-1)
    return share


def _f1(counts: Numbers) -> Numbers:
    """F1 of every class."""
    f1_K: Numbers = 2 * counts[..., 0, :] / np.maximum(counts[..., 1, :] + counts[..., 2, :], 1)
    return f1_K


def _macro_f1(counts: Numbers) -> Numbers:
    there_K = counts[..., 1, :] + counts[..., 2, :] > 0
    mean: Numbers = _f1(counts).sum(axis=-1) / np.maximum(there_K.sum(axis=-1), 1)
    return mean


def _matthews(counts: Numbers) -> Numbers:
    right_K, p_K, t_K = (counts[..., i, :] for i in range(3))
    n = t_K.sum(axis=-1)
    spread = (n**2 - (p_K**2).sum(axis=-1)) * (n**2 - (t_K**2).sum(axis=-1))
    shared = right_K.sum(axis=-1) * n - (p_K * t_K).sum(axis=-1)
    correlation: Numbers = np.where(spread > 0, shared / np.sqrt(np.where(spread > 0, spread, 1.0)), 0.0)
    return correlation


OF_COUNTS: dict[str, Callable[[Numbers], Numbers]] = {
    "accuracy": _accuracy,
    "f1": lambda counts: _f1(counts)[..., 1],
    "macro_f1": _macro_f1,
    "matthews": _matthews,
}


def _scored(name: str, predicted: Numbers, target: Numbers) -> float:
    classes = int(max(1, predicted.max(), target.max())) + 1
    return float(OF_COUNTS[name](tallied(predicted, target, classes)))


def accuracy(predicted: Numbers, target: Numbers) -> float:
    """The share of correct answers.

    >>> accuracy(np.array([0, 1, 1, 1]), np.array([0, 1, 0, 1]))
    0.75
    """
    return _scored("accuracy", predicted, target)


def f1(predicted: Numbers, target: Numbers) -> float:
    """The harmonic mean of precision and recall of class 1, for two classes; 0 if there is no true positive.

    >>> f1(np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0]))
    0.5
    """
    return _scored("f1", predicted, target)


def macro_f1(predicted: Numbers, target: Numbers) -> float:
    """The mean F1 of all classes that occur or were predicted.

    >>> macro_f1(np.array([0, 1, 2]), np.array([0, 1, 1]))
    0.5555555555555555
    """
    return _scored("macro_f1", predicted, target)


def matthews(predicted: Numbers, target: Numbers) -> float:
    """Matthews' correlation, for any number of classes (Gorodkin 2004); 0 if all predictions are one class.

    >>> matthews(np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0]))
    0.5773502691896258
    """
    return _scored("matthews", predicted, target)


def pearson(predicted: Numbers, target: Numbers) -> float:
    """The linear correlation; 0 if one side is constant, for which it is undefined.

    >>> round(pearson(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 2.0])), 4)
    0.866
    """
    if _constant(predicted) or _constant(target):
        return 0.0
    p, t = predicted - predicted.mean(), target - target.mean()
    spread = math.sqrt(float((p**2).sum()) * float((t**2).sum()))
    return float((p * t).sum()) / spread if spread > 0 else 0.0


def _constant(values: Numbers) -> bool:
    """Tests the values themselves, because rounding errors around their mean can look like a spread."""
    return bool((values == values[0]).all())


def spearman(predicted: Numbers, target: Numbers) -> float:
    """The correlation of the ranks; ties share their mean rank.

    >>> spearman(np.array([1.0, 10.0, 100.0]), np.array([1.0, 2.0, 3.0]))
    1.0
    """
    return pearson(_ranks(predicted), _ranks(target))


def _ranks(values: Numbers) -> Numbers:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count).astype(np.float64)
    ranks: Numbers = (last - (count - 1) / 2)[place]
    return ranks


def r2(predicted: Numbers, target: Numbers) -> float:
    """The share of explained variance: 0 for predicting the mean of these targets, and if they do not vary.

    >>> r2(np.array([2.0, 2.0]), np.array([1.0, 3.0]))
    0.0
    """
    if _constant(target):
        return 0.0
    spread = float(((target - target.mean()) ** 2).sum())
    return 1 - float(((predicted - target) ** 2).sum()) / spread if spread > 0 else 0.0


SCORES: dict[Kind, dict[str, Score]] = {
    "classification": {"accuracy": accuracy, "f1": f1, "macro_f1": macro_f1, "matthews": matthews},
    "regression": {"spearman": spearman, "pearson": pearson, "r2": r2},
}
TITLES = {"f1": "F1", "macro_f1": "macro F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
TITLES |= {"accuracy": "accuracy", "r2": "R²"}
USUAL: dict[Kind, tuple[str, ...]] = {"classification": ("accuracy",), "regression": ("spearman", "pearson")}


def check_metrics(names: Sequence[str], kind: Kind, classes: int) -> None:
    """Refuse unknown metrics, or those that are not defined for these classes.

    >>> check_metrics(["f1"], "classification", 3)
    Traceback (most recent call last):
    unmask.errors.UsageError: f1 is of two classes, here are 3: use macro_f1
    """
    known = SCORES[kind]
    for name in names:
        if name not in known:
            raise UsageError(f"unknown metric {name!r} of a {kind}; {did_you_mean(name, known)}")
        if name == "f1" and classes != 2:
            raise UsageError(f"f1 is of two classes, here are {classes}: use macro_f1")


def score_all(
    names: Sequence[str], kind: Kind, predicted: Sequence[float], target: Sequence[float]
) -> dict[str, float]:
    """Each metric by name. In classification both arguments are class numbers.

    >>> score_all(["accuracy"], "classification", [0, 1], [0, 0])
    {'accuracy': 0.5}
    """
    p, t = (np.asarray(x, dtype=np.float64) for x in (predicted, target))
    return {name: SCORES[kind][name](p, t) for name in names}
