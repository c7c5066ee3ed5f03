"""A fine-tuning from its files to its report: every seed, from the model and, if asked for, from random weights."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

import unmask
from unmask.data.complement import complement_of, spells_dna
from unmask.devices import pick_device
from unmask.distributed.stopping import stop_requests
from unmask.distributed.world import World
from unmask.errors import UsageError
from unmask.evaluation.suites.results import model_fingerprint
from unmask.finetuning.classifier import Classifier, load_classifier
from unmask.finetuning.config import FinetuneConfig
from unmask.finetuning.examples import Split, Splits, make_splits
from unmask.finetuning.predictions import Predictions
from unmask.finetuning.results import Numbers, Results, digest
from unmask.finetuning.rows import make_rows
from unmask.finetuning.scores import check_metrics, score_all
from unmask.finetuning.seed_run import SeedRun, Start, Watch, Work
from unmask.finetuning.table import markdown, summarize
from unmask.heads.task import Task
from unmask.model import Model, load_any
from unmask.reader import adopt_plugins, to_dict
from unmask.storage.model_folder import NoStart
from unmask.training.monitor import steady_gc
from unmask.training.run_lock import one_writer

NOT_DECISIVE = ("out", "seeds", "from_scratch", "data")  # of the examples the content counts


@dataclass(frozen=True)
class Finetuned:
    """A finished fine-tuning: its folder, and its report as `report.json` has it."""

    folder: Path
    report: Numbers

    def classifier(self, device: str | None = None) -> Classifier:
        """The seed that was best on the validation examples."""
        return load_classifier(self.folder, device=device)


def finetune(
    model: Model | str | Path,
    config: FinetuneConfig,
    *,
    device: str | None = None,
    watch: Watch | None = None,
) -> Finetuned:
    """Fine-tune a model for a task, over seeds; `unmask finetune` is this function.

    A call that is repeated goes on with the first seed that is not finished. Everything random depends on the seed, the
    epoch and the step, so a seed that is begun anew is the same one.

    >>> finetune("stories", load_finetune_config(None, {"data.train": "mine.tsv"}))  # doctest: +SKIP
    """
    if not isinstance(cast(object, config), FinetuneConfig):
        raise UsageError(f"finetune takes a FinetuneConfig, such as load_finetune_config() gives, got {config!r:.60}")
    adopt_plugins(config.head)
    splits = make_splits(config)
    check_metrics(config.measured, config.kind, len(splits.labels))
    name = str(model) if isinstance(model, str | Path) else "a model in memory"
    base = model_of(model, device)
    with stop_requests() as asked_to_stop, one_writer(Path(config.out), World()) as note:
        run = _Run(base, name, config, splits, watch or Watch(), asked_to_stop)
        if note:
            run.work.watch.on_note(note)
        return run.run()


def model_of(model: Model | str | Path, device: str | None) -> Model:
    """The model to begin with; the head of one that is a classifier already is left behind."""
    if isinstance(model, Model):
        base = model
    else:
        base, task = load_any(model, device=pick_device(device))
        if task is not None:
            base.denoiser.task = None
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
        config: FinetuneConfig,
        splits: Splits,
        watch: Watch,
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self.model, self.name, self.config, self.splits = model, name, config, splits
        self.task = task_of(model, config, splits)
        parts = {"train": splits.train} | splits.parts
        rows = {part: make_rows(split.examples, self.task, model) for part, split in parts.items()}
        self.work = Work(model, self.task, config, splits, rows, watch, asked_to_stop)
        self.results = Results(Path(config.out))
        self.parts = parts

    def run(self) -> Finetuned:
        decisive = {k: v for k, v in to_dict(self.config).items() if k not in NOT_DECISIVE}
        data = {part: digest(split) for part, split in self.parts.items()}
        identity = {"model": model_fingerprint(self.model), "data": data, "options": decisive}
        identity |= {"conjoined": True} if self.task.conjoined else {}
        self.results.begin(identity, {"model": self.name, "config": to_dict(self.config), "task": to_dict(self.task)})
        starts: list[Start] = ["model", "scratch"] if self.config.from_scratch else ["model"]
        seeds: dict[str, dict[int, Numbers]] = {start: {} for start in starts}
        with steady_gc():
            for seed in range(self.config.seeds):
                for start in starts:
                    numbers = self.results.finished(start, seed)
                    seeds[start][seed] = numbers or self._seed(start, seed, seeds[start])
        report = self._report(seeds)
        self.results.keep_report(report, markdown(report))
        return Finetuned(self.results.folder, report)

    def _seed(self, start: Start, seed: int, before: dict[int, Numbers]) -> Numbers:
        """Run a seed and keep it: the model first where it is the best, then predictions, then the numbers."""
        self.work.watch.on_seed(start, seed, self.work.steps)
        began = time.perf_counter()
        run = SeedRun(self.work, start, seed)
        found = run.run()
        seconds = time.perf_counter() - began
        if start == "model" and all(run.best > (one["best"]["score"], -one["best"]["loss"]) for one in before.values()):
            self._save(run)
        for part, predictions in found.items():
            self.results.keep_predictions(start, seed, part, predictions.records(self.parts[part]))
        numbers = {
            "start": start,
            "seed": seed,
            "scores": {part: self._scores(predictions, self.parts[part]) for part, predictions in found.items()},
            "best": {"step": run.best_step, "score": run.best[0], "loss": -run.best[1]},
            "steps": run.history[-1]["step"],
            "validations": run.history,
            "precision": run.precision,
            "seconds": round(seconds, 3),
            "device": str(run.device),
            "unmask": unmask.__version__,
        }
        self.results.keep(start, seed, numbers)
        return numbers

    def _scores(self, predictions: Predictions, split: Split) -> dict[str, float]:
        return predictions.scores(self.config.measured, split.targets)

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
        Classifier(tuned, self.task).save(self.results.folder / "model")

    def _report(self, seeds: dict[str, dict[int, Numbers]]) -> Numbers:
        parts, rows, splits = self.parts, self.work.rows, self.splits
        return {
            "model": self.name,
            "parameters": self.model.num_parameters,
            "task": to_dict(self.task),
            "metrics": list(self.config.measured),
            "examples": {part: len(split) for part, split in parts.items()},
            "sources": {part: split.what for part, split in parts.items()},
            "cut_texts": {part: one.cut_texts for part, one in rows.items()},
            "cut_tokens": {part: sum(one.cut) for part, one in rows.items()},
            "repeated": {part: repeated(split, splits.train) for part, split in splits.parts.items()},
            "guess": {part: guess(self.config, splits, split) for part, split in splits.parts.items()},
            "results": summarize(seeds),
            "seconds": round(sum(one["seconds"] for start in seeds.values() for one in start.values()), 3),
        }


def task_of(model: Model, config: FinetuneConfig, splits: Splits) -> Task:
    """What the network is to answer; a head that does not fit it is refused."""
    length = config.length or model.length
    if length > model.length:
        raise UsageError(f"length {length} is beyond the model's window of {model.length} tokens: give at most that")
    data, train = config.data, splits.train.targets
    regression = config.kind == "regression"
    task = Task(
        kind=config.kind,
        labels=splits.labels,
        pairs=data.pair is not None,
        head=config.head,
        length=length,
        between=config.between,
        mean=statistics.fmean(train) if regression else 0.0,
        scale=(statistics.pstdev(train) or 1.0) if regression else 1.0,
        text=data.text,
        pair=data.pair,
        label=data.label,
        complement=complement_of(model.tokenizer) if conjoins(model, config) else (),
    )
    description: Any = getattr(model.denoiser, "config", None)
    if description is not None:  # tried on a network without numbers, before anything is written
        with torch.device("meta"), NoStart():
            tried = description.build(num_ids=model.tokenizer.num_ids, mask_id=model.tokenizer.mask_id)
            task.attach(tried)
    return task


def conjoins(model: Model, config: FinetuneConfig) -> bool:
    """Whether a sequence and its reverse complement get one answer: as the options say, else where texts are DNA.

    >>> conjoins(unmask.load("stories"), FinetuneConfig())  # doctest: +SKIP
    False
    """
    if config.conjoin is not None:
        return config.conjoin
    return config.data.pair is None and spells_dna(model.tokenizer)


def repeated(split: Split, train: Split) -> int:
    """How many examples of a split stand in the training examples, word for word."""
    known = {(one.text, one.pair) for one in train.examples}
    return sum((one.text, one.pair) in known for one in split.examples)


def guess(config: FinetuneConfig, splits: Splits, split: Split) -> dict[str, float]:
    """The scores of the answer that knows no text: the most frequent class, or the mean, of the training examples."""
    train = splits.train.targets
    if config.kind == "classification":
        answer = Counter(train).most_common(1)[0][0]
    else:
        answer = statistics.fmean(train)
    return score_all(config.measured, config.kind, [answer] * len(split), split.targets)
