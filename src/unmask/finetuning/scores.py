"""What tasks are measured by: accuracy, F1, Matthews' correlation; Pearson's, Spearman's and R². More is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from unmask.errors import UsageError, did_you_mean
from unmask.heads.task import Kind

Numbers = NDArray[np.float64]
Score = Callable[[Numbers, Numbers], float]


def accuracy(predicted: Numbers, target: Numbers) -> float:
    """The share of examples that are right.

    >>> accuracy(np.array([0, 1, 1, 1]), np.array([0, 1, 0, 1]))
    0.75
    """
    return float((predicted == target).mean())


def f1(predicted: Numbers, target: Numbers) -> float:
    """The harmonic mean of precision and recall of class 1, of two; 0 where nothing of it is found.

    >>> f1(np.array([1, 1, 0, 0]), np.array([1, 0, 1, 0]))
    0.5
    """
    return _f1_of(1, predicted, target)


def macro_f1(predicted: Numbers, target: Numbers) -> float:
    """The mean of the F1 of every class that is there or was predicted.

    >>> macro_f1(np.array([0, 1, 2]), np.array([0, 1, 1]))
    0.5555555555555555
    """
    classes = sorted({*predicted.tolist(), *target.tolist()})
    return sum(_f1_of(one, predicted, target) for one in classes) / len(classes)


def _f1_of(one: float, predicted: Numbers, target: Numbers) -> float:
    both = int(((predicted == one) & (target == one)).sum())
    either = int((predicted == one).sum()) + int((target == one).sum())
    return 2 * both / either if either else 0.0


def matthews(predicted: Numbers, target: Numbers) -> float:
    """Matthews' correlation, of any number of classes (Gorodkin 2004); 0 where all predictions are one class.

    >>> matthews(np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0]))
    0.5773502691896258
    """
    classes = sorted({*predicted.tolist(), *target.tolist()})
    p_K, t_K = (np.array([(x == one).sum() for one in classes], dtype=np.float64) for x in (predicted, target))
    n, right = len(target), float((predicted == target).sum())
    spread = (n**2 - float((p_K**2).sum())) * (n**2 - float((t_K**2).sum()))
    return (right * n - float((p_K * t_K).sum())) / math.sqrt(spread) if spread > 0 else 0.0


def pearson(predicted: Numbers, target: Numbers) -> float:
    """The linear correlation; 0 where one side is constant, for which it is not defined.

    >>> round(pearson(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 2.0])), 4)
    0.866
    """
    p, t = predicted - predicted.mean(), target - target.mean()
    spread = math.sqrt(float((p**2).sum()) * float((t**2).sum()))
    return float((p * t).sum()) / spread if spread > 0 else 0.0


def spearman(predicted: Numbers, target: Numbers) -> float:
    """The correlation of the ranks; equal values share the mean of theirs.

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
    """The share of the variance that is explained: 0 for the mean of these targets; 0 where they do not vary.

    >>> r2(np.array([2.0, 2.0]), np.array([1.0, 3.0]))
    0.0
    """
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
    """Refuse metrics that there are not, or that mean nothing for these classes.

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
    """Each metric by its name. Of a classification both are class numbers.

    >>> score_all(["accuracy"], "classification", [0, 1], [0, 0])
    {'accuracy': 0.5}
    """
    p, t = (np.asarray(x, dtype=np.float64) for x in (predicted, target))
    return {name: SCORES[kind][name](p, t) for name in names}
