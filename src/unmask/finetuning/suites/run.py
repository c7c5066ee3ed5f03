"""`unmask finetune --suite NAME`: every task in a folder of its own, and one table for all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unmask.errors import DataError, NonFiniteError, UsageError
from unmask.finetuning.answers import read_answers
from unmask.finetuning.config import FinetuneConfig, TaskData
from unmask.finetuning.differences import check_paired
from unmask.finetuning.gaps import Gap, check_others, gaps
from unmask.finetuning.results import ABOUT, Numbers
from unmask.finetuning.run import finetune
from unmask.finetuning.seed_run import Watch
from unmask.finetuning.splits import make_splits
from unmask.finetuning.suites import find_suite
from unmask.finetuning.suites.base import SuiteTask, TaskSuite
from unmask.finetuning.suites.page import suite_markdown
from unmask.storage.atomic import atomic_text
from unmask.storage.untrusted import read_json

OF_TASKS = ("kind", "labels", "metrics", "folds")  # options that a task sets itself


@dataclass
class SuiteResult:
    """The result of a suite: reports, gaps and failures by task. others: the reports by task of each folder to compare
    with."""

    suite: TaskSuite
    folder: Path
    model: str
    reports: dict[str, Numbers] = field(default_factory=dict)
    gaps: dict[str, list[Gap]] = field(default_factory=dict)
    others: dict[str, dict[str, Numbers]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.failures

    def plain(self) -> dict[str, Any]:
        """The result for JSON."""
        told = {name: [gap.plain() for gap in found] for name, found in self.gaps.items()}
        return {
            "suite": self.suite.name,
            "model": self.model,
            "tasks": self.reports,
            "gaps": told,
            "failures": self.failures,
        }


def finetune_suite(
    model: str | Path,
    config: FinetuneConfig,
    *,
    suite: str | TaskSuite = "glue",
    data_dir: str | Path,
    tasks: Sequence[str] | None = None,
    against: Sequence[str | Path] = (),
    device: str | None = None,
    watch: Watch | None = None,
) -> SuiteResult:
    """Fine-tune a model for the named tasks of a suite (None: all except those that must be named) with the same
    options.

    Each task has its own folder in `config.out`; a repeated call resumes. A task whose files are missing or invalid, or
    that ends in non-finite numbers, is reported and does not stop the others. against: finished folders of the suite to
    compare the answers with.

    >>> finetune_suite("stories", load_finetune_config(), data_dir="glue", tasks=["rte"])  # doctest: +SKIP
    """
    suite = find_suite(suite) if isinstance(suite, str) else suite
    watch = watch or Watch()
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise UsageError(f"there is no folder {data_dir}: give the one that holds {suite.holds}")
    if (config.data, config.kind, config.labels, config.metrics) != (TaskData(), "classification", (), ()):
        raise UsageError("a suite has its own data, kind, labels and metrics: leave them out, or leave out the suite")
    result = SuiteResult(suite, Path(config.out), str(model))
    others = check_others(config.out, against)
    configs = _readable(suite.chosen(tasks), config, folder, result)
    for name, said in result.failures.items():
        watch.on_note(f"{suite.tasks[name].title} is left out: {said}")
    if not configs:
        raise DataError(f"no task of {suite.name} can be read in {folder}: {next(iter(result.failures.values()))}")
    for name, one in configs.items():
        task = suite.tasks[name]
        watch.on_note(f"{task.title}: {task.split}")
        try:
            result.reports[name] = finetune(model, one, device=device, watch=watch).report
        except (DataError, NonFiniteError) as e:
            result.failures[name] = " ".join(str(e).split())
            watch.on_note(f"{task.title} has failed: {result.failures[name]}")
            continue
        _compare(result, name, others, watch)
        _write(result)
    if earlier := _finished_before(result):
        for name in earlier:
            _compare(result, name, others, watch)
        _write(result)
    return result


def _finished_before(result: SuiteResult) -> list[str]:
    """Add the tasks that other calls have finished in the folder, with the same model and options."""
    kinds = [_kind_of(result.folder / name) for name in result.reports]
    found = []
    for name in result.suite.tasks.keys() - result.reports.keys() - result.failures.keys():
        folder = result.folder / name
        if all((folder / file).is_file() for file in (ABOUT, "report.json")) and _kind_of(folder) in kinds:
            found.append(name)
    found.sort(key=[*result.suite.tasks].index)
    result.reports |= {name: read_json(result.folder / name / "report.json") for name in found}
    return found


def _kind_of(folder: Path) -> Numbers:
    """The model and the options that all tasks of a suite share."""
    try:
        identity = read_json(folder / ABOUT)["identity"]
        shared = {key: value for key, value in identity["options"].items() if key not in OF_TASKS}
        return {"model": identity["model"], "options": shared}
    except (KeyError, TypeError, AttributeError) as e:
        raise DataError(f"{folder / ABOUT} is not what unmask finetune writes: {e!r:.100}") from None


def _write(result: SuiteResult) -> None:
    atomic_text(result.folder / f"{result.suite.name}.json", _json(result))
    atomic_text(result.folder / f"{result.suite.name}.md", suite_markdown(result))


def _readable(
    tasks: Sequence[SuiteTask], config: FinetuneConfig, folder: Path, result: SuiteResult
) -> dict[str, FinetuneConfig]:
    """The options of every task whose files exist and are valid; all are read before any training starts."""
    configs = {}
    for task in tasks:
        try:
            one = task.config(config, folder, result.folder / task.name)
            make_splits(one, fold=None if one.folds is None else 0)
            configs[task.name] = one
        except (DataError, UsageError) as e:  # a class without examples is one of use where a user names the classes
            result.failures[task.name] = " ".join(str(e).split())
    return configs


def _compare(result: SuiteResult, name: str, others: Sequence[Path], watch: Watch) -> None:
    """The gaps of a finished task to random weights, and to the folders that also have it, on the same examples."""
    there, ours = [], read_answers(result.folder / name)
    for other in others:
        if not all((other / name / file).is_file() for file in (ABOUT, "report.json")):
            watch.on_note(f"{other} has not finished {name}: no gap to it is told")
            continue
        try:
            check_paired(ours, read_answers(other / name))
        except (DataError, UsageError) as e:
            watch.on_note(f"{e}; no gap to it is told")
            continue
        there.append(other / name)
        result.others.setdefault(str(other), {})[name] = read_json(other / name / "report.json")
    result.gaps[name] = gaps(result.folder / name, there)


def _json(result: SuiteResult) -> str:
    return json.dumps(result.plain(), indent=1, ensure_ascii=False) + "\n"
