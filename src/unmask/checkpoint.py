"""Resumable state on disk: written whole or not at all, verified when read, nothing executable (safetensors and JSON).

RUN/checkpoints/step-00000250/model.safetensors, ema.safetensors, ..., state.json, manifest.json
RUN/checkpoints/best            the name of the best one
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unmask.atomic import atomic_folder, atomic_text, clean, find_folder, left_behind, sibling
from unmask.errors import ModelFolderError, UsageError

FORMAT_VERSION = 1

_STEP = re.compile(r"step-(\d{8,})")


# --- tensors ----------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to one safetensors file. Tensors that share memory are written out in full, each under its name.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> write_tensors(path, {"weight": torch.ones(2, 3)})
    >>> read_tensors(path)["weight"].shape
    torch.Size([2, 3])
    """
    flat: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != value.nbytes:  # the format knows no shared memory
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        flat[name] = value
    try:
        save_file(flat, path, metadata=dict(metadata or {}))
    except SafetensorError as error:  # its only way to report a failed write; the number is the system's
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU, in memory of their own: the file may go away afterwards.

    >>> read_tensors(Path("nowhere.safetensors"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.safetensors is missing
    """
    if not path.is_file():
        raise ModelFolderError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ModelFolderError(f"{path} is damaged or no safetensors file ({reason}); copy it again") from error


# --- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """A verified checkpoint, and why newer ones were passed over."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path
    skipped: list[str] = field(default_factory=list)


def save_checkpoint(
    run_dir: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
    best: bool,
) -> Path:
    """Write `run_dir/checkpoints/step-N`; once it is durable remove older ones, except the last `keep` and the best.

    `state` must survive JSON: string keys, lists rather than tuples.

    >>> import tempfile, torch
    >>> run = Path(tempfile.mkdtemp())
    >>> save_checkpoint(run, 250, {"model": {"w": torch.ones(2)}}, {"loss": 1.5}, keep=2, best=True).name
    'step-00000250'
    >>> load_checkpoint(run).state
    {'loss': 1.5}
    """
    if keep < 1 or step < 0:
        raise UsageError(f"keep must be at least 1 and step at least 0, got keep={keep}, step={step}")
    folder = run_dir / "checkpoints"
    final = folder / f"step-{step:08d}"
    with atomic_folder(final) as temp:
        clean(folder)
        for name, group in tensors.items():
            if not re.fullmatch(r"[A-Za-z0-9_]+", name):
                raise UsageError(f"{name!r} cannot name a checkpoint file; use letters, digits and _")
            write_tensors(temp / f"{name}.safetensors", group)
        (temp / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(temp.iterdir())}
        manifest = {"format_version": FORMAT_VERSION, "step": step, "best": best, "files": files}
        (temp / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    if best:
        atomic_text(folder / "best", final.name + "\n")
    _retire(folder, step, keep)
    return final


def load_checkpoint(path: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run, or the one in the folder named; None when the run has none.

    A damaged one is passed over, with the reason in `skipped`; a damaged one that was asked for by name is an error.

    >>> load_checkpoint(Path("no/such/run")) is None
    True
    """
    one = find_folder(path)
    if _STEP.fullmatch(path.name) or (one / "manifest.json").is_file():
        return _read(one)
    skipped: list[str] = []
    for _, candidate in _candidates(path / "checkpoints"):
        try:
            found = _read(candidate)
        except ModelFolderError as error:
            skipped.append(str(error))
            continue
        found.skipped = skipped
        return found
    if skipped:
        more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
        raise ModelFolderError(f"no whole checkpoint in {path / 'checkpoints'}: {skipped[0]}{more}")
    return None


def best_checkpoint(run_dir: Path) -> Path | None:
    """The folder of the best checkpoint so far, for `load_checkpoint`; None when none was called the best.

    >>> best_checkpoint(Path("no/such/run")) is None
    True
    """
    folder = run_dir / "checkpoints"
    named = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        named = (folder / "best").read_text(encoding="utf-8").strip()
    for _, candidate in _candidates(folder):
        # The pointer moves after the folder is in place: after a kill in between, the manifest knows better.
        if candidate.name == named or _says_best(candidate):
            return candidate
    return None


def _says_best(folder: Path) -> bool:
    try:
        return _manifest(folder).get("best") is True
    except ModelFolderError:
        return False


def _candidates(folder: Path) -> list[tuple[int, Path]]:
    """Step and place of every checkpoint, newest first; damaged ones among them, unfinished ones not."""
    if not folder.is_dir():
        return []
    names = {path.name for path in folder.iterdir()}
    names |= {found["name"] for _, found in left_behind(folder) if found["kind"] == "old"}
    steps = ((int(match[1]), find_folder(folder / name)) for name in names if (match := _STEP.fullmatch(name)))
    return sorted(steps, reverse=True)


def _retire(folder: Path, step: int, keep: int) -> None:
    """Remove what is older than the last `keep` up to `step`; never a later one, nor the best."""
    best = best_checkpoint(folder.parent)
    past = [path for at, path in _candidates(folder) if at <= step]
    for path in past[keep:]:
        if path == best:
            continue
        # Under another name first, so that a kill half-way leaves no checkpoint with files missing. What cannot be
        # removed now is tried again at the next save: the run need not stop for it.
        gone = sibling(path, "tmp")
        with contextlib.suppress(OSError):
            os.rename(path, gone)
            shutil.rmtree(gone)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; anything else is refused by name.

    >>> read_json(Path("nowhere.json"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.json is missing
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is damaged: it does not read as JSON") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} is damaged: it holds no JSON object")
    return value


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if path.is_symlink():
        raise ModelFolderError(f"{path} is a symbolic link; a checkpoint holds plain files")
    manifest = read_json(path)
    if manifest.get("format_version") != FORMAT_VERSION:
        version = str(manifest.get("format_version"))[:20]
        raise ModelFolderError(f"{path} has format_version {version}, this unmask reads {FORMAT_VERSION}")
    return manifest


def _verify(folder: Path) -> tuple[int, list[str]]:
    """The step and the file names of a checkpoint whose every byte is what its manifest says."""
    if folder.is_symlink() or not folder.is_dir():
        raise ModelFolderError(f"{folder} is no checkpoint folder")
    manifest = _manifest(folder)
    step, files = manifest.get("step"), manifest.get("files")
    named = _STEP.search(folder.name)
    if type(step) is not int or not isinstance(files, dict) or (named and int(named[1]) != step):
        raise ModelFolderError(f"{folder / 'manifest.json'} is damaged or of another step")
    for path in sorted(folder.iterdir()):
        if path.name != "manifest.json" and path.name not in files:
            raise ModelFolderError(f"{path} is not in the manifest; remove it if it is not needed")
    for name, entry in files.items():
        path = folder / name
        if Path(name).name != name or name in ("", ".", ".."):
            raise ModelFolderError(f"{folder / 'manifest.json'} names a file outside its folder: {name[:80]!r}")
        if path.is_symlink() or not path.is_file():
            raise ModelFolderError(f"{path} is {'a symbolic link' if path.is_symlink() else 'missing'}")
        if not isinstance(entry, dict) or path.stat().st_size != entry.get("size"):
            raise ModelFolderError(f"{path} is damaged: it has {path.stat().st_size} bytes, not what the manifest says")
        if _sha256(path) != entry.get("sha256"):
            raise ModelFolderError(f"{path} is damaged: its SHA-256 is not what the manifest says")
    return step, list(files)


def _read(folder: Path) -> Checkpoint:
    step, files = _verify(folder)
    state = read_json(folder / "state.json")
    tensors = {Path(f).stem: read_tensors(folder / f) for f in files if f.endswith(".safetensors")}
    return Checkpoint(step=step, tensors=tensors, state=state, path=folder)
