"""Resuming: the checkpoint that a run continues, whether it is the same run, and how a stop is reported."""

from __future__ import annotations

import os
import shlex
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.config import RunConfig, option_paths
from unmask.data.packing import Rows
from unmask.distributed.parallel import local
from unmask.distributed.world import World
from unmask.errors import ConfigError, DataError, ModelFolderError, Stopped, UsageError
from unmask.reader import from_dict
from unmask.samplers.drawing import Drawing
from unmask.storage.atomic import atomic_text
from unmask.storage.tensor_file import read_into
from unmask.training.checkpoint.files import Checkpoint, candidates, newest, verify, without_tensors

# What may differ between a run and its continuation: nothing that affects the weights, except the number of steps.
MAY_CHANGE = {"out", "steps", "log_every", "valid_every", "sample_every", "compile", "data.cache"}
MAY_CHANGE |= {"data.train.path", "data.valid.path"}  # the file may have moved: its content is compared by hash
MAY_CHANGE |= {"save_every", "keep", "keep_every", "async_save", "save_as"}
MAY_CHANGE |= {"parallel", "micro_batch", "checkpoint_activations"}  # how the work is split, which depends on the GPUs
MAY_CHANGE |= {"on_nonfinite", "max_nonfinite"}
MAY_CHANGE |= {f"drawing.{option.name}" for option in fields(Drawing)}

JOB = "TORCHELASTIC_RUN_ID"
BEGUN, STOPPED = "begun", "stopped"  # notes in a run's folder, each with the name of torchrun's job

STATE: dict[str, Any] = {  # keys of a checkpoint's state, with their types
    "config": dict,
    "data": list,
    "optimizer": dict,
    "ema_updates": int,
    "best": (int, float, type(None)),
}


def find_checkpoint(config: RunConfig, world: World, *, resume: bool) -> Checkpoint | None:
    """The checkpoint that the run continues, without its tensors (see `read_run`); None for a new run.

    >>> find_checkpoint(RunConfig(out="runs/none-of-this-name"), World(), resume=False) is None
    True
    """
    folder = Path(config.out)
    by_rank = world.gather([path.name for _, path in candidates(folder / "checkpoints")])
    if any(names != by_rank[0] for names in by_rank):
        raise DataError(
            f"rank {world.rank} sees another {folder} than rank 0: "
            "the run's folder must be on a file system that all machines share"
        )
    checkpoint = newest(folder, partial(_read_together, world))
    if (folder / "config.json").exists() or (folder / "model.safetensors").exists():
        raise UsageError(f"{folder} is a model's folder, not a run's; give another --out")
    begun, was_stopped = world.from_first(lambda: _notes(folder, again=world.restarts > 0))
    if begun:  # restarted by torchrun: continue from the newest checkpoint, unless a stop was requested
        if checkpoint is not None and was_stopped:
            raise stopped(config, world, checkpoint.step)
        return checkpoint
    if not resume:
        if checkpoint is not None:
            raise UsageError(
                f"{folder} holds a run at step {checkpoint.step}; go on with --resume, or give another --out"
            )
        return None
    if checkpoint is None:
        raise ModelFolderError(f"{folder} holds no checkpoint to resume; leave --resume out to begin")
    if checkpoint.step >= config.steps:
        raise UsageError(f"{folder} is at step {checkpoint.step} already; give more --steps to go on")
    return checkpoint


def mark_begun(config: RunConfig, world: World) -> None:
    """Note in the run's folder that this torchrun job works there, so that it may resume after a restart.

    >>> mark_begun(RunConfig(out="runs/a"), World())  # without torchrun there is nothing to mark
    """
    if JOB in os.environ and world.first:
        atomic_text(Path(config.out) / BEGUN, os.environ[JOB] + "\n")


def _notes(folder: Path, *, again: bool) -> tuple[bool, bool]:
    """Whether this torchrun job has begun here before, and whether it was asked to stop; removes stale notes."""
    notes = [folder / BEGUN, folder / STOPPED]
    if not again:
        for note in notes:
            note.unlink(missing_ok=True)
    begun, was_stopped = (note.exists() and note.read_text().strip() == os.environ.get(JOB) for note in notes)
    return begun, was_stopped


def _read_together(world: World, folder: Path) -> Checkpoint:
    """Verify a checkpoint with all processes, each its part of the files; all accept it or none does."""
    step, files = world.agree(lambda: verify(folder, rank=world.rank, size=world.size))[0]
    return world.agree(lambda: without_tensors(folder, step, files))[world.rank]


def check_same_run(config: RunConfig, data: list[dict[str, Any]], checkpoint: Checkpoint) -> None:
    """Refuse to continue with another recipe or other data.

    >>> check_same_run(config, data, find_checkpoint(config, World(), resume=True))  # doctest: +SKIP
    """
    before = option_paths(from_dict(RunConfig, checkpoint.state["config"], saved=True))
    for key, now in option_paths(config).items():
        if key not in MAY_CHANGE and before.get(key) != now:
            raise ConfigError(f"{key} is {now!r}, the run in {config.out} has {before.get(key)!r}; it cannot change")
    reports = [
        {"anchor": "none"} | report for report in checkpoint.state["data"]
    ]  # a run of a version that had no anchors yet
    if reports != data:
        raise DataError(f"the data changed since the run in {config.out} began; restore it, or begin a new run")


def check_held_out(folder: Path, rows: Rows) -> bool:
    """Refuse rows other than those that the run in this folder has held out, according to its newest checkpoint.

    Returns False if no checkpoint has this information.

    >>> check_held_out(Path("runs/a"), rows)  # doctest: +SKIP
    """
    checkpoint = newest(folder, lambda path: without_tensors(path, 0, []))  # hashing every weight is for resuming
    if checkpoint is None:
        return False
    with checkpoint.holds(data=list):
        before = checkpoint.state["data"][1]
        same = (before["key"], before["rows"], before["tokens"]) == (rows.key, len(rows), rows.report.tokens)
    if not same:
        raise DataError(
            f"the data changed since the run in {folder} began, so this is not what it held out; "
            "restore it, or give --data FILE"
        )
    return True


def read_run(checkpoint: Checkpoint, tensors: dict[str, dict[str, Tensor]], world: World) -> None:
    """Fill a run's tensors from its checkpoint; each process reads only its own shards.

    >>> read_run(checkpoint, {"model": weights, "optimizer": moments}, world)  # doctest: +SKIP
    """
    if checkpoint.sharded:
        from unmask.training.checkpoint.sharded import read_shares  # imports much of torch.distributed

        read_shares(checkpoint.path, tensors, world)
    else:
        for group, named in tensors.items():
            world.agree(partial(read_into, checkpoint.path / f"{group}.safetensors", named))
    nonfinite = [name for name, tensor in tensors["model"].items() if not bool(torch.isfinite(local(tensor)).all())]
    if odd := sorted({name for names in world.gather(nonfinite) for name in names}):
        raise ModelFolderError(f"{checkpoint.path}: model/{odd[0]} holds numbers that are not finite; it is damaged")
    checkpoint.tensors = tensors


def stopped(config: RunConfig, world: World, step: int) -> Stopped:
    """The exception that ends a run that was asked to stop.

    >>> str(stopped(RunConfig(out="runs/a", steps=9), World(), 3))
    'stopped at step 3 of 9, all is saved; go on with: unmask train runs/a --resume'
    """
    # torchrun treats a process that exits as failed, and may restart it
    if JOB in os.environ and world.first:
        atomic_text(Path(config.out) / STOPPED, os.environ[JOB] + "\n")
    again = f"unmask train {shlex.quote(config.out)} --resume"
    return Stopped(f"stopped at step {step} of {config.steps}, all is saved; go on with: {again}")
