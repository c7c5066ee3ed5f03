"""The state of a run: how it is created, validated, saved and resumed; the steps themselves are in `loop`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.config import RECIPE_FILE, RunConfig
from unmask.data.augment import augmentation
from unmask.data.loader import Loader
from unmask.data.packing import Rows, rows_of
from unmask.data.reading_bar import reading_bar
from unmask.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_json
from unmask.denoisers.network import Network
from unmask.denoisers.recorded import Recorder
from unmask.devices import pick_precision
from unmask.distributed.parallel import ParallelNetwork, whole
from unmask.distributed.world import World
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.evaluation.by_text import text_numbers
from unmask.evaluation.evaluate import chosen_rows, evaluate_rows
from unmask.evaluation.measurement import Measurement
from unmask.machine import made_by_all, made_with
from unmask.metrics.base import metric_names
from unmask.model import Model, load
from unmask.pretrained.base import Pretrained
from unmask.pretrained.families import read_pretrained
from unmask.reader import to_dict
from unmask.storage.atomic import atomic_text
from unmask.storage.model_folder import NoStart, load_weights, unshared
from unmask.storage.untrusted import read_text
from unmask.training.callbacks import Callback, MetricsFile, Sample, TensorBoard
from unmask.training.checkpoint.files import Checkpoint
from unmask.training.checkpoint.resume import STATE, check_same_run, find_checkpoint, read_run
from unmask.training.checkpoint.saving import make_saver
from unmask.training.clock import Clock
from unmask.training.compiling import compile_trunk
from unmask.training.ema import Ema
from unmask.training.held_out import held_out_sample, measure_all
from unmask.training.initial import adopted, is_pretrained, taken_over
from unmask.training.monitor import Guard
from unmask.training.optim import Updater, empty_state, flatten_optimizer, make_optimizer, restore_optimizer
from unmask.training.run_view import is_better
from unmask.training.warm_up import warming_up
from unmask.training.weights_and_biases import WandB


@dataclass(frozen=True)
class Unread:
    """A step whose numbers are still being copied from the device."""

    step: int
    lr: float
    indices: np.ndarray  # rows of the global batch
    tokens: int  # in these rows, prompts included
    numbers: Tensor
    arrived: torch.cuda.Event | None


NATS_PER_TOKEN = "valid_nats_per_token"  # the default of `best`, known to every process


def _with_precision(config: RunConfig, world: World) -> RunConfig:
    """The recipe with its precision decided by the first process and recorded, so that a resumed run uses the same."""
    return replace(config, precision=world.from_first(lambda: pick_precision(config.precision, world.device)))


class RunState:
    """Rows, network, average, optimizer, and the progress of the run."""

    def __init__(self, config: RunConfig, world: World, *, resume: bool, init: str | Path | None) -> None:
        if resume and init is not None:
            raise UsageError("a resumed run has its weights already: give --resume or --init, not both")
        pretrained: Pretrained | None = None
        if isinstance(init, str) and is_pretrained(init):
            pretrained = read_pretrained(init)
            config = adopted(config, pretrained, init)
        config = _with_precision(config, world)
        self.config, self.world, self.device = config, world, world.device
        self.share = world.share(config.batch)
        self.folder = Path(config.out)
        checkpoint = find_checkpoint(config, world, resume=resume)
        self.tokenizer = pretrained.tokenizer if pretrained else self._tokenizer(checkpoint is not None)
        if checkpoint is None and init is None:
            config.denoiser.check_start(num_ids=self.tokenizer.num_ids, mask_id=self.tokenizer.mask_id)
        augment = augmentation(config.data, self.tokenizer, config.seed)  # refuses before the texts are read
        with warming_up(config, self.tokenizer, self._build_network, self._autocast, world):
            rows, valid_rows = self._build_rows()
        self.labels = rows.class_words
        self.rows, self.valid_rows = rows.classed(self.labels), valid_rows.classed(self.labels)
        self.loader = Loader(self.rows, config.batch, config.seed, config.data.windows, augment)
        torch.manual_seed(config.seed % (1 << 63))  # on the CPU, so that initial weights are the same on all devices
        with contextlib.nullcontext() if checkpoint is None else NoStart():
            self.network = self._build_network().train()
        if checkpoint is None:  # otherwise the checkpoint has the prepared statistics
            config.objective.prepare(self.network, lambda: world.from_first(self.rows.token_counts))
        for rows in (self.rows, self.valid_rows):
            rows.check_labels(self.network.num_classes)
        self.network.checkpoint_activations = config.checkpoint_activations
        self.init_note = ""
        if checkpoint is not None:
            with checkpoint.holds(**STATE):
                check_same_run(config, self._data(), checkpoint)
        else:
            self._begin_with(init, pretrained)
        self.parallel = self._parallel()
        self.ema = Ema(self.network, config.optim.ema) if config.optim.ema else None
        self.optimizer, self.names = make_optimizer(self.network, config.optim)
        self.updater = Updater(self.optimizer, self.names, ema=self.ema, clip=config.optim.clip)
        self.saver = make_saver(config, world, self.parallel.kind)
        self.step, self.resumed = 0, 0
        self.best = self._worst = math.inf if config.best_is == "least" else -math.inf
        self.metrics: dict[str, float] = {}  # the newest value of each metric
        self.logged: set[str] = set()  # names of metrics that callbacks log
        self.end_reason = ""  # why a callback ends the run; known to the first process
        self.stopping, self.ending = False, False  # requests that all processes have read
        self.ended = False  # early, and announced
        self.guard = Guard(config.on_nonfinite, config.max_nonfinite)
        self.unread: deque[Unread] = deque()
        self.global_rows: tuple[np.ndarray, int] = (np.empty(0, dtype=np.int64), 0)
        self.began = time.perf_counter()
        self.clock, self.last_read = Clock(), 0.0  # training time, and its value at the newest report
        self.skipped: list[str] = []
        self.made_with = [made_with()] if world.first else []  # of every machine that has trained this run
        if checkpoint is not None:
            with checkpoint.holds(**STATE):
                self._restore(checkpoint)
        if world.first:
            self._write_recipe()

    def _write_recipe(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_text(self.folder / RECIPE_FILE, json.dumps(to_dict(self.config), indent=2) + "\n")
        atomic_text(self.folder / "tokenizer.json", self.tokenizer.to_json())

    def _parallel(self) -> ParallelNetwork:
        """The network prepared for training: on its device, compiled, distributed over the processes."""
        config, network = self.config, self.network
        if config.parallel != "fsdp" or self.world.size == 1:
            network.to(self.device)  # otherwise each process moves only its shard
        parallel = ParallelNetwork(network, self.world, config.parallel, bf16=config.precision == "bf16")
        if config.compile and parallel.kind == "fsdp":
            for part in network.parts():  # fsdp gathers weights between parts, which a graph cannot contain
                part.compile()
        elif config.compile:
            compile_trunk(network, padding=self.rows.typical_length() is not None)
        if parallel.kind == "alone" and self.device.type == "cuda":
            network.recorder = Recorder()
        return parallel

    # --- evaluating the model ---

    def validate(self) -> Bound:
        """The bound of the averaged weights on held-out rows; always with the same rows, times and masks."""
        how: dict[str, Any] = {"num_samples": 1, "max_rows": self.config.valid_rows, "world": self.world}
        with self._averaged(), self._autocast():
            bound = self.parallel.look(lambda net: evaluate_rows(net, self.config.objective, self.valid_rows, **how))
        return replace(bound, of_B=self._valid_texts)

    @cached_property
    def _valid_texts(self) -> Tensor | None:
        return text_numbers(self.valid_rows, self.tokenizer, chosen_rows(self.valid_rows, self.config.valid_rows))

    def measure(self) -> dict[str, Measurement]:
        """The recipe's `valid_metrics` of the averaged weights on held-out rows, by name.

        Rows and draws are always the same. All processes measure, since with sharded weights all must make the same
        calls.
        """
        metrics = self.config.valid_metrics
        if not metrics:
            return {}
        with self._averaged(), self._autocast():
            found = self.parallel.look(
                lambda network: measure_all(
                    metrics, self._model(network), self.valid_rows, max_rows=self.config.valid_rows, world=self.world
                )
            )
        self.network.train()
        return dict(zip(metric_names(metrics), found, strict=True))

    def note_best(self, bound: Bound, *, last: bool) -> bool:
        """Whether to keep the model, because the metric that the recipe names as `best` has improved.

        A run that ends without a value of that metric keeps its last model.
        """
        value: float | None = bound.nats_per_token
        if self.config.best != NATS_PER_TOKEN:  # only the first process knows a callback's metric
            value = self.world.from_first(lambda: self.metrics.get(self.config.best))
        better = is_better(value, self.best, self.config.best_is)
        if better and value is not None:
            self.best = value
        return better or (last and math.isinf(self.best))

    def copied_model(self, *, averaged: bool) -> Model:
        """A new model with a copy of the current weights, or of their average."""
        if self.parallel.kind == "fsdp":
            raise UsageError("under fsdp no process holds the whole model: load it from the run's folder")
        with torch.random.fork_rng(devices=[]), NoStart():
            network = self._build_network()
        weights = {name: tensor.detach().cpu() for name, tensor in unshared(self.network).items()}
        if averaged and self.ema is not None:
            weights |= {name: tensor.cpu() for name, tensor in self.ema.shadow.items()}
        network.load_state_dict(weights, strict=False)
        return self._model(network.to(self.device))

    def sample(self) -> Sample:
        """Generate a text with the averaged weights, on the first process; with sharded weights all take part.

        If texts have prompts or labels, those of a held-out row are used, of another row each time.
        """
        if not self.world.first and self.parallel.kind != "fsdp":
            return Sample("")
        # fsdp gathers the blocks' weights in the training precision, so the inputs must have that precision, too
        precision = self._autocast() if self.parallel.kind == "fsdp" else contextlib.nullcontext()
        with self._averaged(), precision:
            sample = self.parallel.look(
                lambda network: held_out_sample(self._model(network), self.valid_rows, self.step)
            )
            self.network.train()
        return sample

    def _model(self, network: Network) -> Model:
        return Model(
            denoiser=network,
            tokenizer=self.tokenizer,
            objective=self.config.objective,
            length=self.config.data.length,
            packing=self.config.data.packing,
            anchor=self.config.anchor,
            typical_length=self.rows.typical_length(),
            drawing=self.config.drawing,
            separator=self.config.data.train.prompt_end,
            labels=self.labels,
        )

    def info(self) -> dict[str, Any]:
        return {
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "device": str(self.device),
            "processes": self.world.size,
            "parallel": self.parallel.kind,
            "train": self.rows.report.sentence(),
            "valid": self.valid_rows.report.sentence(),
            "resumed_step": self.resumed,
            "skipped": self.skipped,
        }

    def listeners(self) -> list[Callback]:
        every = self.config.log_every
        listeners: list[Callback] = [MetricsFile(self.folder / "metrics.jsonl", every, self.resumed)]
        if importlib.util.find_spec("tensorboard"):
            listeners.append(TensorBoard(self.folder / "tensorboard", every, self.resumed))
        if self.config.wandb is not None:
            listeners.append(WandB(self.config.wandb, self.folder, every, self.resumed))
        return listeners

    # --- saving and resuming ---

    def prepare_saving(self) -> None:
        """Allocate pinned memory for copies from a GPU, which takes a while, once the optimizer has its state."""
        if self.device.type == "cuda" and self.world.first and self.parallel.kind != "fsdp":
            self.saver.prepare(self._tensors(flatten_optimizer(self.optimizer, self.names)[0]))

    def save(self, *, best: bool) -> None:
        """Write a checkpoint, after the model's folder if it is the best; or begin to do so in the background."""
        optimizer, optimizer_state = flatten_optimizer(self.optimizer, self.names)
        tensors = self._tensors(optimizer)
        if self.saver.sharers is None:
            tensors = {name: self._gathered(group) for name, group in tensors.items()}
            if not self.world.first:
                return
        state = {
            "config": to_dict(self.config),
            "best": None if math.isinf(self.best) else self.best,
            "ema_updates": self.ema.num_updates if self.ema else 0,
            "optimizer": optimizer_state,
            "data": self._data(),
            "skipped_steps": self.guard.skipped,
            "train_seconds": self.clock.seconds,
            "made_with": self.made_with,
        }
        write_model = None
        if best:
            write_model = partial(self._write_model, self._model(self.network))
            self.network.train()  # a `Model` sets its network to evaluation mode
        self.saver.save(self.step, tensors, state, best=best, write_model=write_model)

    def _write_model(self, model: Model, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write RUN/model from a checkpoint's tensors: the average if there is one, and what is not averaged."""
        weights = self._gathered({**tensors["model"], **tensors.get("ema", {})})
        if self.world.first:
            model.save(self.folder / "model", weights=weights)

    def _tensors(self, optimizer: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        averages = {} if self.ema is None else {"ema": self.ema.shadow}
        return {"model": unshared(self.network), "optimizer": optimizer, **averages}

    def _gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The full tensors, on the first process; the others only contribute their shards."""
        if self.parallel.kind != "fsdp":
            return tensors
        gathered = ((name, whole(tensor)) for name, tensor in tensors.items())  # one at a time on the device
        return {name: tensor.cpu() if self.world.first else tensor.new_empty(0) for name, tensor in gathered}

    def _data(self) -> list[dict[str, Any]]:
        """Fingerprints of the rows: a run can be resumed only with exactly the same data."""
        return [{"key": rows.key} | asdict(rows.report) for rows in (self.rows, self.valid_rows)]

    def _restore(self, checkpoint: Checkpoint) -> None:
        room = empty_state(self.optimizer, self.names, checkpoint.state["optimizer"])
        read_run(checkpoint, self._tensors(room), self.world)
        restore_optimizer(self.optimizer, self.names, checkpoint.tensors["optimizer"], checkpoint.state["optimizer"])
        if self.ema is not None:
            self.ema.load(checkpoint.tensors["ema"], checkpoint.state["ema_updates"])
        self.step = self.resumed = checkpoint.step
        self.best = self._worst if checkpoint.state["best"] is None else checkpoint.state["best"]
        self.guard.skipped = checkpoint.state.get("skipped_steps", 0)
        self.skipped = checkpoint.skipped
        self.made_with = made_by_all(checkpoint.state.get("made_with"), self.made_with)
        self.saver.durable = checkpoint.step
        self.clock = Clock(checkpoint.state.get("train_seconds", 0.0))
        self.last_read = self.clock.seconds

    def _begin_with(self, init: str | Path | None, pretrained: Pretrained | None) -> None:
        if pretrained is not None:
            self._take(dict(pretrained.state), str(init))
            self.init_note = taken_over(self.config, pretrained, str(init))
        elif init is not None:
            self._init_from(init)

    def _init_from(self, init: str | Path) -> None:
        other = load(init, device="cpu")
        if other.tokenizer.fingerprint() != self.tokenizer.fingerprint():
            raise UsageError(f"{init} has another tokenizer than this run: set tokenizer = {str(init)!r} in the recipe")
        if other.denoiser.num_classes and other.labels != self.labels:
            raise UsageError(f"{init} has other labels than this run: give a corpus with the same, or leave out --init")
        self._take(unshared(other.denoiser), str(init))

    def _take(self, weights: dict[str, Tensor], init: str) -> None:
        """Start from the given weights; parameters that they may lack begin as `Network.begins_anew` says."""
        own = unshared(self.network)
        weights = self.network.begins_anew() | weights
        parts = [{k: t.shape for k, t in tensors.items() if k.startswith("objective.")} for tensors in (weights, own)]
        if parts[0] != parts[1]:  # the modules of another objective are not reused
            weights = {k: t for k, t in weights.items() if k not in parts[0]} | {k: own[k] for k in parts[1]}
            self.init_note = f"the parameters of the objective are not those of {init}: they begin anew"
        load_weights(self.network, weights, init)

    # --- creating the parts ---

    def _build_network(self) -> Network:
        """The denoiser, with the modules that the objective builds."""
        denoiser = self.config.denoiser.for_tokenizer(self.tokenizer)
        network = denoiser.build(num_ids=self.tokenizer.num_ids, mask_id=self.tokenizer.mask_id)
        denoiser.describe(network)
        self.config.objective.attach(network)
        self.config.objective.check(network)
        self.config.objective.check_whole(network)
        return network

    def _tokenizer(self, resuming: bool) -> Tokenizer:
        path = self.folder / "tokenizer.json"

        def text() -> str:
            if resuming and path.exists():  # a tokenizer trained on the corpus is not trained again
                return read_text(path)
            return load_tokenizer(self.config.tokenizer, self.config.data.train).to_json()

        return tokenizer_from_json(self.world.from_first(text))

    def _build_rows(self) -> tuple[Rows, Rows]:
        with reading_bar() as bar:
            how: dict[str, Any] = {"anchor": self.config.anchor, "progress": bar}
            train = rows_of(self.config.data, self.tokenizer, "train", **how)
            return train, rows_of(self.config.data, self.tokenizer, "valid", **how)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.ema is None else self.ema.applied()
