"""The difference of two fine-tuned models on the same examples, and whether it is visible.

Two things are sampled: the examples, which all seeds share, and the seeds. Examples are resampled (bootstrap), each
with the answers of all runs of both models, so that the difficulty of an example cancels. Seeds are paired, each with
itself, by Student's t. The squares of the two half-widths add up, as in `evaluation.paired`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unmask.errors import UsageError
from unmask.evaluation.bootstrap import resampled_counts
from unmask.evaluation.measurement import student_975
from unmask.evaluation.paired import Interval
from unmask.finetuning.answers import Answers, RunAnswers
from unmask.finetuning.scores import OF_COUNTS, SCORES

Floats = NDArray[np.float64]
NORMAL_975 = 1.959964
FEW_CLASSES = 64  # with more classes the answers are scored resample by resample


def score_intervals(
    answers: Answers, start: str, metrics: Sequence[str], *, seeds: int | None = None
) -> dict[str, Interval]:
    """Each metric averaged over the first `seeds` seeds (None: all), with its interval.

    >>> score_intervals(read_answers("runs/reviews"), "model", ["accuracy"])["accuracy"].ci95  # doctest: +SKIP
    """
    asked = [runs for seed, runs in answers.runs[start].items() if seeds is None or seed < seeds]
    found = iter(_resampled([Scored(runs, answers, metric) for metric in metrics for runs in asked]))
    return {metric: _interval([next(found) for _ in asked], answers) for metric in metrics}


def score_on(answers: Answers, start: str, metric: str, counted_E: NDArray[np.bool_], *, seeds: int) -> float:
    """A score averaged over the first `seeds` seeds, on a subset of the examples.

    >>> score_on(answers, "model", "accuracy", chosen_E, seeds=3)  # doctest: +SKIP
    """
    asked = [runs for seed, runs in answers.runs[start].items() if seed < seeds]
    weight_1E = counted_E[None, :].astype(np.float32)
    return float(np.mean([_numbers(runs, answers, metric, weight_1E)[0] for runs in asked]))


def differences(
    ours: Answers, theirs: Answers, metrics: Sequence[str], *, start: str = "model", their_start: str = "model"
) -> dict[str, Interval]:
    """Our score minus theirs by each metric, averaged over common seeds; both must report the same examples.

    Without a common seed the means over all seeds are compared, and the interval says nothing about other seeds.

    >>> differences(read_answers("runs/a"), read_answers("runs/b"), ["f1"])["f1"].verdict  # doctest: +SKIP
    'visible'
    """
    check_paired(ours, theirs)
    place_of = {key: i for i, key in enumerate(ours.keys)}
    there_E = np.array([place_of[key] for key in theirs.keys])  # indices of our examples in their order
    one, other = ours.runs.get(start, {}), theirs.runs.get(their_start, {})
    for runs, side, name in ((one, ours, start), (other, theirs, their_start)):
        if not runs:
            raise UsageError(f"{side.folder} has no finished seed of the start {name!r}: nothing to compare")
    asked = [Scored(runs, ours, metric) for metric in metrics for runs in one.values()]
    asked += [Scored(runs, theirs, metric, there_E) for metric in metrics for runs in other.values()]
    found = iter(_resampled(asked))
    mine, yours = ({metric: {seed: next(found) for seed in side} for metric in metrics} for side in (one, other))
    return {metric: _interval(_paired(mine[metric], yours[metric]), ours) for metric in metrics}


def _paired(mine: Mapping[int, Floats], yours: Mapping[int, Floats]) -> list[Floats]:
    """The differences of common seeds, otherwise that of the means."""
    if shared := sorted(mine.keys() & yours.keys()):
        return [mine[seed] - yours[seed] for seed in shared]
    return [np.mean([*mine.values()], axis=0) - np.mean([*yours.values()], axis=0)]


def check_paired(ours: Answers, theirs: Answers) -> None:
    """Refuse two fine-tunings whose answers are to different examples.

    >>> check_paired(read_answers("runs/a"), read_answers("runs/b"))  # doctest: +SKIP
    """
    if (ours.kind, ours.labels) != (theirs.kind, theirs.labels):
        raise UsageError(f"{theirs.folder} has other classes than {ours.folder}: their answers do not compare")
    if {*ours.keys} != {*theirs.keys}:
        raise UsageError(f"{theirs.folder} reports other examples than {ours.folder}: fine-tune both on the same files")


class Scored(NamedTuple):
    """A seed to be scored by a metric. place_E: the indices of its examples among all, if they are in another order."""

    runs: Sequence[RunAnswers]
    answers: Answers
    metric: str
    place_E: NDArray[np.int64] | None = None

    def under(self, weight_SE: NDArray[np.float32]) -> Floats:
        """[S] its score under each weighting of the examples."""
        columns = slice(None) if self.place_E is None else self.place_E
        return _numbers(self.runs, self.answers, self.metric, weight_SE[:, columns])


def _resampled(asked: Sequence[Scored]) -> list[Floats]:
    """[1 + S] of each the score, followed by its score in each resample. All share the resamples, which are drawn
    once: for many examples, drawing them takes longer than scoring."""
    examples = len(asked[0].answers.keys)
    weights = chain([np.ones((1, examples), dtype=np.float32)], resampled_counts(examples) if examples > 1 else ())
    parts = [[one.under(weight_SE) for one in asked] for weight_SE in weights]
    return [np.concatenate(of_one) for of_one in zip(*parts, strict=True)]


def _numbers(runs: Sequence[RunAnswers], answers: Answers, metric: str, weight_SE: NDArray[np.float32]) -> Floats:
    """[S] a seed's score under each weighting; in cross-validation the mean over folds, weighted by their examples."""
    total_S, size_S = np.zeros(len(weight_SE)), np.zeros(len(weight_SE))
    for run in runs:
        weight_SN = weight_SE[:, run.place_N]
        n_S = weight_SN.sum(axis=1, dtype=np.float64)
        few = answers.kind == "classification" and len(answers.labels) <= FEW_CLASSES
        score_S = (
            _of_counts(run, metric, weight_SN, len(answers.labels))
            if few
            else _one_by_one(run, answers, metric, weight_SN)
        )
        total_S += np.where(n_S > 0, n_S * score_S, 0.0)
        size_S += n_S
    mean_S: Floats = total_S / np.maximum(size_S, 1.0)
    return mean_S


def _of_counts(run: RunAnswers, metric: str, weight_SN: NDArray[np.float32], classes: int) -> Floats:
    """Score all weightings at once, from each class's correct answers, answers and examples."""
    each_K = np.arange(classes)
    predicted_NK, target_NK = (x_N[:, None] == each_K for x_N in (run.predicted_N, run.target_N))
    counted = np.stack([predicted_NK & target_NK, predicted_NK, target_NK], axis=1).reshape(len(run.place_N), -1)
    counts = (weight_SN @ counted.astype(np.float32)).astype(np.float64).reshape(len(weight_SN), 3, classes)
    with np.errstate(invalid="ignore", divide="ignore"):  # a resample may contain nothing of a small fold
        return OF_COUNTS[metric](counts)


def _one_by_one(run: RunAnswers, answers: Answers, metric: str, weight_SN: NDArray[np.float32]) -> Floats:
    score, scores = SCORES[answers.kind][metric], np.zeros(len(weight_SN))
    for s, weight_N in enumerate(weight_SN.astype(np.int64)):
        if weight_N.any():
            scores[s] = score(np.repeat(run.predicted_N, weight_N), np.repeat(run.target_N, weight_N))
    return scores


def _interval(seeds: Sequence[Floats], answers: Answers) -> Interval:
    """The value with its half-widths. seeds: for each seed its value, followed by that of every resample."""
    value_S = np.mean(seeds, axis=0)
    texts_half = NORMAL_975 * float(value_S[1:].std(ddof=1)) if len(answers.keys) > 1 else None
    if len(seeds) < 2:
        return Interval(float(value_S[0]), texts_half, None, "nothing")
    deviation = float(np.std([one[0] for one in seeds], ddof=1))
    seeds_half = student_975(len(seeds) - 1) * deviation / math.sqrt(len(seeds))
    return Interval(float(value_S[0]), texts_half, seeds_half, "paired seeds")
