"""`unmask finetune --suite glue`: every task in a folder of its own, and one table of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.errors import UsageError
from unmask.finetuning.config import FinetuneConfig, TaskData
from unmask.finetuning.examples import make_splits
from unmask.finetuning.glue import QUOTATION, QUOTED, GlueTask, chosen
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


def lines(result: SuiteResult, *, quoted: bool) -> list[list[str]]:
    """A line for each task, metric and start: what GLUE's table needs."""
    made: list[list[str]] = []
    for task in chosen(list(result.reports)):
        report = result.reports[task.name]
        for i, metric in enumerate(report["metrics"]):
            for start, parts in report["results"].items():
                made.append([task.title, TITLES[metric], NAMES[start], *cells(parts["test"][metric])])
                made[-1] += [percent(report["guess"]["test"][metric]), f"{report['examples']['test']:,}"]
                if quoted:
                    own = task.quoted if start == "model" and i == 0 else {}
                    made[-1] += [f"{own[name]:.2f}" if name in own else "" for name in QUOTED]
    return made


COLUMNS = ["task", "metric", "start", "mean", "95% over seeds", "range", "seeds", "guess", "examples"]


def glue_markdown(result: SuiteResult) -> str:
    """The page of a suite."""
    rows = table([*COLUMNS, *(f"{name} (quoted)" for name in QUOTED)], lines(result, quoted=True))
    guess = (
        "Numbers are in hundredths; intervals are Student's over seeds and say nothing of other examples. Guess: the "
        "most frequent class, or the mean, of the training examples as the answer to everything."
    )
    splits = [f"- {task.title}: {task.split}{_cut(result.reports[task.name])}" for task in chosen(list(result.reports))]
    parts = [f"# GLUE: {result.model}", rows, guess, "\n".join(splits), *_average(result), QUOTATION]
    return "\n\n".join(parts) + "\n"


def _cut(report: Numbers) -> str:
    cut = {part: n for part, n in report["cut_texts"].items() if n}
    named = ", ".join(f"{n:,} of {report['examples'][part]:,} in {part}" for part, n in cut.items())
    return f"; longer than {report['task']['length']} tokens, so cut: {named}" if cut else ""


def _average(result: SuiteResult) -> list[str]:
    """The mean of the tasks' first metrics, where all whole tasks are there."""
    whole: list[GlueTask] = chosen(None)
    if any(task.name not in result.reports for task in whole):
        return []
    found: list[Any] = [result.reports[task.name]["results"]["model"]["test"][task.metrics[0]] for task in whole]
    mean = sum(one["mean"] for one in found) / len(found)
    names = ", ".join(task.title for task in whole)
    return [f"Mean of {names} by their first metrics: {percent(mean)}."]
