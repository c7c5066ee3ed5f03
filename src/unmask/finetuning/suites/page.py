"""The page of a suite: a table in the paper's layout, gaps and whether they are visible, all metrics, the splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unmask.finetuning.gaps import GAP_COLUMNS, GAP_NOTE, signed, unique_names
from unmask.finetuning.results import Numbers
from unmask.finetuning.scores import TITLES
from unmask.finetuning.suites.base import SuiteTask
from unmask.finetuning.table import NAMES, cells, on_new, percent, table

if TYPE_CHECKING:
    from unmask.finetuning.suites.run import SuiteResult

COLUMNS = ["task", "metric", "start", "mean", "95% over seeds", "over examples", "range", "seeds", "guess", "examples"]


def suite_markdown(result: SuiteResult) -> str:
    """The page of a suite.

    >>> print(suite_markdown(finetune_suite("stories", config, data_dir="glue")))  # doctest: +SKIP
    """
    suite = result.suite
    spread = {"interval": "half of Student's 95% interval over seeds", "range": "largest minus smallest of the seeds"}
    legend = (
        f"Numbers are in hundredths; after ± stands the {spread[suite.spread]}, which says nothing of other examples: "
        "the column over examples does. Guess: the most frequent class, or the mean, of the training examples as the "
        "answer to everything. The last column is the mean of the others."
    )
    parts = [f"# {suite.title}: {result.model}", across(result), legend, suite.quotation]
    if told := gap_lines(result):
        parts += ["## Gaps", table(["task", *GAP_COLUMNS], told), GAP_NOTE]
    if hidden := [line for task in _done(result) if (line := invisible(result, task))]:
        parts += ["## What these runs cannot show", "\n".join(f"- {line}" for line in hidden)]
    parts += ["## Every metric", table(COLUMNS, lines(result)), "\n".join(f"- {line}" for line in splits(result))]
    return "\n\n".join(parts) + "\n"


def _done(result: SuiteResult) -> list[SuiteTask]:
    return result.suite.chosen(list(result.reports))


def lines(result: SuiteResult) -> list[list[str]]:
    """One line per task, metric and start."""
    made: list[list[str]] = []
    for task in _done(result):
        report = result.reports[task.name]
        for metric in report["metrics"]:
            for start, parts in report["results"].items():
                guess = percent(report["guess"]["test"][metric])
                count = f"{report['examples']['test']:,}"
                made.append([task.title, TITLES[metric], NAMES[start], *cells(parts["test"][metric]), guess, count])
    return made


def gap_lines(result: SuiteResult) -> list[list[str]]:
    """One line per gap."""
    return [[task.title, *gap.cells()] for task in _done(result) for gap in result.gaps.get(task.name, [])]


def across(result: SuiteResult) -> str:
    """The layout of the paper's table: one line per system, one column for each task's first metric, and their mean."""
    tasks = _done(result)
    found: dict[str, list[str]] = {}
    models = {str(result.folder): result.model}
    models |= {folder: next(iter(reports.values()))["model"] for folder, reports in result.others.items()}
    systems = zip(unique_names(models), [result.reports, *result.others.values()], strict=True)
    for model, reports in systems:
        for start in NAMES:
            numbers = [_tested(reports.get(task.name), task, start) for task in tasks]
            if any(number is not None for number in numbers):
                said = ["" if one is None else percent(one["mean"]) + _spread(one, result) for one in numbers]
                found[f"{model}, {NAMES[start]}"] = [
                    *said,
                    _mean([None if one is None else one["mean"] for one in numbers]),
                ]
    guesses = [result.reports[task.name]["guess"]["test"][task.metrics[0]] for task in tasks]
    found["guess"] = [*map(percent, guesses), _mean(guesses)]
    for name in result.suite.systems:
        figures = [task.quoted.get(name) for task in tasks]
        said = [_quoted(task, name) for task in tasks]
        found[f"{name} (quoted)"] = [*said, _mean([None if one is None else one / 100 for one in figures])]
    columns = ["", *(f"{task.title} ({TITLES[task.metrics[0]]})" for task in tasks), "mean"]
    return table(columns, [[name, *said] for name, said in found.items()])


def _tested(report: Numbers | None, task: SuiteTask, start: str) -> Numbers | None:
    parts = {} if report is None else report["results"].get(start, {})
    numbers: Numbers | None = parts.get("test", {}).get(task.metrics[0])
    return numbers


def _spread(numbers: Numbers, result: SuiteResult) -> str:
    if numbers["ci95"] is None:
        return ""
    if result.suite.spread == "range":
        return f" ± {percent(numbers['most'] - numbers['least'])}"
    return f" ± {percent((numbers['ci95'][1] - numbers['ci95'][0]) / 2)}"


def _quoted(task: SuiteTask, name: str) -> str:
    if name not in task.quoted:
        return ""
    spread = f" ± {task.quoted_ranges[name]:.1f}" if name in task.quoted_ranges else ""
    return f"{task.quoted[name]:.1f}{spread}"


def _mean(values: Sequence[float | None]) -> str:
    """The mean of a line that has a number for every task."""
    known = [value for value in values if value is not None]
    return percent(sum(known) / len(known)) if known and len(known) == len(values) else ""


def resolution(result: SuiteResult, task: SuiteTask) -> float | None:
    """The smallest visible gap in the task's first metric: the half-width of a measured gap, or of one between two such
    systems on different examples."""
    taken = [gap for gap in result.gaps.get(task.name, []) if gap.metric == task.metrics[0]]
    halves = [gap.interval.half for gap in taken if gap.interval.half is not None]
    if halves:
        return min(halves)
    numbers = _tested(result.reports[task.name], task, "model")
    if numbers is None or numbers.get("examples_half") is None:
        return None
    seeds = 0.0 if numbers["ci95"] is None else (numbers["ci95"][1] - numbers["ci95"][0]) / 2
    return math.sqrt(2) * math.hypot(numbers["examples_half"], seeds)


def invisible(result: SuiteResult, task: SuiteTask) -> str:
    """Which of the paper's gaps are too small to be visible with these runs; empty if none is known."""
    least, reference = resolution(result, task), result.suite.reference
    if not least or reference not in task.quoted:  # 0: all answers were one class, which no other examples would change
        return ""
    paired = any(gap.metric == task.metrics[0] for gap in result.gaps.get(task.name, []))
    how = "by the gaps above" if paired else "of two such lines, not paired"
    seeds = len(result.reports[task.name]["results"]["model"]["test"][task.metrics[0]]["seeds"])
    how += "; one seed, so less than that, too, may be chance" if seeds == 1 else ""
    quoted = {name: (x - task.quoted[reference]) / 100 for name, x in task.quoted.items() if name != reference}
    small = [f"{name} {signed(gap)}" for name, gap in quoted.items() if abs(gap) <= least]
    said = f"{task.title}: a gap of less than about {percent(least)} is invisible here ({how})"
    return f"{said}; of the quoted ones to {reference}: {', '.join(small) or 'none'}."


def splits(result: SuiteResult) -> list[str]:
    """What was reported for each task, what was left out or cut, and which tasks failed."""
    told = [f"{task.title}: {task.split}{_counted(result.reports[task.name])}" for task in _done(result)]
    titles = result.suite.tasks
    return told + [f"{titles[name].title} is not here: {said}" for name, said in result.failures.items()]


def _counted(report: Numbers) -> str:
    """How many of a task's examples were left out or cut, and how many reported ones occur in training."""
    said = ""
    if folds := report.get("folds"):
        said += f"; {folds} folds, drawn anew for each seed"
        said += ", each used once for early stopping instead" if "test" in report["own_files"] else ""
    if left_out := {part: n for part, n in report.get("left_out", {}).items() if n}:
        said += "; too short, so left out: " + ", ".join(f"{n:,} of {part}" for part, n in left_out.items())
    if cut := {part: n for part, n in report["cut_texts"].items() if n}:
        named = ", ".join(f"{n:,} of {report['examples'][part]:,} in {part}" for part, n in cut.items())
        said += f"; longer than {report['task']['length']} tokens, so cut: {named}"
    if again := report["repeated"]["test"]:
        reported = f"{again:,} of the {report['examples']['test']:,} reported"
        said += f"; {reported} stand in train, too, word for word.{on_new(report)}"
    return said
