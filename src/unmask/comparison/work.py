"""The work of a trial: train to the budget, measure the best weights by the protocol, count the cost, store
the result."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unmask
from unmask.comparison.cost import parameters, training_cost
from unmask.comparison.plan import Protocol, TrialSpec
from unmask.comparison.trial import Trial, failed, write_trial
from unmask.config import RunConfig
from unmask.data.augment import augmentation
from unmask.data.loader import Loader
from unmask.data.packing import Rows, rows_of
from unmask.devices import few_threads, pick_device
from unmask.distributed.world import World
from unmask.errors import NonFiniteError, Stopped, UnmaskError, UsageError
from unmask.evaluation.bound import Bound
from unmask.evaluation.by_text import text_numbers
from unmask.evaluation.evaluate import chosen_rows, evaluate_rows
from unmask.model import Model, load
from unmask.storage.atomic import clean, sibling
from unmask.training.callbacks import Callback, StepReport
from unmask.training.checkpoint.files import Checkpoint, best_checkpoint, newest, verify, without_tensors
from unmask.training.loop import train
from unmask.training.run_lock import one_writer

AT_ONCE = 1 << 13  # tokens of the rows to measure at a time
Tell = Callable[[dict[str, Any]], None]  # receives progress: {"step": 10, "loss": ...} or {"measuring": "..."}


@dataclass(frozen=True, kw_only=True)
class Job(TrialSpec):
    """A trial in the form that is passed to a process or thread."""

    protocol: Protocol
    out: Path
    device: str | None = None
    at_once: int = 1  # number of trials that the command runs at a time


class _Told(Callback):
    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def on_start(self, config: RunConfig, info: dict[str, Any]) -> None:
        self.tell({"step": info["resumed_step"]})

    def on_step(self, report: StepReport) -> None:
        if report.step % 10 == 0:
            self.tell(
                {"step": report.step, "loss": report.loss, "rate": report.tokens_per_second, "seconds": report.seconds}
            )

    def on_valid(self, step: int, bound: Bound) -> None:
        self.tell({"step": step, "valid": bound.nats_per_token})


def run_trial(job: Job, tell: Tell) -> Trial:
    """Run or resume a trial and store its result, also if it fails. Only a request to stop is raised."""
    try:
        last = _trained(job, tell)
        with one_writer(Path(job.config.out), World()):  # still ours; clears a lock left by a kill
            trial = _measured(job, last, tell)
    except Stopped:
        raise
    except NonFiniteError as e:
        trial = failed(job, str(e), "diverged")
    except UnmaskError as e:
        trial = failed(job, str(e))
    except Exception as e:
        trial = failed(job, _reason(e))
    write_trial(job.out, trial)
    if trial.finished:
        drop_checkpoints(job.config)
    return trial


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text.lower():
        return "out of memory: use a smaller batch or micro_batch, length or network"
    return f"{type(error).__name__}: {text}"


def drop_checkpoints(config: RunConfig) -> None:
    """Delete a finished trial's checkpoints, which are not needed any more; its model is kept."""
    checkpoints = Path(config.out) / "checkpoints"
    if checkpoints.parent.is_dir():
        clean(checkpoints.parent, checkpoints.name)  # leftovers of a killed call
    if checkpoints.is_dir():
        gone = sibling(checkpoints, "tmp")
        checkpoints.rename(gone)  # rename first, so that a kill half-way does not leave a run that looks damaged
        shutil.rmtree(gone, ignore_errors=True)


def _trained(job: Job, tell: Tell) -> Checkpoint:
    """Train to the last step; returns the last checkpoint, which records the seconds."""
    folder = Path(job.config.out)
    done = _newest(folder)
    if done is None or done.step < job.config.steps:
        train(job.config, callbacks=[_Told(tell)], resume=done is not None, device=job.device)
        done = _newest(folder)
    assert done is not None
    return done


def _newest(folder: Path) -> Checkpoint | None:
    return newest(folder, lambda path: without_tensors(path, *verify(path)))


def _measured(job: Job, last: Checkpoint, tell: Tell) -> Trial:
    config, protocol = job.config, job.protocol
    model = load(config.out, device=pick_device(job.device))
    rows = rows_of(config.data, model.tokenizer, "valid", anchor=config.anchor).classed(model.labels)
    bounds = {"": _bound(job, model, rows, None, tell)}
    for name in protocol.also:
        try:
            bounds[name] = _bound(job, model, rows, name, tell)
        except UsageError:  # this objective does not have the estimator
            continue
    bound = bounds.pop("")
    if not math.isfinite(bound.nats):
        raise NonFiniteError(f"the bound of its best weights is {bound.nats}")
    train_rows = rows_of(config.data, model.tokenizer, "train", anchor=config.anchor).classed(model.labels)
    augment = augmentation(config.data, model.tokenizer, config.seed)
    loader = Loader(train_rows, config.batch, config.seed, config.data.windows, augment)
    best = best_checkpoint(Path(config.out))
    best_step = last.step if best is None else int(best.name.removeprefix("step-"))
    tokens, best_tokens = (_tokens(loader, steps) for steps in (last.step, best_step))
    epoch = train_rows.report.tokens
    seconds = float(last.state.get("train_seconds", 0.0))
    whole, inner = parameters(model.denoiser)
    tell({"measuring": "cost"})
    passes, flops = training_cost(model.denoiser, config, loader)
    form = model.objective.with_estimator(model.objective.estimator(model.denoiser))
    text_of_B = text_numbers(rows, model.tokenizer, chosen_rows(rows, protocol.valid_rows))
    return Trial(
        **{key: getattr(job, key) for key in ("name", "system", "seed", "fingerprint", "shared")},
        state="finished",
        kind=bound.kind,
        estimator=model.objective.estimator(model.denoiser),
        draws=1 if form.one_reading else protocol.draws,
        parameters=whole,
        parameters_without_embeddings=inner,
        steps=last.step,
        tokens=tokens,
        epochs=tokens / epoch,
        best_step=best_step,
        best_tokens=best_tokens,
        best_epochs=best_tokens / epoch,
        passes=passes,
        flops=flops,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        device=_device_name(model),
        at_once=job.at_once,
        unmask=unmask.__version__,
        texts=_digest(rows, protocol),
        num_bytes=bound.num_bytes or 0,
        counts=bound.tokens_B.tolist(),
        text_of=[] if text_of_B is None else text_of_B.tolist(),
        nats=bound.nats_B.double().tolist(),
        also={name: other.nats_B.double().tolist() for name, other in bounds.items()},
    )


def _bound(job: Job, model: Model, rows: Rows, estimator: str | None, tell: Tell) -> Bound:
    """Measure by the common protocol: rows, keys and number of draws are the same for all systems."""
    protocol = job.protocol
    with few_threads(model.device):
        return evaluate_rows(
            model.denoiser,
            model.objective,
            rows,
            seed=protocol.seed,
            num_samples=protocol.draws,
            max_rows=protocol.valid_rows,
            batch=max(1, AT_ONCE // rows.length),
            estimator=estimator,
            progress=lambda done, total: tell({"measuring": estimator or "own", "done": done, "total": total}),
        )


def _tokens(loader: Loader, steps: int) -> int:
    """The number of scored tokens in this many steps."""
    rows = loader.rows
    assert isinstance(rows, Rows)
    return sum(rows.counts(loader.indices(step))[0] for step in range(steps))


def _digest(rows: Rows, protocol: Protocol) -> str:
    """A hash of the scored tokens, text by text, without anchors and prompts, which some systems do not have."""
    digest = hashlib.sha256()
    for scored in rows.scored(chosen_rows(rows, protocol.valid_rows)):
        digest.update(len(scored).to_bytes(8, "little") + np.ascontiguousarray(scored, dtype="<i8").tobytes())
    return digest.hexdigest()[:40]


def _device_name(model: Model) -> str:
    return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
