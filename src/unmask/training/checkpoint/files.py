"""Resumable state on disk: written atomically, verified when read, nothing executable (safetensors and JSON).

RUN/checkpoints/step-00000250/model.safetensors, ema.safetensors, ..., state.json, manifest.json
RUN/checkpoints/latest          the name of the newest one, for information: resuming lists the folders themselves
RUN/checkpoints/best            the name of the best one
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from unmask.errors import ModelFolderError, UnmaskError, UsageError
from unmask.storage.atomic import (
    atomic_folder,
    atomic_text,
    check_space,
    clean,
    find_folder,
    left_behind,
    sibling,
    write_file,
)
from unmask.storage.tensor_file import read_tensors, write_tensors
from unmask.storage.untrusted import check_plain, printable, read_json, read_text

FORMAT_VERSION = 2  # 1: a manifest without a SHA-256 of its own

_STEP = re.compile(r"step-(\d{8,18})")
SHARD = "shard-"  # prefix of files that hold the shard of one process
_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}\.(safetensors|json)")
MARGIN = 1 << 20  # bytes of a checkpoint besides the tensors: state, manifest, headers
_MAX_MANIFEST = 1 << 24


@dataclass
class Checkpoint:
    """A verified checkpoint, and why newer ones were skipped."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path
    sharded: bool = False  # written by several processes, each its own shard; see `sharded`
    skipped: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def holds(self, **kinds: Any) -> Iterator[None]:
        """Refuse a state without these keys of these types, and turn KeyErrors and the like in the block into an error.

        The manifest only proves that a checkpoint is unchanged, not that it was written by a run like this one.

        >>> with Checkpoint(1, {}, {"best": "x"}, Path("step-00000001")).holds(best=float):
        ...     pass
        Traceback (most recent call last):
        unmask.errors.ModelFolderError: step-00000001/state.json: best is missing or not what a run writes there
        """
        for key, kind in kinds.items():
            if key not in self.state or not isinstance(self.state[key], kind):
                raise ModelFolderError(f"{self.path / 'state.json'}: {key} is missing or not what a run writes there")
        try:
            yield
        except UnmaskError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as e:
            reason = printable(f"{type(e).__name__}: {e}", 120)
            raise ModelFolderError(f"{self.path} does not hold what a run writes ({reason})") from e


def save_checkpoint(
    run_dir: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
    best: bool,
    keep_every: int = 0,
) -> Path:
    """Write `run_dir/checkpoints/step-N`; once it is durable, remove older checkpoints.

    The last `keep`, those at multiples of `keep_every` steps (0: none) and the best are kept.
    `state` must survive JSON: string keys, lists rather than tuples.

    >>> import tempfile, torch
    >>> run = Path(tempfile.mkdtemp())
    >>> save_checkpoint(run, 250, {"model": {"w": torch.ones(2)}}, {"loss": 1.5}, keep=2, best=True).name
    'step-00000250'
    >>> load_checkpoint(run).state
    {'loss': 1.5}
    """
    check_room(run_dir, step, tensors)
    with draft(run_dir, step, state, keep=keep, best=best, keep_every=keep_every) as (temp, files):
        for name, group in tensors.items():
            file = f"{name}.safetensors"
            if not _NAME.fullmatch(file) or file.startswith(SHARD):
                raise UsageError(f"{name!r} cannot name a checkpoint file; use letters, digits and _")
            files[file] = write_tensors(temp / file, group)
    return place_of(run_dir, step)


@contextlib.contextmanager
def draft(
    run_dir: Path, step: int, state: Mapping[str, Any], *, keep: int, best: bool, keep_every: int
) -> Iterator[tuple[Path, dict[str, tuple[int, str]]]]:
    """Yield a folder for a checkpoint's tensors and a dictionary for each file's size and SHA-256; then complete it.

    >>> import tempfile
    >>> from unmask.storage.atomic import write_file
    >>> run = Path(tempfile.mkdtemp())
    >>> with draft(run, 250, {}, keep=1, best=False, keep_every=0) as (folder, files):
    ...     files["notes.json"] = write_file(folder / "notes.json", [b"{}"])
    >>> load_checkpoint(run).step
    250
    """
    if keep < 1 or step < 0:
        raise UsageError(f"keep must be at least 1 and step at least 0, got keep={keep}, step={step}")
    folder = run_dir / "checkpoints"
    final = place_of(run_dir, step)
    files: dict[str, tuple[int, str]] = {}
    with atomic_folder(final) as temp:
        clean(folder)
        yield temp, files
        files["state.json"] = write_file(temp / "state.json", [json.dumps(state, indent=1).encode()])
        entries = {name: {"size": size, "sha256": digest} for name, (size, digest) in sorted(files.items())}
        manifest = {"format_version": FORMAT_VERSION, "step": step, "best": best, "files": entries}
        write_file(temp / "manifest.json", [_sealed(manifest).encode()])
    atomic_text(folder / "latest", final.name + "\n")
    if best:
        atomic_text(folder / "best", final.name + "\n")
    _retire(folder, step, keep, keep_every)


def check_room(run_dir: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Refuse to begin a checkpoint that does not fit on the disk: a full disk would also break other writes.

    >>> check_room(Path("no/such/run"), 250, {})
    """
    listed = [(name, tensor) for group in tensors.values() for name, tensor in group.items()]
    needed = sum(tensor.numel() * tensor.element_size() + 128 + len(name) for name, tensor in listed)
    check_space(place_of(run_dir, step), needed + MARGIN)


def place_of(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step.

    >>> place_of(Path("run"), 250).as_posix()
    'run/checkpoints/step-00000250'
    """
    return run_dir / "checkpoints" / f"step-{step:08d}"


def load_checkpoint(path: Path) -> Checkpoint | None:
    """The newest intact checkpoint of a run, or the checkpoint in the given folder; None if the run has none.

    Damaged checkpoints of a run are skipped, with the reason in `skipped`; if the given folder is damaged, it raises.

    >>> load_checkpoint(Path("no/such/run")) is None
    True
    """
    one = find_folder(path)
    if _STEP.fullmatch(path.name) or (one / "manifest.json").is_file():
        return _read(one)
    return newest(path, _read)


def newest(path: Path, read: Callable[[Path], Checkpoint]) -> Checkpoint | None:
    """The newest of a run's checkpoints that can be read; None if the run has none.

    >>> newest(Path("no/such/run"), read=load_checkpoint) is None
    True
    """
    skipped: list[str] = []
    for _, candidate in candidates(path / "checkpoints"):
        try:
            checkpoint = read(candidate)
        except ModelFolderError as error:
            skipped.append(str(error))
            continue
        checkpoint.skipped = skipped
        return checkpoint
    if skipped:
        more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
        raise ModelFolderError(f"no whole checkpoint in {path / 'checkpoints'}: {skipped[0]}{more}")
    return None


def best_checkpoint(run_dir: Path) -> Path | None:
    """The folder of the best checkpoint so far, for `load_checkpoint`; None if no checkpoint is marked as the best.

    >>> best_checkpoint(Path("no/such/run")) is None
    True
    """
    folder = run_dir / "checkpoints"
    named = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        named = (folder / "best").read_text(encoding="utf-8").strip()
    for _, candidate in candidates(folder):
        # The pointer is updated after the folder is in place: after a kill in between, the manifest is right.
        if candidate.name == named or _says_best(candidate):
            return candidate
    return None


def _says_best(folder: Path) -> bool:
    try:
        return _manifest(folder).get("best") is True
    except ModelFolderError:
        return False


def candidates(folder: Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint, newest first, including damaged but not unfinished ones.

    >>> candidates(Path("no/such/run/checkpoints"))
    []
    """
    if not folder.is_dir():
        return []
    names = {path.name for path in folder.iterdir()}
    names |= {left["name"] for _, left in left_behind(folder) if left["kind"] == "old"}
    steps = ((int(match[1]), find_folder(folder / name)) for name in names if (match := _STEP.fullmatch(name)))
    return sorted(steps, reverse=True)


def _retire(folder: Path, step: int, keep: int, keep_every: int) -> None:
    """Remove all but the last `keep` checkpoints up to `step`; never later ones, milestones or the best."""
    best = best_checkpoint(folder.parent)
    past = [(at, path) for at, path in candidates(folder) if at <= step]
    for at, path in past[keep:]:
        if path == best or (keep_every and at % keep_every == 0):
            continue
        # Rename first, so that a kill half-way leaves no checkpoint with missing files. If removal fails, the next save
        # tries again: the run need not stop for it.
        gone = sibling(path, "tmp")
        with contextlib.suppress(OSError):
            os.rename(path, gone)
            shutil.rmtree(gone)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    check_plain(path)
    manifest = read_json(path, _MAX_MANIFEST)
    version = manifest.get("format_version")
    if version not in (1, FORMAT_VERSION) or type(version) is not int:
        raise ModelFolderError(
            f"{path} has format_version {printable(version, 20)}, this unmask reads {FORMAT_VERSION}"
        )
    seal = manifest.pop("sha256", None)
    kinds = {"format_version": int, "step": int, "best": bool, "files": dict}
    whole = (seal is None) if version == 1 else read_text(path, _MAX_MANIFEST) == _sealed(manifest)
    if not whole or {key: type(value) for key, value in manifest.items()} != kinds:
        raise ModelFolderError(f"{path} is damaged: it is not what a save writes")
    return manifest


def _sealed(manifest: Mapping[str, Any]) -> str:
    """The manifest's text, with a hash of itself: damage to it is distinguished from damage to the files it lists."""
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1)


def verify(folder: Path, *, rank: int = 0, size: int = 1) -> tuple[int, list[str]]:
    """Verify every byte of a checkpoint against its manifest; return its step and file names.

    If several processes verify one checkpoint, each reads every size-th file.

    >>> verify(Path("no/such/run/checkpoints/step-00000250"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: no/such/run/checkpoints/step-00000250 is no checkpoint folder
    """
    try:
        return _verify(folder, rank, size)
    except OSError as e:  # an unreadable file is treated as damaged
        raise ModelFolderError(f"cannot read {folder}: {e.strerror or e}") from None


def _verify(folder: Path, rank: int, size: int) -> tuple[int, list[str]]:
    if folder.is_symlink() or not folder.is_dir():
        raise ModelFolderError(f"{folder} is no checkpoint folder")
    manifest = _manifest(folder)
    step, files = manifest["step"], manifest["files"]
    named = _STEP.search(folder.name)
    if step < 0 or (named and int(named[1]) != step):
        raise ModelFolderError(f"{folder / 'manifest.json'} is damaged or of another step")
    for path in sorted(folder.iterdir()):
        if path.name != "manifest.json" and path.name not in files:
            raise ModelFolderError(f"{path} is not in the manifest; remove it if it is not needed")
    for i, (name, entry) in enumerate(files.items()):
        path = folder / name
        if not _NAME.fullmatch(name):
            raise ModelFolderError(f"{folder / 'manifest.json'} names a file outside its folder: {printable(name)!r}")
        check_plain(path)
        if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
            raise ModelFolderError(f"{folder / 'manifest.json'} is damaged: what it says of {name} is no size and hash")
        if path.stat().st_size != entry["size"]:
            raise ModelFolderError(f"{path} is damaged: it has {path.stat().st_size} bytes, not what the manifest says")
        if i % size == rank and _sha256(path) != entry["sha256"]:
            raise ModelFolderError(f"{path} is damaged: its SHA-256 is not what the manifest says")
    if "state.json" not in files:
        raise ModelFolderError(f"{folder / 'state.json'} is missing")
    return step, list(files)


def _read(folder: Path) -> Checkpoint:
    step, files = verify(folder)
    checkpoint = without_tensors(folder, step, files)
    if checkpoint.sharded:
        from unmask.training.checkpoint.sharded import read_whole  # imports much of torch.distributed

        checkpoint.tensors = read_whole(folder)
    else:
        checkpoint.tensors = {Path(f).stem: read_tensors(folder / f) for f in files if f.endswith(".safetensors")}
    return checkpoint


def without_tensors(folder: Path, step: int, files: list[str]) -> Checkpoint:
    """A verified checkpoint without its tensors, which are not read yet."""
    sharded = any(file.startswith(SHARD) for file in files)
    return Checkpoint(step=step, tensors={}, state=read_json(folder / "state.json"), path=folder, sharded=sharded)
