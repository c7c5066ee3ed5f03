"""The table of a fine-tuning: mean, range and Student's interval over seeds, beside the scores of guessing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unmask.evaluation.measurement import student_975
from unmask.finetuning.results import RunName
from unmask.finetuning.scores import TITLES

Numbers = dict[str, Any]
NAMES = {"model": "fine-tuned", "scratch": "from random weights"}


def over_seeds(values: Sequence[float]) -> Numbers:
    """Mean, range and 95% interval by Student's t; a single seed has no interval.

    >>> over_seeds([0.5, 0.7])["mean"], over_seeds([0.5])["ci95"]
    (0.6, None)
    """
    mean = sum(values) / len(values)
    interval = None
    if len(values) > 1:
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        half = student_975(len(values) - 1) * deviation / math.sqrt(len(values))
        interval = [mean - half, mean + half]
    return {"mean": mean, "least": min(values), "most": max(values), "ci95": interval, "seeds": list(values)}


def summarize(done: Mapping[RunName, Numbers]) -> Numbers:
    """{start: {part: {metric: over_seeds}}} of the finished runs.

    In cross-validation a seed's number is the mean over its folds, weighted by their numbers of examples; `folds` holds
    the folds' own numbers.
    """
    summary: Numbers = {}
    for start in dict.fromkeys(run.start for run in done):
        seeds: dict[int, list[Numbers]] = {}
        for run, numbers in done.items():
            if run.start == start:
                seeds.setdefault(run.seed, []).append(numbers)
        first = next(iter(seeds.values()))[0]["scores"]
        summary[start] = {
            part: {name: _of_metric([*seeds.values()], part, name) for name in metrics}
            for part, metrics in first.items()
        }
    return summary


def _of_metric(seeds: Sequence[Sequence[Numbers]], part: str, name: str) -> Numbers:
    found = [[one["scores"][part][name] for one in folds] for folds in seeds]
    if len(seeds[0]) == 1:
        return over_seeds([one for [one] in found])
    sizes = [[one["examples"][part] for one in folds] for folds in seeds]
    means = [
        sum(score * n for score, n in zip(*both, strict=True)) / sum(both[1]) for both in zip(found, sizes, strict=True)
    ]
    return over_seeds(means) | {"folds": found}


def reported(report: Numbers) -> str:
    """The part whose numbers are the result: the test split if there is one."""
    return "test" if "test" in report["examples"] else "valid"


def rows(report: Numbers, part: str) -> list[list[str]]:
    """The table's lines for one part: metric, guess, and for each start mean, interval and range."""
    lines = []
    for name in report["metrics"]:
        guess = report["guess"][part][name]
        for start, parts in report["results"].items():
            found = parts[part][name]
            lines.append([NAMES[start], TITLES[name], *cells(found), percent(guess)])
    return lines


def cells(found: Numbers) -> list[str]:
    """Mean, interval over seeds and over examples, range, number of seeds."""
    interval = "one seed" if found["ci95"] is None else " – ".join(map(percent, found["ci95"]))
    half = found.get("examples_half")
    examples = "" if half is None else f"± {percent(half)}"
    spread = f"{percent(found['least'])} – {percent(found['most'])}"
    return [percent(found["mean"]), interval, examples, spread, str(len(found["seeds"]))]


def percent(value: float) -> str:
    """Format in hundredths, as in GLUE's tables.

    >>> percent(0.81234), percent(-0.0001)
    ('81.2', '0.0')
    """
    return f"{100 * value:z.1f}"


COLUMNS = ["", "metric", "mean", "95% over seeds", "over examples", "range", "seeds"]


def markdown(report: Numbers) -> str:
    """The page of one fine-tuning."""
    part = reported(report)
    guess = "majority" if report["task"]["kind"] == "classification" else "mean"
    lines = [f"# Fine-tuning of {report['model']}", ""]
    for one in ("test", "valid"):
        if one not in report["examples"]:
            continue
        title = {"test": "Test", "valid": "Validation"}[one]
        lines += [f"## {title}: {report['examples'][one]:,} examples", ""]
        lines += [table([*COLUMNS, guess], rows(report, one)), ""]
    if part == "valid":
        lines += [
            "No test examples: the validation examples also chose the best weights, so these numbers flatter.",
            "",
        ]
    return "\n".join([*lines, *(f"{line}\n" for line in notes(report))])


def notes(report: Numbers) -> list[str]:
    """Remarks on the numbers."""
    counts = report["examples"]
    cut = {part: n for part, n in report["cut_texts"].items() if n}
    what = {"mean": "the mean of the training examples", "majority": "their most frequent class"}
    kind = "majority" if report["task"]["kind"] == "classification" else "mean"
    lines = [
        "Numbers are in hundredths; the interval over seeds is Student's and says nothing of other examples, the "
        "half-width over examples is the bootstrap's and says nothing of other seeds. "
        f"{kind.capitalize()}: {what[kind]} as the answer to everything.",
        f"Trained on {counts['train']:,} examples ({report['sources']['train']}); stopped by "
        f"{TITLES[report['metrics'][0]]} on {counts['valid']:,} ({report['sources']['valid']}).",
    ]
    if folds := report.get("folds"):
        lines.append(_about_folds(report, folds))
    if left_out := {part: n for part, n in report.get("left_out", {}).items() if n}:
        parts = ", ".join(f"{n:,} of {part}" for part, n in left_out.items())
        lines.append(f"Texts that were too short, so left out before anything was split: {parts}.")
    if report["task"].get("complement"):
        lines.append("A sequence and its reverse complement have one answer: the heads are conjoined.")
    if again := {part: n for part, n in report["repeated"].items() if n}:
        parts = ", ".join(f"{n:,} of {counts[part]:,} in {part}" for part, n in again.items())
        lines.append(f"Examples that stand in the training examples, too, word for word: {parts}.{on_new(report)}")
    if cut:
        parts = ", ".join(f"{n:,} of {counts[part]:,} in {part}" for part, n in cut.items())
        lines.append(f"Texts longer than {report['task']['length']} tokens were cut: {parts}.")
    return lines


def on_new(report: Numbers) -> str:
    """The scores on those reported examples that do not occur in the training file."""
    if "new" not in report:
        return ""
    told = []
    for start, parts in report["results"].items():
        scores = ", ".join(f"{TITLES[name]} {percent(one['new'])}" for name, one in parts[reported(report)].items())
        told.append(f"{NAMES[start]} {scores}")
    return f" On the {report['new']:,} reported that are not in that file: {'; '.join(told)}."


def _about_folds(report: Numbers, folds: int) -> str:
    """How the cross-validation was made, and how much its folds differ."""
    part, metric = reported(report), report["metrics"][0]
    spread = []
    for start, parts in report["results"].items():
        every = [score for seed in parts[part][metric]["folds"] for score in seed]
        spread.append(f"between {percent(min(every))} and {percent(max(every))} ({NAMES[start]})")
    what = (
        "each fold once stops, and all report the test examples"
        if "test" in report["own_files"]
        else ("each fold is once reported, and part of the others stops")
    )
    return (
        f"Cross-validation of {folds} folds, drawn anew for each seed: {what}; a seed's number is the mean over its "
        f"folds, whose own {TITLES[metric]} lies {' and '.join(spread)}."
    )


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    every = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in every)
