"""Checkpoints of models too large for one host: every process writes and reads its own share of each tensor.

torch.distributed.checkpoint does the planning and the resharding, with its safetensors storage, so nothing is pickled;
the manifest, the rename and the fallback are those of `checkpoint`. A run saved on many processes goes on with any
number of them, and `load_checkpoint` reads it whole where it fits.

RUN/checkpoints/step-00000250/shard-00001-model-00001-of-00001.safetensors, ..., state.json, manifest.json
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from unmask.atomic import check_space
from unmask.checkpoint import MARGIN, SHARD, Checkpoint, candidates, draft, place_of, verify
from unmask.errors import ModelFolderError, UnmaskError
from unmask.untrusted import read_json, shown

Groups = Mapping[str, Mapping[str, Tensor]]
T = TypeVar("T")


def save_sharded(
    run_dir: Path,
    step: int,
    tensors: Groups,
    state: Mapping[str, Any],
    *,
    keep: int,
    best: bool,
    keep_every: int = 0,
) -> Path:
    """`save_checkpoint` by all processes together, each of its own share; returns when the checkpoint is durable.

    A DTensor is written in the parts that the processes hold, any other tensor by one of them.

    >>> save_sharded(run_dir, 250, {"model": network.state_dict()}, {}, keep=2, best=False)  # doctest: +SKIP
    """
    flat = {f"{group}/{name}": t.detach() for group, named in tensors.items() for name, t in named.items()}
    sizes = _agree(lambda: sum(_local(t).numel() * t.element_size() for t in flat.values()))
    rank, first = _rank(), _rank() == 0
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[Path, dict[str, tuple[int, str]]] | None:
            if not first:
                return None
            check_space(place_of(run_dir, step), sum(sizes) + MARGIN)
            return stack.enter_context(draft(run_dir, step, state, keep=keep, best=best, keep_every=keep_every))

        begun = _agree(begin)[0]
        assert begun is not None
        temp, files = begun
        _agree(lambda: _write(flat, temp))
        # Each process reads back what it wrote: hashing is the slow part, and is shared like the writing.
        mine = f"{SHARD}{rank + 1:05d}-"
        written = _agree(lambda: {p.name: _facts(p) for p in sorted(temp.iterdir()) if p.name.startswith(mine)})
        if first:
            for part in written:
                files.update(part)
        _agree(stack.close)
    return place_of(run_dir, step)


def load_sharded(path: Path, into: Groups) -> Checkpoint | None:
    """Fill `into` from the newest whole checkpoint of a run, or from the one in the folder named; None: there is none.

    All processes together; each verifies a share of the files and reads what its tensors hold, however the tensors
    were cut when they were saved.

    >>> load_sharded(run_dir, {"model": network.state_dict()}).step  # doctest: +SKIP
    """
    one = (path / "manifest.json").is_file()
    found = [path] if one else [place for _, place in candidates(path / "checkpoints")]
    flat = {f"{group}/{name}": t.detach() for group, named in into.items() for name, t in named.items()}
    skipped: list[str] = []
    for folder in found:
        try:
            # One that is not whole is passed over by all; one that is whole and another's is an error.
            step = _agree(lambda folder=folder: verify(folder, rank=_rank(), size=_size()))[0][0]  # type: ignore[misc]
            state = read_json(folder / "state.json")
        except ModelFolderError as error:
            if one:
                raise
            skipped.append(str(error))
            continue
        _agree(lambda folder=folder: _check(folder, flat))  # type: ignore[misc]
        _agree(lambda folder=folder: _read_into(flat, folder, alone=not dist.is_initialized()))  # type: ignore[misc]
        tensors = {group: dict(named) for group, named in into.items()}
        return Checkpoint(step=step, tensors=tensors, state=state, path=folder, skipped=skipped)
    if skipped:
        raise ModelFolderError(f"no whole checkpoint in {path / 'checkpoints'}: {skipped[0]}")
    return None


def read_whole(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Every tensor of a verified checkpoint, put together in this process alone.

    >>> read_whole(Path("runs/large/checkpoints/step-00000250"))  # doctest: +SKIP
    """
    flat = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in _metadata(folder).items()}
    _read_into(flat, folder, alone=True)
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in flat.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return groups


def _write(flat: dict[str, Tensor], temp: Path) -> None:
    writer = HuggingFaceStorageWriter(str(temp), save_distributed=True)
    with _one_line(temp), _quiet():
        save(flat, storage_writer=writer)


def _check(folder: Path, flat: dict[str, Tensor]) -> None:
    """Refuse a checkpoint of other tensors than these, before any is read."""
    held = _metadata(folder)
    if odd := sorted(held.keys() ^ flat.keys()):
        raise ModelFolderError(f"{folder}: the tensor {shown(odd[0])} is missing or unexpected")
    for name, tensor in flat.items():
        if held[name].size != tensor.shape or held[name].properties.dtype != tensor.dtype:
            said = f"{tuple(held[name].size)} of {held[name].properties.dtype}"
            raise ModelFolderError(f"{folder}: {shown(name)} is {said}, not {tuple(tensor.shape)} of {tensor.dtype}")


def _metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """What the shards say of each tensor: parts that do not make up the whole are refused."""
    with _one_line(folder):
        held = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    checked: dict[str, TensorStorageMetadata] = {}
    for name, meta in held.items():
        assert isinstance(meta, TensorStorageMetadata)
        if sum(math.prod(chunk.sizes) for chunk in meta.chunks) != math.prod(meta.size):
            raise ModelFolderError(f"{folder}: the shares of {shown(name)} do not make up the whole")
        checked[name] = meta
    return checked


def _read_into(flat: dict[str, Tensor], folder: Path, *, alone: bool) -> None:
    with _one_line(folder), _quiet():
        load(flat, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)


# --- several processes, and what they may raise ---


def _agree(work: Callable[[], T]) -> list[T]:
    """Everybody's result on every process; what one of them raises, all raise, so that none waits for another."""
    made: T | None = None
    error: Exception | None = None
    try:
        made = work()
    except Exception as e:
        error = e
    if not dist.is_initialized():
        if error is not None:
            raise error
        return [made]  # type: ignore[list-item]
    told: list[Any] = [None] * _size()
    kind = type(error) if isinstance(error, UnmaskError) else UnmaskError
    dist.all_gather_object(told, (made, None if error is None else (kind, shown(error, 400))))
    if isinstance(error, OSError) and _rank():  # the first process's becomes a line where it leaves the folder
        raise UnmaskError(shown(error, 400)) from error
    if error is not None:
        raise error
    for rank, (_, other) in enumerate(told):
        if other is not None:
            raise (ModelFolderError if other[0] is ModelFolderError else UnmaskError)(f"rank {rank}: {other[1]}")
    told[_rank()] = (made, None)  # itself, not a copy that went round
    return [value for value, _ in told]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _facts(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """What torch's planner and storage raise, in one line: a share's content is a stranger's word like any other."""
    try:
        yield
    except (UnmaskError, OSError):
        raise
    except CheckpointException as e:
        reason = next(iter(e.failures.values()))[0]  # one process's failure, with its traceback
        if isinstance(reason, OSError):
            raise reason from e
        raise ModelFolderError(f"{folder}: {shown(reason, 200)}") from e
    except Exception as e:
        raise ModelFolderError(f"{folder} is damaged: {shown(f'{type(e).__name__}: {e}', 200)}") from e


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process alone is one process alone
        yield
