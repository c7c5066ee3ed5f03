"""The tensors of published models: folders of safetensors, Lightning checkpoints, and what is refused in them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.errors import ModelFolderError, UsageError
from unmask.storage.tensor_file import read_tensors
from unmask.storage.untrusted import read_json

PREFIX = "backbone."


def read_source(source: Path) -> tuple[dict[str, Any], Any]:
    """All tensors under their original names, and the EMA list of a Lightning checkpoint."""
    if source.is_dir():
        return _read_folder(source), None
    if source.suffix == ".safetensors":
        return dict(read_tensors(source)), None
    if source.suffix in (".ckpt", ".bin", ".pt", ".pth"):
        return _read_pickle(source)
    raise UsageError(f"{source} is not a folder, .safetensors, .ckpt or .bin file")


def _read_folder(source: Path) -> dict[str, Any]:
    index = source / "model.safetensors.index.json"
    if index.is_file():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
            raise ModelFolderError(f"{index} is damaged: it has no weight_map")
        files = sorted(set(placed.values()))
        for name in files:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelFolderError(f"{index} names {name[:80]!r}, which is no safetensors file of its folder")
    else:
        placed, files = None, sorted(path.name for path in source.glob("*.safetensors"))
    if not files:
        raise ModelFolderError(f"{source} holds no .safetensors file; give a .ckpt or .bin file itself, with flags")
    tensors: dict[str, Any] = {}
    for name in files:
        for key, tensor in read_tensors(source / name).items():
            if key in tensors:
                raise ModelFolderError(f"{source / name} holds {key}, which another file of {source} holds too")
            if placed is not None and placed.get(key) != name:
                raise ModelFolderError(f"{source / name} holds {key}, which {index.name} does not place there")
            tensors[key] = tensor
    if placed is not None and (missing := sorted(set(placed) - set(tensors))):
        raise ModelFolderError(f"{source / placed[missing[0]]} lacks {missing[0]}, which {index.name} places there")
    return tensors


def _read_pickle(source: Path) -> tuple[dict[str, Any], Any]:
    """Read a .ckpt or .bin with torch's restricted unpickler only: anything it refuses might run code."""
    try:
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelFolderError(
            f"{source} holds more than tensors and was not read, since that can run code; in the environment it came "
            "from, save its state_dict as safetensors and import that file"
        ) from error
    except Exception as error:  # torch.load fails on damaged files in many ways
        raise ModelFolderError(f"{source} is damaged or no file of torch.save; copy it again") from error
    if not isinstance(loaded, dict):
        raise ModelFolderError(f"{source} holds a {type(loaded).__name__}, not named tensors")
    tensors = loaded.get("state_dict", loaded)
    ema = loaded.get("ema")
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise ModelFolderError(f"{source} holds no named tensors under state_dict")
    return tensors, ema.get("shadow_params") if isinstance(ema, dict) else None


def strip(source: Path, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors without the prefix and without the rotary table, which is not a weight."""
    weights: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = full.removeprefix(PREFIX)
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name in weights:
            raise ModelFolderError(f"{source} holds {name} twice, with and without the prefix {PREFIX}")
        weights[name] = checked(source, full, tensor)
    return weights


def checked(source: Path, name: str, tensor: Any) -> Tensor:
    """A plain float tensor whose storage is complete: a pickle can describe a huge view of a single number."""
    if not isinstance(tensor, Tensor):
        raise ModelFolderError(f"{source}: {name[:80]} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout is not torch.strided or not tensor.dtype.is_floating_point or tensor.device.type != "cpu":
        raise ModelFolderError(f"{source}: {name[:80]} is no dense tensor of floats ({tensor.dtype}, {tensor.layout})")
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise ModelFolderError(f"{source}: {name[:80]} has shape {tuple(tensor.shape)} with less data than that")
    return tensor


def averaged(source: Path, weights: Mapping[str, Tensor], shadow: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """The averaged weights, which a Lightning checkpoint stores as a list in parameter order."""
    if not isinstance(shadow, list):
        raise ModelFolderError(f"{source} holds no averaged weights (ema.shadow_params); import it without --ema")
    if len(shadow) != len(names):
        at = f"; it ends before {PREFIX}{names[len(shadow)]}" if len(shadow) < len(names) else ""
        raise ModelFolderError(f"{source}: ema.shadow_params has {len(shadow)} tensors, not {len(names)}{at}")
    found = {name: checked(source, f"the EMA of {name}", t) for name, t in zip(names, shadow, strict=True)}
    for name, tensor in found.items():
        if name in weights and tensor.shape != weights[name].shape:
            shapes = f"{tuple(tensor.shape)}, the weight {tuple(weights[name].shape)}"
            raise ModelFolderError(f"{source}: the EMA of {PREFIX}{name} has shape {shapes}")
    # Names that the list does not cover are kept, so that they are reported as unexpected.
    return {**weights, **found}
