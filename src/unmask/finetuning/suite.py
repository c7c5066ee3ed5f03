"""`unmask finetune --suite glue`: every task in a folder of its own, and one table of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unmask.errors import UsageError
from unmask.finetuning.config import FinetuneConfig, TaskData
from unmask.finetuning.examples import make_splits
from unmask.finetuning.glue import QUOTATION, QUOTED, chosen
from unmask.finetuning.results import Numbers
from unmask.finetuning.run import finetune
from unmask.finetuning.scores import TITLES
from unmask.finetuning.seed_run import Watch
from unmask.finetuning.table import NAMES, cells, percent, table
from unmask.storage.atomic import atomic_text

SUITES = ("glue",)


@dataclass(frozen=True)
class SuiteResult:
    """The reports of a suite's tasks, by name."""

    folder: Path
    model: str
    reports: dict[str, Numbers]


def finetune_suite(
    model: str | Path,
    config: FinetuneConfig,
    *,
    data_dir: str | Path,
    tasks: Sequence[str] | None = None,
    device: str | None = None,
    watch: Watch | None = None,
) -> SuiteResult:
    """Fine-tune a model for every task of GLUE that is named (None: those that are whole) with the same options.

    Each has a folder of its own in `config.out`; a call that is repeated goes on where it ended.

    >>> finetune_suite("stories", load_finetune_config(), data_dir="glue", tasks=["rte"])  # doctest: +SKIP
    """
    watch = watch or Watch()
    folder, out = Path(data_dir).expanduser(), Path(config.out)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {data_dir}: give the one that holds CoLA, RTE and the others")
    if (config.data, config.kind, config.labels, config.metrics) != (TaskData(), "classification", (), ()):
        raise UsageError("a suite has its own data, kind, labels and metrics: leave them out, or leave out the suite")
    named = chosen(tasks)
    configs = {task.name: task.config(config, folder, out / task.name) for task in named}
    for one in configs.values():  # every file is read before the first hour is spent
        make_splits(one)
    reports: dict[str, Numbers] = {}
    for task in named:
        watch.on_note(f"{task.title}: {task.split}")
        reports[task.name] = finetune(model, configs[task.name], device=device, watch=watch).report
        result = SuiteResult(out, str(model), reports)
        plain = {"suite": "glue", "model": str(model), "tasks": reports}
        atomic_text(out / "glue.json", json.dumps(plain, indent=1, ensure_ascii=False) + "\n")
        atomic_text(out / "glue.md", glue_markdown(result))
    return result


COLUMNS = ["task", "metric", "start", "mean", "95% over seeds", "range", "seeds", "guess", "examples"]


def lines(result: SuiteResult) -> list[list[str]]:
    """A line for each task, metric and start."""
    made: list[list[str]] = []
    for task in chosen(list(result.reports)):
        report = result.reports[task.name]
        for metric in report["metrics"]:
            for start, parts in report["results"].items():
                guess = percent(report["guess"]["test"][metric])
                count = f"{report['examples']['test']:,}"
                made.append([task.title, TITLES[metric], NAMES[start], *cells(parts["test"][metric]), guess, count])
    return made


def across(result: SuiteResult) -> str:
    """The shape of the paper's table: a line for each system, a column for each task's first metric, and their mean."""
    tasks = chosen(list(result.reports))
    found: dict[str, list[Numbers | float | None]] = {}
    reports = [result.reports[task.name] for task in tasks]
    for start in reports[0]["results"]:
        name = f"{result.model}, {NAMES[start]}"
        tested = zip(tasks, reports, strict=True)
        found[name] = [report["results"].get(start, {}).get("test", {}).get(task.metrics[0]) for task, report in tested]
    found["guess"] = [report["guess"]["test"][task.metrics[0]] for task, report in zip(tasks, reports, strict=True)]
    for name in QUOTED:
        found[f"{name} (quoted)"] = [task.quoted[name] / 100 if name in task.quoted else None for task in tasks]
    columns = ["", *(f"{task.title} ({TITLES[task.metrics[0]]})" for task in tasks), "mean"]
    return table(columns, [[name, *map(_cell, cells), _mean(cells)] for name, cells in found.items()])


def _cell(value: Numbers | float | None) -> str:
    """A mean with half its interval, or a number."""
    if value is None or isinstance(value, float):
        return "" if value is None else percent(value)
    half = "" if value["ci95"] is None else f" ± {percent((value['ci95'][1] - value['ci95'][0]) / 2)}"
    return percent(value["mean"]) + half


def _mean(values: Sequence[Numbers | float | None]) -> str:
    """Of a line that has a number for every task."""
    numbers = [value["mean"] if isinstance(value, dict) else value for value in values]
    known = [number for number in numbers if number is not None]
    return percent(sum(known) / len(known)) if len(known) == len(numbers) else ""


def glue_markdown(result: SuiteResult) -> str:
    """The page of a suite."""
    guess = (
        "Numbers are in hundredths; intervals are Student's over seeds and say nothing of other examples. Guess: the "
        "most frequent class, or the mean, of the training examples as the answer to everything. The last column is "
        "the mean of the others."
    )
    tasks = chosen(list(result.reports))
    splits = "\n".join(f"- {task.title}: {task.split}{_counted(result.reports[task.name])}" for task in tasks)
    detail = table(COLUMNS, lines(result))
    return "\n\n".join([f"# GLUE: {result.model}", across(result), guess, QUOTATION, detail, splits]) + "\n"


def _counted(report: Numbers) -> str:
    """What of a task's examples was cut, and what of the reported ones was trained on."""
    cut = {part: n for part, n in report["cut_texts"].items() if n}
    named = ", ".join(f"{n:,} of {report['examples'][part]:,} in {part}" for part, n in cut.items())
    said = f"; longer than {report['task']['length']} tokens, so cut: {named}" if cut else ""
    again = report["repeated"]["test"]
    return said + (f"; {again:,} of those reported stand in train, too, word for word" if again else "")
