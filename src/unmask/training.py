"""Training: text → tokens → packed rows → noise → denoiser → loss. The loop is `train`, read from top to bottom."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import math
import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.atomic import atomic_text
from unmask.batch import make_batch
from unmask.bound import Bound
from unmask.callbacks import Callback, MetricsFile, StepReport, TensorBoard
from unmask.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from unmask.config import RECIPE_FILE, RunConfig, option_paths, to_dict
from unmask.denoisers._network import Network
from unmask.devices import fast_attention, pick_device
from unmask.draws import row_keys
from unmask.ema import Ema
from unmask.errors import ConfigError, DataError, ModelFolderError, NonFiniteError, Stopped, UsageError
from unmask.evaluate import evaluate_rows
from unmask.loader import Loader
from unmask.model import Model, load
from unmask.model_folder import load_weights, unshared
from unmask.optim import Updater, flatten_optimizer, learning_rate, make_optimizer, restore_optimizer
from unmask.packing import Rows, build_rows, reading_bar
from unmask.tokens import Tokenizer, load_tokenizer, tokenizer_from_json

# What may differ between a run and its continuation: nothing of what decides the weights, save how long it goes on.
MAY_CHANGE = {"out", "steps", "log_every", "valid_every", "sample_every", "save_every", "keep", "compile", "data.cache"}


def train(
    config: RunConfig,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    init: str | Path | None = None,
    device: str | None = None,
) -> Model:
    """Train as the config says and return the best model by validation bound; `unmask train` is this function.

    Everything random depends on (seed, step, row) alone, so a resumed run repeats the uninterrupted one bit for bit.

    >>> train(load_config("demo", {"steps": "10"}))  # doctest: +SKIP
    """
    run = Run(config, resume=resume, init=init, device=device)
    listeners: list[Callback] = [*run.listeners(), *callbacks]
    tell = Announcer(listeners)
    try:
        tell.on_start(config, run.info())
        with stop_requests() as stop, steady_gc(), run.loader.prefetch(run.step, config.steps - run.step) as batches:
            if run.step == 0:
                tell.on_valid(0, run.validate())
            run.began = run.last_read = time.perf_counter()
            for rows in batches:
                lr = learning_rate(config.optim, run.step, config.steps)
                loss, grad_norm = run.forward_backward(rows)
                run.update(lr, loss, grad_norm)
                run.note(rows, lr, loss, grad_norm)
                last = run.step == config.steps
                # A GPU is handed the next step before the last one's numbers are read, so it never waits for us.
                for report in run.reports(keep=0 if run.looks_now() else 1):
                    tell.on_step(report)

                improved = False
                if run.step % config.valid_every == 0 or last:
                    bound = run.validate()
                    improved = run.note_best(bound)
                    tell.on_valid(run.step, bound)
                if config.sample_every and (run.step % config.sample_every == 0 or last):
                    tell.on_sample(run.step, run.sample())
                stopping = stop() and not last  # asked once: what is announced as saved was saved
                for report in run.reports() if stopping else ():
                    tell.on_step(report)
                if run.step % config.save_every == 0 or improved or last or stopping:
                    tell.on_save(run.step, run.save(best=improved))
                if run.looks_now():
                    run.last_read = time.perf_counter()  # validating and saving are no part of a step
                if stopping:
                    raise Stopped(
                        f"stopped at step {run.step} of {config.steps}, all is saved; "
                        f"go on with: unmask train {shlex.quote(str(run.folder))} --resume"
                    )
    finally:
        tell.on_end()
    return load(run.folder, device=device)


class Run:
    """Everything a run holds: rows, network, average, optimizer, and where it stands."""

    def __init__(self, config: RunConfig, *, resume: bool, init: str | Path | None, device: str | None) -> None:
        if resume and init is not None:
            raise UsageError("a resumed run has its weights already: give --resume or --init, not both")
        self.config = config
        self.folder = Path(config.out)
        self.device = pick_device(device)
        checkpoint = self._find_checkpoint(resume)
        self.tokenizer = self._tokenizer(checkpoint is not None)
        self.rows, self.valid_rows = self._build_rows()
        self.loader = Loader(self.rows, config.batch, config.seed)
        torch.manual_seed(config.seed % (1 << 63))
        network = config.denoiser.build(num_ids=self.tokenizer.num_ids, mask_id=self.tokenizer.mask_id)
        for rows in (self.rows, self.valid_rows):
            rows.check_labels(network.num_classes)
        self.network = network.to(self.device).train()
        self.network.checkpoint_activations = config.checkpoint_activations
        if init is not None and checkpoint is None:
            self._init_from(init)
        self.ema = Ema(self.network, config.optim.ema) if config.optim.ema else None
        self.optimizer, self.names = make_optimizer(self.network, config.optim)
        self.updater = Updater(self.optimizer, self.names, ema=self.ema, clip=config.optim.clip)
        self.step, self.best, self.resumed = 0, math.inf, 0
        self.unread: deque[Unread] = deque()
        self.began = self.last_read = time.perf_counter()
        self.skipped: list[str] = []
        if checkpoint is not None:
            self._restore(checkpoint)
        if config.compile:
            compile_trunk(self.network)
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_text(self.folder / RECIPE_FILE, json.dumps(to_dict(config), indent=2) + "\n")
        atomic_text(self.folder / "tokenizer.json", self.tokenizer.to_json())

    # --- the parts of one step ---

    def forward_backward(self, rows: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Loss in nats per token of the global batch, and the gradient's norm before clipping; both on the device.

        Batches are noised on the host: how many tokens are masked is then known without asking the device.
        """
        _, x, valid_len, prefix_len = (torch.from_numpy(a) for a in rows)
        label = self.rows.labels_of(rows[0])
        batch = len(x)
        tokens = int((rows[2] - rows[3]).sum())
        micro = self.config.micro_batch or batch
        total = torch.zeros((), device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for lo in range(0, batch, micro):
            hi = min(lo + micro, batch)
            part = make_batch(
                x[lo:hi],
                valid_len[lo:hi],
                prefix_len[lo:hi],
                seed=self.config.seed,
                step=self.step,
                first_row=lo,
                num_rows=batch,
                label_B=None if label is None else torch.from_numpy(label[lo:hi]),
            )
            # Dropout, too, depends on the step and the micro-batch alone: resuming needs no generator state.
            torch.manual_seed(int(row_keys(self.config.seed, torch.tensor(self.step * batch + lo))))
            with self._autocast(), fast_attention():
                loss = self.config.objective.loss(self.network, part)
                (loss.nats / max(tokens, 1)).backward()  # type: ignore[no-untyped-call]
            total += loss.nats.detach()
        return total / max(tokens, 1), self.updater.grad_norm()

    def update(self, lr: float, loss: Tensor, grad_norm: Tensor) -> None:
        # A number that is none would ruin the weights for good: they are left alone, on the device, and the run stops
        # as soon as the host reads it.
        self.updater.update(lr=lr, grad_norm=grad_norm, bad=~torch.isfinite(loss + grad_norm))
        self.step += 1

    # --- reading what a step gave ---

    def note(self, rows: tuple[Any, ...], lr: float, loss: Tensor, grad_norm: Tensor) -> None:
        """Send the step's numbers to the host without waiting for them."""
        numbers = torch.stack([loss, grad_norm])
        arrived = None
        if self.device.type == "cuda":
            numbers = numbers.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        # padding is no token
        self.unread.append(Unread(self.step, lr, int(rows[2].sum()), rows[0], numbers, arrived))

    def looks_now(self) -> bool:
        """Does something look at the weights after this step? On a CPU a step is over when it returns, so always."""
        config, step = self.config, self.step
        every = (config.valid_every, config.save_every, config.sample_every)
        return self.device.type != "cuda" or step == config.steps or any(e and step % e == 0 for e in every)

    def reports(self, keep: int = 0) -> Iterator[StepReport]:
        """What the steps gave, save the newest `keep`; a number that is none ends the run here."""
        while len(self.unread) > keep:
            seen = self.unread.popleft()
            if seen.arrived is not None:
                seen.arrived.synchronize()
            loss, grad_norm = seen.numbers.tolist()
            self._check_finite(seen.step, loss, grad_norm, seen.indices)
            now = time.perf_counter()
            rate, self.last_read = seen.tokens / (now - self.last_read), now
            yield StepReport(seen.step, loss, seen.lr, grad_norm, rate, now - self.began)

    def _check_finite(self, step: int, loss: float, grad_norm: float, indices: np.ndarray) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm}"
        raise NonFiniteError(
            f"{what} at step {step}, batch of rows {_short(indices)}; the weights are untouched and the "
            f"checkpoints in {self.folder} are intact: lower optim.lr, or look at the rows"
        )

    # --- looking at the model ---

    def validate(self) -> Bound:
        """The bound of the averaged weights on held-out rows; the same rows, times and masks every time."""
        with self._averaged(), self._autocast():
            return evaluate_rows(
                self.network, self.config.objective, self.valid_rows, num_samples=1, max_rows=self.config.valid_rows
            )

    def note_best(self, bound: Bound) -> bool:
        """Keep the model folder at the best validation so far."""
        if not bound.nats_per_token < self.best:
            return False
        self.best = bound.nats_per_token
        with self._averaged():
            self._model().save(self.folder / "model")
            self.network.train()
        return True

    def sample(self) -> str:
        with self._averaged():
            text = self._model().generate(seed=self.step)[0]
            self.network.train()
        return text

    def _model(self) -> Model:
        return Model(
            denoiser=self.network,
            tokenizer=self.tokenizer,
            objective=self.config.objective,
            length=self.config.data.length,
            bos=self.config.data.packing == "sentence" and self.tokenizer.bos_id is not None,
        )

    def info(self) -> dict[str, Any]:
        return {
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "device": str(self.device),
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

    def save(self, *, best: bool) -> Path:
        optimizer, optimizer_state = flatten_optimizer(self.optimizer, self.names)
        tensors: dict[str, dict[str, Tensor]] = {"model": unshared(self.network), "optimizer": optimizer}
        if self.ema is not None:
            tensors["ema"] = self.ema.shadow
        state = {
            "config": to_dict(self.config),
            "best": None if math.isinf(self.best) else self.best,
            "ema_updates": self.ema.num_updates if self.ema else 0,
            "optimizer": optimizer_state,
            "data": self._data(),
        }
        return save_checkpoint(self.folder, self.step, tensors, state, keep=self.config.keep, best=best)

    def _data(self) -> list[dict[str, Any]]:
        """What the rows are, to the last character: a run goes on with the same or not at all."""
        return [{"key": rows.key} | asdict(rows.report) for rows in (self.rows, self.valid_rows)]

    def _find_checkpoint(self, resume: bool) -> Checkpoint | None:
        found = load_checkpoint(self.folder)
        if (self.folder / "config.json").exists() or (self.folder / "model.safetensors").exists():
            raise UsageError(f"{self.folder} is a model's folder, not a run's; give another --out")
        if not resume:
            if found is not None:
                raise UsageError(
                    f"{self.folder} holds a run at step {found.step}; go on with --resume, or give another --out"
                )
            return None
        if found is None:
            raise ModelFolderError(f"{self.folder} holds no checkpoint to resume; leave --resume out to begin")
        if found.step >= self.config.steps:
            raise UsageError(f"{self.folder} is at step {found.step} already; give more --steps to go on")
        return found

    def _restore(self, found: Checkpoint) -> None:
        config = {k: v for k, v in option_paths(found.state["config"]).items() if k not in MAY_CHANGE}
        for key, now in option_paths(to_dict(self.config)).items():
            if key not in MAY_CHANGE and config.get(key) != now:
                raise ConfigError(
                    f"{key} is {now!r}, the run in {self.folder} has {config.get(key)!r}; it cannot change"
                )
        if found.state["data"] != self._data():
            raise DataError(f"the data changed since the run in {self.folder} began; restore it, or begin a new run")
        load_weights(self.network, found.tensors["model"], str(found.path / "model.safetensors"))
        restore_optimizer(self.optimizer, self.names, found.tensors["optimizer"], found.state["optimizer"])
        if self.ema is not None:
            self.ema.load(found.tensors["ema"], found.state["ema_updates"])
        self.step = self.resumed = found.step
        self.best = math.inf if found.state["best"] is None else found.state["best"]
        self.skipped = found.skipped

    def _init_from(self, init: str | Path) -> None:
        other = load(init, device="cpu")
        if other.tokenizer.fingerprint() != self.tokenizer.fingerprint():
            raise UsageError(f"{init} has another tokenizer than this run: set tokenizer = {str(init)!r} in the recipe")
        load_weights(self.network, unshared(other.denoiser), str(init))

    # --- making the parts ---

    def _tokenizer(self, resuming: bool) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        if resuming and path.exists():  # one trained from the corpus is not trained again
            return tokenizer_from_json(path.read_text(encoding="utf-8"))
        return load_tokenizer(self.config.tokenizer, self.config.data.train)

    def _build_rows(self) -> tuple[Rows, Rows]:
        data = self.config.data
        cache = None if data.cache is None else Path(data.cache)
        options: dict[str, Any] = {"policy": data.packing, "length": data.length, "cache_dir": cache}
        with reading_bar() as bar:
            options["progress"] = bar
            if data.valid is not None:
                return (
                    build_rows(data.train, self.tokenizer, **options),
                    build_rows(data.valid, self.tokenizer, **options),
                )
            options["held_out"] = data.held_out
            return (
                build_rows(data.train, self.tokenizer, part="train", **options),
                build_rows(data.train, self.tokenizer, part="valid", **options),
            )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.ema is None else self.ema.applied()


def compile_trunk(network: Network) -> None:
    """Compile the part of the network that training calls. How many positions it asks for differs from step to step."""
    plain, compiled = network.trunk_at, torch.compile(network.trunk_at)

    def trunk_at(z_BL: Tensor, level_B: Tensor | None, flat_N: Tensor, **given: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():  # a validation's shapes are others, and too few calls to compile for
            return plain(z_BL, level_B, flat_N, **given)
        torch._dynamo.mark_dynamic(flat_N, 0)
        h_ND: Tensor = compiled(z_BL, level_B, flat_N, **given)
        return h_ND

    network.trunk_at = trunk_at  # type: ignore[method-assign]


@dataclass(frozen=True)
class Unread:
    """A step whose numbers are on their way from the device."""

    step: int
    lr: float
    tokens: int
    indices: np.ndarray
    numbers: Tensor
    arrived: torch.cuda.Event | None


class Announcer(Callback):
    """Passes every event on to all listeners."""

    def __init__(self, listeners: Sequence[Callback]) -> None:
        for event in ("on_start", "on_step", "on_valid", "on_sample", "on_save", "on_end"):
            setattr(self, event, self._pass_on(listeners, event))

    @staticmethod
    def _pass_on(listeners: Sequence[Callback], event: str) -> Any:
        def pass_on(*args: Any) -> None:
            for listener in listeners:
                getattr(listener, event)(*args)

        return pass_on


@contextlib.contextmanager
def stop_requests() -> Iterator[Any]:
    """SIGTERM and the first Ctrl-C only ask: the step is finished and saved. A second Ctrl-C interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    old = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for s in old:
        signal.signal(s, ask)
    try:
        yield asked.is_set
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)


@contextlib.contextmanager
def steady_gc() -> Iterator[None]:
    """No collection at moments that the collector chooses: what lives now is frozen, the rest is reference-counted."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _short(indices: np.ndarray) -> str:
    shown = ", ".join(map(str, indices[:4].tolist()))
    return f"{shown}, … ({len(indices)} in all)" if len(indices) > 4 else shown
