"""One seed of a fine-tuning, to be read from top to bottom: rows → head → loss → update; validation, early stopping,
best.

It shares optimizer, schedule, clipping, average and guard with `training.loop`, but not the loop. That one counts
tokens of packed rows, measures bounds and checkpoints one long run; this one has examples, metrics and many short runs,
each of which is stored when it is finished.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.data.order import coins, permuted
from unmask.denoisers import Denoiser
from unmask.denoisers.network import Network
from unmask.devices import fast_attention, few_threads, pick_precision, put
from unmask.errors import Stopped, UsageError
from unmask.finetuning.config import FinetuneConfig
from unmask.finetuning.predictions import Predictions, loss_of, predict_rows
from unmask.finetuning.results import Start
from unmask.finetuning.rows import TaskRows
from unmask.finetuning.splits import Splits
from unmask.heads.task import Task, task_outputs
from unmask.model import Model
from unmask.rng import row_keys
from unmask.storage.model_folder import NoStart, load_weights, unshared
from unmask.training.ema import Ema
from unmask.training.monitor import Guard
from unmask.training.optim import Updater, learning_rate, make_optimizer


class Watch:
    """Callbacks of a fine-tuning; each method may be overridden."""

    def on_seed(self, start: Start, seed: int, steps: int) -> None:
        """A seed starts."""

    def on_fold(self, fold: int, folds: int) -> None:
        """The seed that starts is for this fold of a cross-validation."""

    def on_step(self, step: int, loss: float) -> None:
        """A step is done; loss is that of its batch."""

    def on_valid(self, step: int, scores: dict[str, float], *, best: bool) -> None:
        """The validation examples were measured."""

    def on_note(self, sentence: str) -> None:
        """A message for the user."""


@dataclass(frozen=True)
class Work:
    """What all seeds of a fine-tuning have in common."""

    model: Model
    task: Task
    config: FinetuneConfig
    splits: Splits
    rows: dict[str, TaskRows]  # for train, valid and, if there is one, test
    watch: Watch
    asked_to_stop: Callable[[], bool]

    @property
    def steps_an_epoch(self) -> int:
        return math.ceil(len(self.splits.train) / self.config.batch)

    @property
    def steps(self) -> int:
        return self.steps_an_epoch * self.config.epochs


@dataclass(frozen=True)
class Unread:
    """A step whose loss and gradient norm are still being copied from the device."""

    step: int
    indices: np.ndarray
    numbers: Tensor
    arrived: torch.cuda.Event | None


@dataclass
class SeedRun:
    """Trains a network from one start with one seed."""

    work: Work
    start: Start
    seed: int
    best: tuple[float, float] = (-math.inf, -math.inf)  # the metric, and minus the loss to break ties
    best_step: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    since_best: int = 0

    def __post_init__(self) -> None:
        work, config = self.work, self.work.config
        self.device = work.model.device
        self.network = start_network(work.model, work.task, seed=self.seed, pretrained=self.start == "model")
        self.network.to(self.device, torch.float32)
        if config.freeze:
            for name, parameter in self.network.named_parameters():
                parameter.requires_grad_(name.startswith("task."))
        self.ema = Ema(self.network, config.optim.ema) if config.optim.ema else None
        self.optimizer, names = make_optimizer(self.network, config.optim)
        self.updater = Updater(self.optimizer, names, ema=self.ema, clip=config.optim.clip)
        self.precision = pick_precision(config.precision, self.device)
        self.guard = Guard("stop", 0, kept="finished seeds")
        self.unread: Unread | None = None

    def run(self) -> dict[str, Predictions]:
        """Train until the last epoch or early stopping; returns the best weights' outputs for each part.

        They stay loaded.
        """
        work = self.work
        every = work.config.valid_every or work.steps_an_epoch
        with few_threads(self.device):
            self._train_mode()
            for step in range(work.steps):
                if work.asked_to_stop():
                    raise Stopped(f"stopped at step {step} of seed {self.seed}; finished seeds are kept: run it again")
                self._step(step)
                last = step + 1 == work.steps
                if (step + 1) % every == 0 or last:
                    self._read()
                    self._look(step + 1)
                    if self.since_best >= work.config.patience:
                        break
            self.network.load_state_dict(self.best_weights, strict=False)
            return {name: self._predict(work.rows[name]) for name in work.splits.parts}

    def _step(self, step: int) -> None:
        work, config = self.work, self.work.config
        indices = self._indices(step)
        part = work.rows["train"].batch(indices.tolist(), other=self._other_strand(step, indices))
        target_B = torch.tensor([work.splits.train.targets[i] for i in indices])
        # Dropout depends only on seed and step, so that a repeated seed is identical.
        torch.manual_seed(int(row_keys(self.seed, torch.tensor(step))))
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast(), fast_attention():
            out_BK = task_outputs(work.task, self.network, *part)
            loss = loss_of(work.task, out_BK, put(target_B, self.device))
        loss.backward()  # type: ignore[no-untyped-call]
        loss, norm = loss.detach(), self.updater.grad_norm()
        lr = learning_rate(config.optim, step, work.steps)
        self.updater.update(lr=lr, grad_norm=norm, nonfinite=~torch.isfinite(loss + norm))
        self._read()  # reads the previous step, so that the host does not wait for the GPU
        numbers = torch.stack([loss, norm]).to("cpu", non_blocking=self.device.type == "cuda")
        arrived = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if arrived is not None:
            arrived.record()
        self.unread = Unread(step + 1, indices, numbers, arrived)

    def _indices(self, step: int) -> np.ndarray:
        """The examples of a step: part of a permutation keyed by seed and epoch."""
        n, size = len(self.work.splits.train), self.work.config.batch
        epoch, within = divmod(step, self.work.steps_an_epoch)
        places = np.arange(within * size, min(n, (within + 1) * size), dtype=np.int64)
        return permuted(places, n, self.seed, np.full(len(places), epoch, dtype=np.int64))

    def _other_strand(self, step: int, indices: np.ndarray) -> list[bool] | None:
        """Which examples are read as the other strand: each every second time, if the network reads one strand in
        training."""
        task, network = self.work.task, self.network
        if not task.conjoined or network.width > task.width(network):
            return None
        turned: list[bool] = (coins(self.seed, indices) ^ bool(step // self.work.steps_an_epoch % 2)).tolist()
        return turned

    def _read(self) -> None:
        """Process the numbers of the latest step that has not been read yet."""
        unread, self.unread = self.unread, None
        if unread is None:
            return
        if unread.arrived is not None:
            unread.arrived.synchronize()
        loss, norm = unread.numbers.tolist()
        if word := self.guard.look(unread.step, loss, norm, unread.indices, Path(self.work.config.out))[0]:
            self.work.watch.on_note(word)
        self.work.watch.on_step(unread.step, loss)

    def _look(self, step: int) -> None:
        """Measure the validation examples; keep the weights if they are the best so far."""
        config, targets = self.work.config, self.work.splits.valid.targets
        with contextlib.nullcontext() if self.ema is None else self.ema.applied():
            predictions = self._predict(self.work.rows["valid"])
            scores, loss = predictions.scores(config.measured, targets), predictions.loss(targets)
            now = scores[config.measured[0]], -loss
            better = now > self.best
            if better:
                self.best, self.best_step = now, step
                self.best_weights = {k: t.detach().to("cpu", copy=True) for k, t in unshared(self.network).items()}
        self.since_best = 0 if better else self.since_best + 1
        self.history.append({"step": step, "loss": loss, **scores})
        self.work.watch.on_valid(step, scores, best=better)
        self._train_mode()

    def _train_mode(self) -> None:
        """Enable dropout in the trained parts."""
        self.network.train(not self.work.config.freeze)
        assert self.network.task is not None
        self.network.task.train()

    def _predict(self, rows: TaskRows) -> Predictions:
        return predict_rows(self.work.task, self.network, rows, batch=64, autocast=self._autocast)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def start_network(model: Model, task: Task, *, seed: int, pretrained: bool) -> Network:
    """A copy of the model's network with a fresh head, with the model's weights or random ones.

    >>> start_network(model, task, seed=0, pretrained=True).task  # doctest: +SKIP
    """
    description = getattr(model.denoiser, "config", None)
    if not isinstance(description, Denoiser):
        raise UsageError("only a denoiser made by a plug-in can be fine-tuned: this one has no description")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(row_keys(seed, torch.tensor(-1))))  # steps count from 0
        with NoStart() if pretrained else contextlib.nullcontext():
            network = description.build(num_ids=model.tokenizer.num_ids, mask_id=model.tokenizer.mask_id)
            model.objective.attach(network)
        description.describe(network)
        if pretrained:
            own = {k: t.detach().cpu() for k, t in unshared(model.denoiser).items() if not k.startswith("task.")}
            load_weights(network, own, "the model")
        torch.manual_seed(int(row_keys(seed, torch.tensor(-2))))
        task.attach(network)
    return network
