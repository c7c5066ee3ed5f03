"""Checkpoints of models too large for one host: every process writes and reads its own shard of each tensor.

torch.distributed.checkpoint does the planning and the resharding, with its safetensors storage, so nothing is pickled;
the manifest, the rename and the fallback are those of `files`. A run saved by several processes can be resumed by any
number of them, and `load_checkpoint` reads it whole if it fits into memory.

RUN/checkpoints/step-00000250/shard-00001-model-00001-of-00001.safetensors, ..., state.json, manifest.json
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from unmask.distributed.parallel import local
from unmask.distributed.world import World
from unmask.errors import ModelFolderError, UnmaskError, UsageError
from unmask.storage.atomic import check_space, sync
from unmask.storage.tensor_file import write_tensors
from unmask.storage.untrusted import printable
from unmask.training.checkpoint.files import MARGIN, SHARD, draft, place_of

Groups = Mapping[str, Mapping[str, Tensor]]


def save_sharded(
    run_dir: Path,
    step: int,
    tensors: Groups,
    state: Mapping[str, Any],
    *,
    keep: int,
    best: bool,
    keep_every: int = 0,
    world: World,
) -> Path:
    """`save_checkpoint` by all processes together, each its own shard; returns when the checkpoint is durable.

    A DTensor is written in the shards that the processes hold, any other tensor by one of them.

    >>> save_sharded(run_dir, 250, {"model": weights}, {}, keep=2, best=False, world=World())  # doctest: +SKIP
    """
    flat = _flat(tensors)
    # Tensors that are not DTensors are on every process, and are written once.
    mine = {name: t for name, t in flat.items() if world.first or hasattr(t, "to_local")}
    sizes = world.gather(sum(local(t).numel() * t.element_size() + 256 + 2 * len(name) for name, t in mine.items()))
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[Path, dict[str, tuple[int, str]]] | None:
            if not world.first:
                return None
            check_space(place_of(run_dir, step), sum(sizes) + MARGIN)
            return stack.enter_context(draft(run_dir, step, state, keep=keep, best=best, keep_every=keep_every))

        begun = world.agree(begin)[0]
        assert begun is not None
        temp, files = begun
        for written in world.agree(lambda: _write(flat, temp, world)):
            files.update(written)
        world.agree(stack.close)
    return place_of(run_dir, step)


def read_shares(folder: Path, into: Groups, world: World) -> None:
    """Fill `into` from a verified checkpoint, by all processes together.

    Each process reads its own shards, however the tensors were sharded when they were saved. A checkpoint of other
    tensors is refused before any is read.

    >>> read_shares(checkpoint.path, {"model": network.state_dict()}, world)  # doctest: +SKIP
    """
    flat = _flat(into)
    world.agree(lambda: _check(folder, flat))
    world.agree(lambda: _read_into(flat, folder, world))


def read_whole(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Every tensor of a verified checkpoint, assembled in this process alone.

    >>> read_whole(Path("runs/large/checkpoints/step-00000250"))  # doctest: +SKIP
    """
    flat = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in _metadata(folder).items()}
    _read_into(flat, folder, World())
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in flat.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return groups


def _flat(groups: Groups) -> dict[str, Tensor]:
    return {f"{group}/{name}": t.detach() for group, named in groups.items() for name, t in named.items()}


class _Writer(HuggingFaceStorageWriter):
    """Writes torch's file format, hashing the bytes and holding only one tensor at a time in host memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder, self.files = folder, dict[str, tuple[int, str]]()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder exists already, and is empty

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        begins: dict[str, dict[str, list[int]]] = {}  # offset of each part in its tensor, as torch's reader expects it
        for item in plan.items:
            assert item.tensor_data is not None
            tensors[item.index.fqn] = cast(Tensor, planner.resolve_data(item))
            begins[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            if any(item.tensor_data.chunk.offsets[1:]):
                raise UsageError(f"{item.index.fqn} is not cut along its rows, as a sharded checkpoint wants it")
        if tensors:
            path = self.folder / f"{SHARD}{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
            self.files[path.name] = write_tensors(
                path, tensors, {"DCP_SHARDING_INFO": json.dumps(begins, sort_keys=True)}
            )
            sync(path)  # by the process that wrote it: another machine may not see the data yet
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


def _write(flat: dict[str, Tensor], temp: Path, world: World) -> dict[str, tuple[int, str]]:
    writer = _Writer(temp)
    with _one_line(temp), _quiet(), world.together():
        save(flat, storage_writer=writer, no_dist=world.size == 1)
    return writer.files


def _read_into(flat: dict[str, Tensor], folder: Path, world: World) -> None:
    with _one_line(folder), _quiet(), world.together():
        load(flat, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=world.size == 1)


def _check(folder: Path, flat: dict[str, Tensor]) -> None:
    """Refuse a checkpoint of other tensors, before any is read."""
    saved = _metadata(folder)
    if odd := sorted(saved.keys() ^ flat.keys()):
        raise ModelFolderError(f"{folder}: the tensor {printable(odd[0])} is missing or unexpected")
    for name, tensor in flat.items():
        if saved[name].size != tensor.shape or saved[name].properties.dtype != tensor.dtype:
            said = f"{tuple(saved[name].size)} of {saved[name].properties.dtype}"
            raise ModelFolderError(
                f"{folder}: {printable(name)} is {said}, not {tuple(tensor.shape)} of {tensor.dtype}"
            )


def _metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The metadata of each tensor from the shards; parts that do not make up the whole are refused."""
    with _one_line(folder):
        saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    checked: dict[str, TensorStorageMetadata] = {}
    for name, meta in saved.items():
        assert isinstance(meta, TensorStorageMetadata)
        if not _is_whole(meta):
            raise ModelFolderError(f"{folder}: the shares of {printable(name)} do not make up the whole")
        checked[name] = meta
    return checked


def _is_whole(meta: TensorStorageMetadata) -> bool:
    """Whether the parts cover all rows, one after the other."""
    if not meta.size:
        return len(meta.chunks) == 1
    end = 0
    for part in sorted(meta.chunks, key=lambda part: tuple(part.offsets)):
        if part.offsets[0] != end or any(part.offsets[1:]) or part.sizes[1:] != meta.size[1:]:
            return False
        end += part.sizes[0]
    return end == meta.size[0]


@contextlib.contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Turn errors of torch's planner and storage into one line; a shard's content is untrusted input."""
    try:
        yield
    except (UnmaskError, OSError):
        raise
    except CheckpointException as e:
        reason = next(iter(e.failures.values()))[0]  # one process's failure, with its traceback
        if isinstance(reason, OSError | UnmaskError):
            raise reason from e
        raise ModelFolderError(f"{folder}: {printable(reason, 200)}") from e
    except Exception as e:
        raise ModelFolderError(f"{folder} is damaged: {printable(f'{type(e).__name__}: {e}', 200)}") from e


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that there is only one process
        yield
