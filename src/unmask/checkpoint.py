"""Resumable state on disk: written whole or not at all, verified when read, nothing executable (safetensors and JSON).

    RUN/checkpoints/step-00000250/model.safetensors, ema.safetensors, ..., state.json, manifest.json
    RUN/checkpoints/best            the name of the best one

A writer works in `.NAME.tmp-PID-RANDOM`, syncs it, and renames it into place. Where a folder of that name exists it is
first moved to `.NAME.old-PID-RANDOM`; a writer killed between the two renames leaves that one, and readers find it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unmask.errors import ModelFolderError, UnmaskError, UsageError

FORMAT_VERSION = 1

_STEP = re.compile(r"step-(\d{8,})")
_LEFT_BEHIND = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<pid>\d+)-[0-9a-f]{8}")
# What this process is writing now. A folder with our process id that is not among them was left by a dead process of
# the same id, which is the rule in containers.
_writing: set[str] = set()


# --- writing whole folders and files ----------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `final` when the block ends well, and vanishes when it does not.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp()) / "model"
    >>> with atomic_folder(out) as folder:
    ...     _ = (folder / "config.json").write_text("{}")
    >>> [file.name for file in out.iterdir()]
    ['config.json']
    """
    final = Path(final).resolve()  # a link to a folder on another disk stays a link
    if final.exists() and not final.is_dir():
        raise UsageError(f"{final} is a file; give the name of a folder")
    temp = _sibling(final, "tmp")
    _writing.add(temp.name)
    try:
        with _one_line_errors(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            _clean(final.parent, final.name)
            temp.mkdir()
            yield temp
            _sync_tree(temp)
            _swap(temp, final)
    finally:
        shutil.rmtree(temp, ignore_errors=True)  # gone already when all went well
        _writing.discard(temp.name)


def atomic_text(final: Path, text: str) -> None:
    """Write a small file whole or not at all.

    >>> import tempfile
    >>> atomic_text(Path(tempfile.mkdtemp()) / "best", "step-00000250")
    """
    temp = _sibling(final, "tmp")
    _writing.add(temp.name)
    try:
        with _one_line_errors(final):
            temp.write_text(text, encoding="utf-8")
            _sync(temp)
            os.replace(temp, final)
            _sync(final.parent)
    finally:
        temp.unlink(missing_ok=True)
        _writing.discard(temp.name)


def find_folder(final: Path) -> Path:
    """`final`, or where it is when its writer was killed while putting a new one in its place. Changes nothing.

    >>> find_folder(Path("no/such/folder"))
    PosixPath('no/such/folder')
    """
    if final.exists() or not final.parent.is_dir():
        return final
    aside = [
        path for path, found in _left_behind(final.parent) if found["name"] == final.name and found["kind"] == "old"
    ]
    return max(aside, key=lambda path: path.stat().st_mtime, default=final)


def _sibling(final: Path, kind: str) -> Path:
    return final.with_name(f".{final.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


def _swap(temp: Path, final: Path) -> None:
    aside = _sibling(final, "old")
    moved: list[tuple[Path, Path]] = []
    _writing.add(aside.name)
    try:
        for source, target in ((final, aside), (temp, final)):
            if source.exists():
                os.rename(source, target)
                moved.append((source, target))
        _sync(final.parent)
    except BaseException:
        for source, target in reversed(moved):
            os.rename(target, source)
        raise
    finally:
        _writing.discard(aside.name)
    shutil.rmtree(aside, ignore_errors=True)  # only now that the new one is durable


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # there a folder cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for here, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(here, name))
        _sync(Path(here))


@contextlib.contextmanager
def _one_line_errors(final: Path) -> Iterator[None]:
    previous = f"the previous {final.name} is intact" if final.exists() else "nothing was left behind"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UnmaskError(f"disk full while writing {final}; free space and run again; {previous}") from error
        raise UnmaskError(f"cannot write {final}: {error.strerror or error}; {previous}") from error


def _left_behind(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    """What writers, dead or alive, have or left in a folder under names of their own."""
    matches = ((path, _LEFT_BEHIND.fullmatch(path.name)) for path in sorted(folder.iterdir()))
    return [(path, match) for path, match in matches if match is not None]


def _clean(folder: Path, name: str | None = None) -> None:
    """Finish or undo what dead writers left, of one name or of all."""
    for path, found in _left_behind(folder):
        if (name is not None and found["name"] != name) or _is_live(path.name, int(found["pid"])):
            continue
        final = folder / found["name"]
        if found["kind"] == "old" and not final.exists():
            os.rename(path, final)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_live(name: str, pid: int) -> bool:
    if pid == os.getpid():
        return name in _writing
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


# --- tensors ----------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to one safetensors file. Tensors that share memory are written out in full, each under its name.

    >>> import tempfile
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

    >>> import tempfile
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
        _clean(folder)
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
    names |= {found["name"] for _, found in _left_behind(folder) if found["kind"] == "old"}
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
        gone = _sibling(path, "tmp")
        with contextlib.suppress(OSError):
            os.rename(path, gone)
            shutil.rmtree(gone)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_object(path: Path) -> dict[str, Any]:
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
    manifest = _json_object(path)
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
    state = _json_object(folder / "state.json")
    tensors = {Path(f).stem: read_tensors(folder / f) for f in files if f.endswith(".safetensors")}
    return Checkpoint(step=step, tensors=tensors, state=state, path=folder)


# --- optimizers -------------------------------------------------------------------------------------------------------


def flatten_optimizer(optimizer: torch.optim.Optimizer, names: list[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state by parameter name: tensors ("exp_avg/blocks.0.qkv.weight"), and the rest for JSON.

    `names` are those of the optimizer's parameters, in the order of its groups. A tensor's values are kept bit by bit.

    >>> layer = torch.nn.Linear(2, 1)
    >>> tensors, state = flatten_optimizer(torch.optim.AdamW(layer.parameters()), ["weight", "bias"])
    >>> state["groups"][0]["params"]
    ['weight', 'bias']
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group, owned in _groups(optimizer, names):
        for name, parameter in owned.items():
            entry = optimizer.state.get(parameter, {})
            tensors |= {f"{key}/{name}": v.detach() for key, v in entry.items() if isinstance(v, Tensor)}
            values[name] = {key: v for key, v in entry.items() if not isinstance(v, Tensor)}
        options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k not in _PARAMETERS}
        groups.append({**options, "params": list(owned)})
    return tensors, {"groups": groups, "values": values, "tensors": sorted(tensors)}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Put back what `flatten_optimizer` took, into an optimizer made for parameters of the same names.

    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    >>> restore_optimizer(optimizer, ["weight", "bias"], *flatten_optimizer(optimizer, ["weight", "bias"]))
    """
    groups, saved = _groups(optimizer, names), state["groups"]
    if [list(owned) for _, owned in groups] != [group["params"] for group in saved]:
        odd = sorted(set(names).symmetric_difference(name for group in saved for name in group["params"]))
        raise ModelFolderError(
            f"the saved optimizer has other parameters or groups: {odd[0] if odd else 'their order'}"
        )
    if odd := sorted(set(state["tensors"]).symmetric_difference(tensors)):
        raise ModelFolderError(f"the saved optimizer state is not whole: {odd[0]} is missing or unexpected")
    fresh: dict[Tensor, dict[str, Any]] = {}
    for group, owned in groups:
        # torch counts steps on the CPU unless the whole update runs on the device
        on_device = group.get("fused") or group.get("capturable")
        for name, parameter in owned.items():
            entry = dict(state["values"][name])
            for key in [key for key in tensors if key.partition("/")[2] == name]:
                value, kind = tensors[key], key.partition("/")[0]
                if value.ndim == parameter.ndim and value.shape != parameter.shape:
                    shapes = f"{tuple(value.shape)}, not {tuple(parameter.shape)}"
                    raise ModelFolderError(f"the saved optimizer state {key} has shape {shapes}")
                place = parameter.device if on_device or kind != "step" else torch.device("cpu")
                entry[kind] = value.detach().clone().to(place)
            if entry:
                fresh[parameter] = entry
    for (group, _), options in zip(groups, saved, strict=True):
        group.update({k: _like(group.get(k), v) for k, v in options.items() if k not in _PARAMETERS})
    optimizer.state.clear()
    optimizer.state.update(fresh)


_PARAMETERS = ("params", "param_names")  # a group's keys that are no options


def _groups(optimizer: torch.optim.Optimizer, names: list[str]) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Every group with its parameters by name."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if count != len(names) or len(set(names)) != len(names):
        raise UsageError(f"the optimizer has {count} parameters; give each a name of its own, got {len(names)}")
    rest = iter(names)
    return [(group, {next(rest): parameter for parameter in group["params"]}) for group in optimizer.param_groups]


def _like(current: Any, value: Any) -> Any:
    """A value that went through JSON, as the type that the optimizer had."""
    if isinstance(current, Tensor):
        return torch.tensor(value, dtype=current.dtype, device=current.device)
    return tuple(value) if isinstance(current, tuple) else value
