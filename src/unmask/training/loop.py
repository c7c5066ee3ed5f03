"""Training: text → tokens → packed rows → noise → denoiser → loss. The loop is `train`, read from top to bottom."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.config import RECIPE_FILE, RunConfig, to_dict
from unmask.data.batch import Batch, make_batch
from unmask.data.loader import Loader
from unmask.data.packing import Rows, reading_bar, rows_of
from unmask.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_json
from unmask.denoisers.network import Network
from unmask.devices import fast_attention, few_threads
from unmask.distributed.parallel import Spread, World, join_world, whole
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.evaluation.evaluate import evaluate_rows
from unmask.model import Model, load
from unmask.reader import adopt_plugins
from unmask.rng import row_keys
from unmask.storage.atomic import atomic_text
from unmask.storage.model_folder import NoStart, load_weights, unshared
from unmask.storage.untrusted import read_text
from unmask.training.callbacks import Announcer, Callback, MetricsFile, Sample, StepReport, TensorBoard
from unmask.training.checkpoint.files import Checkpoint
from unmask.training.checkpoint.resume import STATE, check_same_run, find_checkpoint, mark_begun, read_run, stopped
from unmask.training.checkpoint.saving import make_saver
from unmask.training.ema import Ema
from unmask.training.held_out import held_out_sample
from unmask.training.monitor import Guard, steady_gc, stop_requests
from unmask.training.optim import (
    Updater,
    empty_state,
    flatten_optimizer,
    learning_rate,
    make_optimizer,
    restore_optimizer,
)
from unmask.training.run_lock import one_writer


def train(
    config: RunConfig,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    init: str | Path | None = None,
    device: str | None = None,
    timeout: float = 600.0,
) -> Model:
    """Train as the config says and return the best model by validation bound; `unmask train` is this function.

    Everything random depends on (seed, step, row) alone, so a resumed run repeats the uninterrupted one bit for bit,
    and a run on several processes (torchrun) is the same run. timeout: seconds to wait for a process that hangs.

    >>> train(load_config("demo", {"steps": "10"}))  # doctest: +SKIP
    """
    adopt_plugins(config)
    config = replace(config, data=config.data.absolute())  # the run is read from elsewhere, too
    with join_world(device, timeout=timeout) as world, one_writer(Path(config.out), world) as note:
        run = Run(config, world, resume=resume, init=init)
        tell = Announcer([*run.listeners(), *callbacks] if world.first else [])
        try:
            tell.on_start(config, run.info())
            if note:
                tell.on_note(run.step, note)
            mark_begun(config, world)
            with world.together():
                _loop(run, tell)
        finally:
            for step, path in run.saver.close():
                tell.on_save(step, path)
            if run.saver.failed is not None:
                tell.on_note(run.step, f"the last save failed: {run.saver.failed}")
            tell.on_end()
        world.barrier()  # what the others load, the first has written
        return load(run.folder, device=str(world.device))


def _loop(run: Run, tell: Announcer) -> None:
    config, world = run.config, run.world
    ahead = run.loader.prefetch(run.step, config.steps - run.step, lo=run.share[0], hi=run.share[1])
    with stop_requests() as asked_to_stop, steady_gc(), few_threads(world.device), ahead as batches:
        if run.step == 0:
            tell.on_valid(0, run.validate())
        if run.spread.kind == "ddp":
            # DDP lays its exchange out anew after the first backward pass and sums in another order from then on. One
            # that counts for nothing lets a resumed run sum as the run it continues.
            run.forward_backward(run.loader.fetch(run.step, *run.share))
        run.began = run.last_read = time.perf_counter()
        for rows in batches:
            lr = learning_rate(config.optim, run.step, config.steps)
            numbers = run.forward_backward(rows, asked_to_stop)
            run.update(lr, *numbers[:2])
            run.note(lr, *numbers)
            world.arm()
            last = run.step == config.steps
            # A GPU is handed the next step before the last one's numbers are read, so it never waits for us.
            run.announce(tell, keep=0 if run.looks_now() else 1)

            improved = False
            if run.step % config.valid_every == 0 or last:
                bound = run.validate()
                improved = run.note_best(bound)
                tell.on_valid(run.step, bound)
            if config.sample_every and (run.step % config.sample_every == 0 or last):
                tell.on_sample(run.step, run.sample())
            # Several processes stop at the step at which all have read that one of them was asked to.
            stopping = (run.stopping or (world.size == 1 and asked_to_stop())) and not last
            if stopping:
                run.announce(tell)
            if run.step % config.saved_every == 0 or improved or last or stopping:
                run.save(best=improved)
            for step, path in run.saver.finished(wait=last or stopping):
                tell.on_save(step, path)
            if run.looks_now():
                run.last_read = time.perf_counter()  # validating and saving are no part of a step
            if stopping:
                world.barrier()  # the first process may still be writing: who leaves now ends it
                raise stopped(config, world, run.step)


class Run:
    """Everything a run holds: rows, network, average, optimizer, and where it stands."""

    def __init__(self, config: RunConfig, world: World, *, resume: bool, init: str | Path | None) -> None:
        if resume and init is not None:
            raise UsageError("a resumed run has its weights already: give --resume or --init, not both")
        self.config, self.world, self.device = config, world, world.device
        self.share = world.share(config.batch)
        self.folder = Path(config.out)
        checkpoint = find_checkpoint(config, world, resume=resume)
        self.tokenizer = self._tokenizer(checkpoint is not None)
        rows, valid_rows = self._build_rows()
        self.labels = rows.class_words
        self.rows, self.valid_rows = rows.classed(self.labels), valid_rows.classed(self.labels)
        self.loader = Loader(self.rows, config.batch, config.seed)
        torch.manual_seed(config.seed % (1 << 63))  # on the CPU, whatever is trained on: the same weights everywhere
        with contextlib.nullcontext() if checkpoint is None else NoStart():
            ids = {"num_ids": self.tokenizer.num_ids, "mask_id": self.tokenizer.mask_id}
            self.network = config.denoiser.build(**ids)
            config.denoiser.describe(self.network)
            self.network.train()
        for rows in (self.rows, self.valid_rows):
            rows.check_labels(self.network.num_classes)
        self.network.checkpoint_activations = config.checkpoint_activations
        if checkpoint is not None:
            with checkpoint.holds(**STATE):
                check_same_run(config, self._data(), checkpoint)
        elif init is not None:
            self._init_from(init)
        self.spread = self._spread()
        self.ema = Ema(self.network, config.optim.ema) if config.optim.ema else None
        self.optimizer, self.names = make_optimizer(self.network, config.optim)
        self.updater = Updater(self.optimizer, self.names, ema=self.ema, clip=config.optim.clip)
        self.saver = make_saver(config, world, self.spread.kind)
        self.step, self.best, self.resumed = 0, math.inf, 0
        self.stopping = False
        self.guard = Guard(config.on_nonfinite, config.max_nonfinite)
        self.unread: deque[Unread] = deque()
        self.global_rows: tuple[np.ndarray, int] = (np.empty(0, dtype=np.int64), 0)
        self.began = self.last_read = time.perf_counter()
        self.skipped: list[str] = []
        if checkpoint is not None:
            with checkpoint.holds(**STATE):
                self._restore(checkpoint)
        if world.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_text(self.folder / RECIPE_FILE, json.dumps(to_dict(config), indent=2) + "\n")
            atomic_text(self.folder / "tokenizer.json", self.tokenizer.to_json())

    def _spread(self) -> Spread:
        """The network where it is trained: on its device, compiled, shared with the other processes."""
        config, network = self.config, self.network
        if config.parallel != "fsdp" or self.world.size == 1:
            network.to(self.device)  # else each process takes its share alone
        spread = Spread(network, self.world, config.parallel, bf16=config.precision == "bf16")
        if config.compile and spread.kind == "fsdp":
            for part in network.parts():  # between two parts weights are fetched, which no graph holds
                part.compile()
        elif config.compile:
            compile_trunk(network)
        return spread

    # --- the parts of one step ---

    def forward_backward(
        self, rows: tuple[Any, ...], asked_to_stop: Callable[[], bool] = lambda: False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss in nats per token of the global batch, the gradient's norm before clipping, and how many processes were
        asked to stop; all on the device.

        Batches are noised on the host: how many tokens are masked is then known without asking the device.
        """
        _, x, valid_len, prefix_len = (torch.from_numpy(a) for a in rows)
        label = self.rows.labels_of(rows[0])
        batch, (first, _) = self.config.batch, self.share
        indices = self.loader.indices(self.step)
        scored, tokens_seen = self.rows.counts(indices)
        self.global_rows = indices, tokens_seen  # for the report of this step
        tokens = max(scored, 1)
        micro = self.config.micro_batch or batch
        total = torch.zeros((), device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for lo in range(0, len(x), micro):
            hi = min(lo + micro, len(x))
            part = make_batch(
                x[lo:hi],
                valid_len[lo:hi],
                prefix_len[lo:hi],
                seed=self.config.seed,
                step=self.step,
                first_row=first + lo,
                num_rows=batch,
                label_B=None if label is None else torch.from_numpy(label[lo:hi]),
                suffix=self.rows.suffix,
            )
            # Dropout, too, depends on the step and the micro-batch alone: resuming needs no generator state.
            torch.manual_seed(int(row_keys(self.config.seed, torch.tensor(self.step * batch + first + lo))))
            with self._autocast(), fast_attention(), self.spread.accumulating(more=hi < len(x)):
                nats = self.spread(partial(self._nats, part))
                # Processes take the mean of their gradients, the batch's is a sum.
                with self.world.together():
                    (nats * self.world.size / tokens).backward()  # type: ignore[no-untyped-call]
            total += nats.detach()
        loss, stops = self.world.sum_(torch.stack([total / tokens, total.new_full((), float(asked_to_stop()))]))
        return loss, self.updater.grad_norm(), stops

    def _nats(self, part: Batch, network: Network) -> Tensor:
        return self.config.objective.loss(network, part).nats

    def update(self, lr: float, loss: Tensor, grad_norm: Tensor) -> None:
        # A number that is none would ruin the weights for good: they are left alone, on the device, and the guard
        # decides as soon as the host reads it.
        self.updater.update(lr=lr, grad_norm=grad_norm, bad=~torch.isfinite(loss + grad_norm))
        self.step += 1

    # --- reading what a step gave ---

    def note(self, lr: float, loss: Tensor, grad_norm: Tensor, stops: Tensor) -> None:
        """Send the step's numbers to the host without waiting for them."""
        numbers = torch.stack([loss, grad_norm, stops])
        arrived = None
        if self.device.type == "cuda":
            numbers = numbers.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self.unread.append(Unread(self.step, lr, *self.global_rows, numbers, arrived))

    def looks_now(self) -> bool:
        """Does something look at the weights after this step? On a CPU a step is over when it returns, so always."""
        config, step = self.config, self.step
        every = (config.valid_every, config.saved_every, config.sample_every)
        return self.device.type != "cuda" or step == config.steps or any(e and step % e == 0 for e in every)

    def announce(self, tell: Callback, keep: int = 0) -> None:
        """Tell what the steps gave, save the newest `keep`; the guard may end the run here."""
        while len(self.unread) > keep:
            seen = self.unread.popleft()
            if seen.arrived is not None:
                seen.arrived.synchronize()
            loss, grad_norm, stops = seen.numbers.tolist()
            self.stopping = self.stopping or stops > 0
            word, fine = self.guard.look(seen.step, loss, grad_norm, seen.indices, self.folder)
            if word:
                tell.on_note(seen.step, word)
            now = time.perf_counter()
            rate, self.last_read = seen.tokens / (now - self.last_read), now
            if fine:
                tell.on_step(StepReport(seen.step, loss, seen.lr, grad_norm, rate, now - self.began, seen.tokens))

    # --- looking at the model ---

    def validate(self) -> Bound:
        """The bound of the averaged weights on held-out rows; the same rows, times and masks every time."""
        config, world = self.config, self.world
        with self._averaged(), self._autocast():
            return self.spread.look(
                lambda network: evaluate_rows(
                    network, config.objective, self.valid_rows, num_samples=1, max_rows=config.valid_rows, world=world
                )
            )

    def note_best(self, bound: Bound) -> bool:
        """Keep the model folder at the best validation so far."""
        if not bound.nats_per_token < self.best:
            return False
        self.best = bound.nats_per_token
        with self._averaged():
            weights = self._gathered(unshared(self.network))
            if self.world.first:
                self._model(self.network).save(self.folder / "model", weights=weights)
            self.network.train()
        return True

    def sample(self) -> Sample:
        """A text of the averaged weights, by the first process; the others take part where they hold some of them.

        Where texts have prompts or labels it is asked for by those of a held-out row, at each sample of another.
        """
        if not self.world.first and self.spread.kind != "fsdp":
            return Sample("")
        # fsdp hands the blocks their weights in the training's precision, so what goes in must be in it, too
        precision = self._autocast() if self.spread.kind == "fsdp" else contextlib.nullcontext()
        with self._averaged(), precision:
            sample = self.spread.look(lambda network: held_out_sample(self._model(network), self.valid_rows, self.step))
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
            "parallel": self.spread.kind,
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
        return listeners

    # --- keeping and resuming ---

    def save(self, *, best: bool) -> None:
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
        }
        self.saver.save(self.step, tensors, state, best=best)

    def _tensors(self, optimizer: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        averages = {} if self.ema is None else {"ema": self.ema.shadow}
        return {"model": unshared(self.network), "optimizer": optimizer, **averages}

    def _gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors whole, on the first process; the others only give their shares."""
        if self.spread.kind != "fsdp":
            return tensors
        gathered = ((name, whole(tensor)) for name, tensor in tensors.items())  # one at a time on the device
        return {name: tensor.cpu() if self.world.first else tensor.new_empty(0) for name, tensor in gathered}

    def _data(self) -> list[dict[str, Any]]:
        """What the rows are, to the last character: a run goes on with the same or not at all."""
        return [{"key": rows.key} | asdict(rows.report) for rows in (self.rows, self.valid_rows)]

    def _restore(self, found: Checkpoint) -> None:
        room = empty_state(self.optimizer, self.names, found.state["optimizer"])
        read_run(found, self._tensors(room), self.world)
        restore_optimizer(self.optimizer, self.names, found.tensors["optimizer"], found.state["optimizer"])
        if self.ema is not None:
            self.ema.load(found.tensors["ema"], found.state["ema_updates"])
        self.step = self.resumed = found.step
        self.best = math.inf if found.state["best"] is None else found.state["best"]
        self.guard.skipped = found.state.get("skipped_steps", 0)
        self.skipped = found.skipped

    def _init_from(self, init: str | Path) -> None:
        other = load(init, device="cpu")
        if other.tokenizer.fingerprint() != self.tokenizer.fingerprint():
            raise UsageError(f"{init} has another tokenizer than this run: set tokenizer = {str(init)!r} in the recipe")
        if other.denoiser.num_classes and other.labels != self.labels:
            raise UsageError(f"{init} has other labels than this run: give a corpus with the same, or leave out --init")
        load_weights(self.network, unshared(other.denoiser), str(init))

    # --- making the parts ---

    def _tokenizer(self, resuming: bool) -> Tokenizer:
        path = self.folder / "tokenizer.json"

        def text() -> str:
            if resuming and path.exists():  # one trained from the corpus is not trained again
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


def compile_trunk(network: Network) -> None:
    """Compile the parts of the network that training calls. How many positions it asks for differs from step to step,
    and how many there are where rows stand without padding."""
    network.trunk_at = _compiled(network.trunk_at)  # type: ignore[method-assign]
    network.trunk_ragged = _compiled(network.trunk_ragged)  # type: ignore[method-assign]


def _compiled(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    compiled = torch.compile(plain)

    def call(z: Tensor, level_B: Tensor | None, *lists: Any, **given: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():  # a validation's shapes are others, and too few calls to compile for
            return plain(z, level_B, *lists, **given)
        *rows, flat_N = lists
        for t in (flat_N, *([z, *rows[0][:3]] if rows else [])):
            torch._dynamo.mark_dynamic(t, 0)
        return compiled(z, level_B, *lists, **given)

    return call


@dataclass(frozen=True)
class Unread:
    """A step whose numbers are on their way from the device."""

    step: int
    lr: float
    indices: np.ndarray  # rows of the global batch
    tokens: int  # of them, prompts included
    numbers: Tensor
    arrived: torch.cuda.Event | None
