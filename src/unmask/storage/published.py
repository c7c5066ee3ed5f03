"""Import and export of the layout in which the authors of MDLM (arXiv 2406.07524) publish their models.

A published folder is `config.json` and safetensors files; their training leaves Lightning checkpoints (`.ckpt`). Both
hold the same tensors under the same names, which this file maps to those of `unmask.denoisers.dit`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.denoisers.dit import SIZES, DiT, DiTNetwork
from unmask.errors import ModelFolderError, UsageError, did_you_mean
from unmask.storage.atomic import atomic_folder
from unmask.storage.tensor_file import read_tensors, write_tensors
from unmask.storage.untrusted import read_json

_PREFIX = "backbone."
_INTEGERS = ("vocab_size", "model_length", "hidden_dim", "cond_dim", "n_blocks", "n_heads", "mask_id")
SETTINGS = (*_INTEGERS, "dropout", "time_conditioning")  # the keys of config.json that say what the network is

# Published name → ours, in the published module's parameter order, which is all that its EMA list goes by.
_BEFORE = {
    "vocab_embed.embedding": "embed.weight",
    "sigma_map.mlp.0.weight": "time.mlp_in.weight",
    "sigma_map.mlp.0.bias": "time.mlp_in.bias",
    "sigma_map.mlp.2.weight": "time.mlp_out.weight",
    "sigma_map.mlp.2.bias": "time.mlp_out.bias",
}
_BLOCK = {
    "norm1.weight": "norm1.weight",
    "attn_qkv.weight": "qkv.weight",
    "attn_out.weight": "out.weight",
    "norm2.weight": "norm2.weight",
    "mlp.0.weight": "mlp_in.weight",
    "mlp.0.bias": "mlp_in.bias",
    "mlp.2.weight": "mlp_out.weight",
    "mlp.2.bias": "mlp_out.bias",
    "adaLN_modulation.weight": "modulation.weight",
    "adaLN_modulation.bias": "modulation.bias",
}
_AFTER = {
    "output_layer.norm_final.weight": "norm.weight",
    "output_layer.linear.weight": "output.weight",
    "output_layer.linear.bias": "output.bias",
    "output_layer.adaLN_modulation.weight": "modulation.weight",
    "output_layer.adaLN_modulation.bias": "modulation.bias",
}


@dataclass
class Published:
    """A published model in our terms: what network it is, and its weights under our names."""

    denoiser: DiT
    state: dict[str, Tensor]
    num_ids: int
    mask_id: int
    length: int
    notes: list[str] = field(default_factory=list)  # what was assumed, one sentence each

    def build(self) -> DiTNetwork:
        """The network with these weights, ready to use."""
        with torch.device("meta"):  # nothing is initialised only to be overwritten
            network = self.denoiser.build(num_ids=self.num_ids, mask_id=self.mask_id)
        network.load_state_dict(self.state, assign=True)
        return network.eval()


def published_names(num_blocks: int) -> dict[str, str]:
    """Published name (without prefix) → our name, in the published parameter order.

    >>> published_names(1)["blocks.0.attn_qkv.weight"]
    'blocks.0.qkv.weight'
    """
    blocks = {f"blocks.{n}.{a}": f"blocks.{n}.{b}" for n in range(num_blocks) for a, b in _BLOCK.items()}
    return {**_BEFORE, **blocks, **_AFTER}


def read_published(source: Path, *, overrides: dict[str, Any] | None = None, ema: bool = False) -> Published:
    """Read a published model: a folder (config.json and safetensors), or a bare .safetensors, .ckpt or .bin file.

    `overrides` go before config.json and have its keys: vocab_size, model_length, hidden_dim, cond_dim, n_blocks,
    n_heads, dropout, time_conditioning, and mask_id (else the last id). Sizes are read off the tensors; a bare file
    needs model_length and time_conditioning. `ema` takes the averaged weights of a Lightning checkpoint.

    >>> read_published(Path("no/such/model"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: no/such/model does not exist
    """
    source = Path(source)
    config = _config(source, overrides or {})
    tensors, shadow = _read_source(source)
    weights = _strip(source, tensors)
    if ema:
        weights = _averaged(source, weights, shadow)
    sizes = _sizes(source, weights, config)
    notes: list[str] = []
    denoiser = _describe(source, sizes, config, notes)
    vocab_size, length = sizes["vocab_size"], config.get("model_length")
    if length is None or length < 1:
        raise UsageError(f"{source} does not say the length of its rows; give model_length (--model-length)")
    mask_id = config.get("mask_id", vocab_size - 1)
    if not 0 <= mask_id < vocab_size:
        raise UsageError(f"mask_id must lie in 0..{vocab_size - 1}, got {mask_id}")
    state = _to_ours(source, weights, denoiser, vocab_size, mask_id)
    return Published(denoiser, state, vocab_size, mask_id, length, notes)


def write_published(denoiser: DiTNetwork, folder: Path, *, length: int) -> None:
    """Write config.json and model.safetensors as the authors of MDLM publish them; `folder` must be new or empty.

    >>> import tempfile
    >>> dit = DiT(hidden=8, blocks=1, heads=2, conditioning="constant", qk_norm=False)
    >>> net = dit.build(num_ids=5, mask_id=4)
    >>> write_published(net, Path(tempfile.mkdtemp()) / "out", length=16)
    """
    config = denoiser.config
    if config.conditioning not in ("constant", "sigma"):
        raise UsageError(
            f"a network with conditioning {config.conditioning!r} has no published form: "
            "it needs the adaLN branch, conditioning 'constant' or 'sigma'"
        )
    if config.causal:
        raise UsageError("a causal network has no published form: the published one sees both directions")
    if config.qk_norm:
        raise UsageError("a network with qk_norm has no published form: the published one does not norm its queries")
    if config.value_residual:
        raise UsageError("a network with value_residual has no published form: there each block reads its own values")
    if config.classes:
        raise UsageError("a network with classes has no published form: the published one knows none")
    if denoiser.objective is not None:
        raise UsageError(
            "a model whose objective has parameters of its own has no published form: the published one is a network "
            "alone"
        )
    if config.tied:
        raise UsageError("a network with tied embeddings has no published form: the published head has its own weights")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; give the name of a new folder")
    hidden, blocks, heads = config.dims
    state = denoiser.state_dict()
    tensors = {_PREFIX + published: state[ours] for published, ours in published_names(blocks).items()}
    about = {
        "model_type": "mdlm",
        "vocab_size": denoiser.num_ids,
        "model_length": length,
        "hidden_dim": hidden,
        "cond_dim": config.cond_dim,
        "n_blocks": blocks,
        "n_heads": heads,
        "dropout": config.dropout,
        "time_conditioning": config.conditioning == "sigma",
        "mask_id": denoiser.mask_id,  # not among the published keys: there it is the last id or the tokenizer's
    }
    with atomic_folder(folder) as temp:
        (temp / "config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        write_tensors(temp / "model.safetensors", tensors, {"format": "pt"})


# --- what the model is ------------------------------------------------------------------------------------------------


def _config(source: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the overrides on top, types checked."""
    for key in overrides:
        if key not in SETTINGS:
            raise UsageError(f"unknown setting {key!r} of a published model; {did_you_mean(key, SETTINGS)}")
    if not source.exists():
        raise ModelFolderError(f"{source} does not exist")
    config: dict[str, Any] = {}
    if source.is_dir():
        path = source / "config.json"
        saved = read_json(path)
        if saved.get("model_type") != "mdlm":
            said = str(saved.get("model_type"))[:40]
            raise ModelFolderError(f"{path} has model_type {said!r}, not 'mdlm'; one of transformers is hf:{source}")
        config = {key: saved[key] for key in SETTINGS if saved.get(key) is not None}
    config |= {key: value for key, value in overrides.items() if value is not None}
    for key, value in config.items():
        if key in _INTEGERS:
            good = type(value) is int
        elif key == "time_conditioning":
            good = type(value) is bool
        else:
            good = type(value) in (int, float)
        if not good:
            raise ModelFolderError(f"{key} of {source} cannot be {str(value)[:40]!r}; see its config.json or the flags")
    return config


def _sizes(source: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that the tensors show, which config.json must not contradict."""
    for name in ("vocab_embed.embedding", "sigma_map.mlp.0.weight"):
        if name not in weights:
            raise ModelFolderError(f"{source} lacks the tensor {_PREFIX}{name}; is it a published MDLM?")
        if weights[name].ndim != 2:
            raise ModelFolderError(f"{source}: {_PREFIX}{name} has shape {tuple(weights[name].shape)}, not two axes")
    vocab_size, hidden = weights["vocab_embed.embedding"].shape
    # Counted, not taken from the largest number: a hostile name cannot ask for a billion blocks.
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.") and name.count(".") > 1}
    cond_dim = weights["sigma_map.mlp.0.weight"].shape[0]
    sizes = {"vocab_size": vocab_size, "hidden_dim": hidden, "cond_dim": cond_dim, "n_blocks": len(blocks)}
    for key, size in sizes.items():
        if config.get(key, size) == size:
            continue
        hint = ""
        if key == "n_blocks" and 0 <= config[key] - size <= 1000:
            gap = next(n for n in range(config[key]) if str(n) not in blocks)
            hint = f": {_PREFIX}blocks.{gap} is missing"
        elif key != "n_blocks":
            tensor = "vocab_embed.embedding" if key in ("vocab_size", "hidden_dim") else "sigma_map.mlp.0.weight"
            hint = f": {_PREFIX}{tensor} has shape {tuple(weights[tensor].shape)}"
        raise ModelFolderError(f"{source} was said to have {key} {config[key]}, its tensors have {size}{hint}")
    return sizes


def _describe(source: Path, sizes: Mapping[str, int], config: Mapping[str, Any], notes: list[str]) -> DiT:
    hidden, blocks = sizes["hidden_dim"], sizes["n_blocks"]
    heads = config.get("n_heads")
    if heads is None:
        if hidden % 64:
            raise UsageError(f"{source} does not say its number of heads; give n_heads (--n-heads)")
        heads = hidden // 64
        notes.append(f"n_heads was not given: took {heads}, heads of 64 as in the published models")
    if "time_conditioning" not in config:
        raise UsageError(
            f"{source} does not say whether it is conditioned on time, and its tensors cannot show it; "
            "give time_conditioning (--time-conditioning or --no-time-conditioning)"
        )
    size = next((name for name, dims in SIZES.items() if dims == (hidden, blocks, heads)), None)
    dims: dict[str, Any] = {"size": size} if size else {"hidden": hidden, "blocks": blocks, "heads": heads}
    if min(hidden, blocks, heads) < 1:
        raise ModelFolderError(f"{source} describes no network: hidden {hidden}, blocks {blocks}, heads {heads}")
    return DiT(
        **dims,
        conditioning="sigma" if config["time_conditioning"] else "constant",
        cond_dim=sizes["cond_dim"],
        dropout=float(config.get("dropout", 0.1)),
        qk_norm=False,  # as published, not by default
        zero_init=False,
    )


# --- the tensors ------------------------------------------------------------------------------------------------------


def _read_source(source: Path) -> tuple[dict[str, Any], Any]:
    """All tensors under the names they have there, and the EMA list of a Lightning checkpoint."""
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
    """A .ckpt or .bin by torch's restricted reader alone: what that refuses might run code, and stays unread."""
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


def _strip(source: Path, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors without the prefix and without the rotary table, which is no weight."""
    weights: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = full.removeprefix(_PREFIX)
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name in weights:
            raise ModelFolderError(f"{source} holds {name} twice, with and without the prefix {_PREFIX}")
        weights[name] = _checked(source, full, tensor)
    return weights


def _checked(source: Path, name: str, tensor: Any) -> Tensor:
    """A plain float tensor with memory for all of it: a pickle can describe a huge view of one number."""
    if not isinstance(tensor, Tensor):
        raise ModelFolderError(f"{source}: {name[:80]} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout is not torch.strided or not tensor.dtype.is_floating_point or tensor.device.type != "cpu":
        raise ModelFolderError(f"{source}: {name[:80]} is no dense tensor of floats ({tensor.dtype}, {tensor.layout})")
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise ModelFolderError(f"{source}: {name[:80]} has shape {tuple(tensor.shape)} with less data than that")
    return tensor


def _averaged(source: Path, weights: Mapping[str, Tensor], shadow: Any) -> dict[str, Tensor]:
    """The averaged weights, which a Lightning checkpoint keeps as a list in parameter order."""
    if not isinstance(shadow, list):
        raise ModelFolderError(f"{source} holds no averaged weights (ema.shadow_params); import it without --ema")
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.") and name.count(".") > 1}
    names = list(published_names(len(blocks)))
    if len(shadow) != len(names):
        at = f"; it ends before {_PREFIX}{names[len(shadow)]}" if len(shadow) < len(names) else ""
        raise ModelFolderError(f"{source}: ema.shadow_params has {len(shadow)} tensors, not {len(names)}{at}")
    averaged = {name: _checked(source, f"the EMA of {name}", t) for name, t in zip(names, shadow, strict=True)}
    for name, tensor in averaged.items():
        if name in weights and tensor.shape != weights[name].shape:
            shapes = f"{tuple(tensor.shape)}, the weight {tuple(weights[name].shape)}"
            raise ModelFolderError(f"{source}: the EMA of {_PREFIX}{name} has shape {shapes}")
    # Names that the list does not cover stay, so that they are reported as unexpected.
    return {**weights, **averaged}


def _to_ours(
    source: Path, weights: Mapping[str, Tensor], denoiser: DiT, num_ids: int, mask_id: int
) -> dict[str, Tensor]:
    """Our names, every tensor present, of the right shape, finite, float32, and none left over."""
    with torch.device("meta"):
        expected = denoiser.build(num_ids=num_ids, mask_id=mask_id).state_dict()
    names = published_names(denoiser.dims[1])
    missing = [name for name in names if name not in weights]
    unexpected = [name for name in weights if name not in names]
    for problem, odd in (("lacks", missing), ("holds an unexpected", unexpected)):
        if odd:
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            raise ModelFolderError(f"{source} {problem} tensor {_PREFIX}{odd[0][:80]}{more}")
    state: dict[str, Tensor] = {}
    for name, ours in names.items():
        tensor, shape = weights[name], expected[ours].shape
        if tensor.shape != shape:
            shapes = f"{tuple(tensor.shape)}, not {tuple(shape)}"
            raise ModelFolderError(f"{source}: {_PREFIX}{name} has shape {shapes}")
        state[ours] = tensor.detach().to(torch.float32, copy=True).contiguous()
        if not bool(state[ours].isfinite().all()):
            raise ModelFolderError(f"{source}: {_PREFIX}{name} holds numbers that are not finite; copy the file again")
    return state
