"""A fine-tuning from its files to its report: every seed, from the model and, if asked for, from random weights."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

import unmask
from unmask.data.complement import complement_of, spells_dna
from unmask.devices import make_current, pick_device
from unmask.distributed.stopping import stop_requests
from unmask.distributed.world import World
from unmask.errors import UsageError
from unmask.evaluation.suites.results import model_fingerprint
from unmask.finetuning.classifier import Classifier, load_classifier
from unmask.finetuning.config import FinetuneConfig
from unmask.finetuning.report import add_intervals, make_report
from unmask.finetuning.results import Numbers, Results, RunName, Start, digest
from unmask.finetuning.rows import TaskRows, make_rows
from unmask.finetuning.scores import check_metrics
from unmask.finetuning.seed_run import SeedRun, Watch, Work
from unmask.finetuning.splits import Labelled, Split, Splits, read_labelled
from unmask.finetuning.table import markdown
from unmask.heads.task import Task
from unmask.model import Model, load_any
from unmask.reader import adopt_plugins, to_dict
from unmask.storage.model_folder import NoStart
from unmask.training.monitor import steady_gc
from unmask.training.run_lock import one_writer

NOT_DECISIVE = ("out", "seeds", "from_scratch", "data")  # of the examples the content counts


@dataclass(frozen=True)
class Finetuned:
    """A finished fine-tuning: its folder, and its report as in `report.json`."""

    folder: Path
    report: Numbers

    def classifier(self, device: str | None = None) -> Classifier:
        """The classifier that was best on the validation examples, over all seeds."""
        return load_classifier(self.folder, device=device)


def finetune(
    model: Model | str | Path,
    config: FinetuneConfig,
    *,
    device: str | None = None,
    watch: Watch | None = None,
) -> Finetuned:
    """Fine-tune a model for a task, over seeds; `unmask finetune` is this function.

    A repeated call resumes with the first unfinished seed. Everything random depends only on the seed, the epoch and
    the step, so a restarted seed gives the same result.

    >>> finetune("stories", load_finetune_config(None, {"data.train": "mine.tsv"}))  # doctest: +SKIP
    """
    if not isinstance(cast(object, config), FinetuneConfig):
        raise UsageError(f"finetune takes a FinetuneConfig, such as load_finetune_config() gives, got {config!r:.60}")
    adopt_plugins(config.head)
    labelled = read_labelled(config)
    check_metrics(config.measured, config.kind, len(labelled.splits(0, None if config.folds is None else 0).labels))
    name = str(model) if isinstance(model, str | Path) else "a model in memory"
    base = model_of(model, device)
    with stop_requests() as asked_to_stop, one_writer(Path(config.out), World()) as note:
        run = _Run(base, name, labelled, watch or Watch(), asked_to_stop)
        if note:
            run.watch.on_note(note)
        return run.run()


def model_of(model: Model | str | Path, device: str | None) -> Model:
    """The model to start from; if it is already a classifier, its head is discarded."""
    if isinstance(model, Model):
        base = model
    else:
        base, task = load_any(model, device=pick_device(device))
        if task is not None:
            base.denoiser.task = None
    make_current(base.device)  # one in memory may be on another GPU, where its steps are waited for
    if base.process is not None and base.process.vectors:
        raise UsageError(
            f"this model reads noised vectors, not tokens: its process is {base.process.name}; fine-tune another one"
        )
    return base


class _Run:
    def __init__(
        self,
        model: Model,
        name: str,
        labelled: Labelled,
        watch: Watch,
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self.model, self.name, self.labelled, self.config = model, name, labelled, labelled.config
        self.watch, self.asked_to_stop = watch, asked_to_stop
        self.folds: list[int | None] = [None] if self.config.folds is None else [*range(self.config.folds)]
        first = labelled.splits(0, self.folds[0])
        self.task = task_of(model, self.config, first)
        self.examples = {name: split.examples for name, split in first.all.items()}
        if self.config.folds is not None:
            self.examples = labelled.files
        every = {one: i for i, one in enumerate(dict.fromkeys(one for part in self.examples.values() for one in part))}
        self.place_of, self.rows = every, make_rows([*every], self.task, model)
        self.results = Results(Path(self.config.out))
        before = self.results.identity()
        if before is not None and "types" not in before and self.task.tells_pairs(model.denoiser):
            self.task = dataclasses.replace(self.task, types=False)  # a version began it that gave all texts type 0

    def run(self) -> Finetuned:
        decisive = {k: v for k, v in to_dict(self.config).items() if k not in NOT_DECISIVE}
        data = {part: digest(examples) for part, examples in self.examples.items()}
        identity: Numbers = {"model": model_fingerprint(self.model), "data": data, "options": decisive}
        identity |= {"conjoined": True} if self.task.conjoined else {}
        identity |= {"types": True} if self.task.tells_pairs(self.model.denoiser) else {}
        self.results.begin(identity, {"model": self.name, "config": to_dict(self.config), "task": to_dict(self.task)})
        starts: list[Start] = ["model", "scratch"] if self.config.from_scratch else ["model"]
        done: dict[RunName, Numbers] = {}
        with steady_gc():
            for seed in range(self.config.seeds):
                for fold in self.folds:
                    for start in starts:
                        run = RunName(start, seed, fold)
                        done[run] = self.results.finished(run) or self._train(run, done)
        report = make_report(self.name, self.model, self.task, self.labelled, self._rows, done)
        add_intervals(report, self.results.folder, self.labelled)
        self.results.keep_report(report, markdown(report))
        return Finetuned(self.results.folder, report)

    def _rows(self, split: Split) -> TaskRows:
        return self.rows.take([self.place_of[one] for one in split.examples])

    def _work(self, run: RunName) -> Work:
        """What all runs share: the rows and the unit of numeric targets."""
        splits = self.labelled.splits(run.seed, run.fold)
        mean, scale = unit_of(self.config, splits)
        task = dataclasses.replace(self.task, mean=mean, scale=scale)
        rows = {part: self._rows(split) for part, split in splits.all.items()}
        return Work(self.model, task, self.config, splits, rows, self.watch, self.asked_to_stop)

    def _train(self, name: RunName, before: dict[RunName, Numbers]) -> Numbers:
        """Train and store a run: first the model if it is the best so far, then predictions, then the numbers."""
        work = self._work(name)
        self.watch.on_seed(name.start, name.seed, work.steps)
        if name.fold is not None:
            self.watch.on_fold(name.fold, len(self.folds))
        began = time.perf_counter()
        run = SeedRun(work, name.start, name.seed)
        found = run.run()
        seconds = time.perf_counter() - began
        bests = [one["best"] for other, one in before.items() if other.start == "model"]
        if name.start == "model" and all(run.best > (best["score"], -best["loss"]) for best in bests):
            self._save(run)
        parts = work.splits.parts
        for part, predictions in found.items():
            self.results.keep_predictions(name, part, predictions.records(parts[part]))
        scores = {
            part: predictions.scores(self.config.measured, parts[part].targets) for part, predictions in found.items()
        }
        numbers = {
            "start": name.start,
            "seed": name.seed,
            **({} if name.fold is None else {"fold": name.fold}),
            "examples": {part: len(split) for part, split in work.splits.all.items()},
            "scores": scores,
            "best": {"step": run.best_step, "score": run.best[0], "loss": -run.best[1]},
            "steps": run.history[-1]["step"],
            "validations": run.history,
            "precision": run.precision,
            "seconds": round(seconds, 3),
            "device": str(run.device),
            "unmask": unmask.__version__,
        }
        self.results.keep(name, numbers)
        return numbers

    def _save(self, run: SeedRun) -> None:
        model = self.model
        tuned = Model(
            denoiser=run.network,
            tokenizer=model.tokenizer,
            objective=model.objective,
            length=model.length,
            packing=model.packing,
            anchor=model.anchor,
            typical_length=model.typical_length,
            drawing=model.drawing,
            separator=model.separator,
            labels=model.labels,
        )
        Classifier(tuned, run.work.task).save(self.results.folder / "model")


def task_of(model: Model, config: FinetuneConfig, splits: Splits) -> Task:
    """The task of the network; a head that does not fit is refused."""
    length = config.length or model.length
    if length > model.length:
        raise UsageError(f"length {length} is beyond the model's window of {model.length} tokens: give at most that")
    data = config.data
    mean, scale = unit_of(config, splits)
    task = Task(
        kind=config.kind,
        labels=splits.labels,
        pairs=data.pair is not None,
        head=config.head,
        length=length,
        between=config.between,
        text=data.text,
        pair=data.pair,
        label=data.label,
        complement=complement_of(model.tokenizer) if conjoins(model, config) else (),
        mean=mean,
        scale=scale,
    )
    description: Any = getattr(model.denoiser, "config", None)
    if description is not None:  # tested on a network without memory, before anything is written
        with torch.device("meta"), NoStart():
            tried = description.build(num_ids=model.tokenizer.num_ids, mask_id=model.tokenizer.mask_id)
            task.attach(tried)
    return task


def unit_of(config: FinetuneConfig, splits: Splits) -> tuple[float, float]:
    """Mean and scale of a regression's targets; (0, 1) for a classification.

    >>> unit_of(FinetuneConfig(), splits)  # doctest: +SKIP
    (0.0, 1.0)
    """
    if config.kind == "classification":
        return 0.0, 1.0
    train = splits.train.targets
    return statistics.fmean(train), statistics.pstdev(train) or 1.0


def conjoins(model: Model, config: FinetuneConfig) -> bool:
    """Whether a sequence and its reverse complement share one answer: as set by the options, otherwise if texts are
    DNA.

    >>> conjoins(unmask.load("stories"), FinetuneConfig())  # doctest: +SKIP
    False
    """
    if config.conjoin is not None:
        return config.conjoin
    return config.data.pair is None and spells_dna(model.tokenizer)
