"""What a suite of fine-tunings is: tasks in files of a folder, and the paper's figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unmask.corpora.sources import COMPRESSED
from unmask.errors import DataError, UsageError, did_you_mean
from unmask.finetuning.config import FinetuneConfig, TaskData
from unmask.heads.task import Kind

USUAL_FOLDS = 5


@dataclass(frozen=True, kw_only=True)
class SuiteTask:
    """A task: its files relative to the data folder, and its metrics, of which the first appears in the table.

    split: a description of what is reported. crossed: always reported by cross-validation. named_only: runs only if it
    is named. quoted: the paper's figures in hundredths, by system, and their ranges over seeds if it gives them.
    """

    name: str
    title: str
    data: TaskData
    kind: Kind = "classification"
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...]
    split: str
    crossed: bool = False
    named_only: bool = False
    quoted: Mapping[str, float] = field(default_factory=dict)
    quoted_ranges: Mapping[str, float] = field(default_factory=dict)

    def config(self, base: FinetuneConfig, folder: Path, out: Path) -> FinetuneConfig:
        """The options of a fine-tuning with this task as its data.

        Folds apply to what has no file of its own for early stopping.
        """
        files = {
            part: str(find_file(folder, path))
            for part in ("train", "valid", "test")
            if (path := getattr(self.data, part)) is not None
        }
        data = dataclasses.replace(self.data, **files)  # type: ignore[arg-type]
        folds = (base.folds or USUAL_FOLDS) if self.crossed else base.folds
        if self.data.valid is not None or self.data.test_share:
            folds = None
        task: dict[str, Any] = {"kind": self.kind, "labels": self.labels, "metrics": self.metrics, "folds": folds}
        return dataclasses.replace(base, data=data, out=str(out), **task)


@dataclass(frozen=True, kw_only=True)
class TaskSuite:
    """Tasks that are trained with the same options and share one table.

    holds: what the data folder contains, for messages. systems: the systems whose figures are quoted, from `quotation`.
    reference: the system that the others' gaps are relative to. spread: the meaning of ± in the table: half the 95%
    interval over seeds, or the whole range over them.
    """

    name: str
    title: str
    tasks: Mapping[str, SuiteTask]
    holds: str
    systems: Sequence[str]
    reference: str
    quotation: str
    spread: Literal["interval", "range"]

    def chosen(self, names: Iterable[str] | None) -> list[SuiteTask]:
        """The tasks with these names; None: all except those that run only if named.

        >>> from unmask.finetuning.suites import find_suite
        >>> [task.name for task in find_suite("glue").chosen(None)]
        ['cola', 'sst2', 'mrpc', 'stsb', 'rte']
        """
        if names is None:
            return [task for task in self.tasks.values() if not task.named_only]
        names = list(dict.fromkeys(names))
        for name in names:
            if name not in self.tasks:
                raise UsageError(f"unknown task {name!r} of the suite {self.name}; {did_you_mean(name, self.tasks)}")
        return [self.tasks[name] for name in names]


def find_file(folder: Path, path: str) -> Path:
    """A task's file in the data folder, plain or compressed.

    >>> find_file(Path("glue"), "CoLA/train.tsv")  # doctest: +SKIP
    PosixPath('glue/CoLA/train.tsv.xz')
    """
    for ending in ("", *COMPRESSED):
        if (folder / f"{path}{ending}").is_file():
            return folder / f"{path}{ending}"
    raise DataError(f"{path} is not in {folder}, neither plain nor as .gz, .xz, .bz2 or .zst: put it there")
