"""Import and export of the formats in which the authors of MDLM (arXiv 2406.07524) and of SEDD (2310.16834) publish.

A published folder is `config.json` and safetensors files; training with their code produces Lightning checkpoints
(`.ckpt`). All contain the same tensors under the same names, which this file maps to those of `unmask.denoisers.dit`:

- mdlm: the logits of x_theta. A folder is recognised by its model_type.
- sedd: the same network, whose logits l are the score up to a known term: log s = l - log(e^sigma - 1) - log V, with V
  tokens beside the mask (`scale_by_sigma`). This is `objectives.sedd` with absorbing states. A folder of SEDD's authors
  has the keys of their recipe (`graph`, `tokens`); a checkpoint of MDLM's authors cannot be told from mdlm.
- ar: no conditioning, and causal. The published network reads a begin token first, ours the mask, which no text
  contains: so the mask's embedding becomes that of the begin token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from unmask.denoisers.dit import SIZES, DiT, DiTNetwork
from unmask.errors import ModelFolderError, UsageError, did_you_mean
from unmask.objectives import Objective
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.objectives.sedd import SEDD
from unmask.storage.atomic import atomic_folder
from unmask.storage.published_files import PREFIX, averaged, read_source, strip
from unmask.storage.tensor_file import write_tensors
from unmask.storage.untrusted import read_json

Kind = Literal["mdlm", "sedd", "ar"]
OBJECTIVES: dict[Kind, type[Objective]] = {"mdlm": MDLM, "sedd": SEDD, "ar": AR}
_INTEGERS = ("vocab_size", "model_length", "hidden_dim", "cond_dim", "n_blocks", "n_heads", "mask_id")
SETTINGS = (*_INTEGERS, "dropout", "time_conditioning")  # the keys of config.json that describe the network

# Published name → ours, in the published module's parameter order, which is the only key of its EMA list.
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
    """A published model in our terms: the denoiser, and its weights under our names."""

    denoiser: DiT
    state: dict[str, Tensor]
    num_ids: int
    mask_id: int
    length: int
    kind: Kind = "mdlm"
    notes: list[str] = field(default_factory=list)  # assumptions made, one sentence each

    def build(self) -> DiTNetwork:
        """The network with these weights, ready to use."""
        with torch.device("meta"):  # avoids an initialisation that would be overwritten
            network = self.denoiser.build(num_ids=self.num_ids, mask_id=self.mask_id)
        network.load_state_dict(self.state, assign=True)
        return network.eval()


def published_names(num_blocks: int, kind: Kind = "mdlm") -> dict[str, str]:
    """Published name (without prefix) → our name, in the published parameter order.

    >>> published_names(1)["blocks.0.attn_qkv.weight"]
    'blocks.0.qkv.weight'
    """
    blocks = {f"blocks.{n}.{a}": f"blocks.{n}.{b}" for n in range(num_blocks) for a, b in _BLOCK.items()}
    names = {**_BEFORE, **blocks, **_AFTER}
    if kind == "ar":
        return {a: b for a, b in names.items() if not a.startswith("sigma_map.") and "adaLN" not in a}
    return names


def read_published(
    source: Path,
    *,
    overrides: dict[str, Any] | None = None,
    ema: bool = False,
    kind: Kind | None = None,
    begin_id: int | None = None,
) -> Published:
    """Read a published model: a folder (config.json and safetensors), or a single .safetensors, .ckpt or .bin file.

    `overrides` take precedence over config.json and have its keys: vocab_size, model_length, hidden_dim, cond_dim,
    n_blocks, n_heads, dropout, time_conditioning, and mask_id (by default the last id). Sizes are derived from the
    tensors; a single file needs model_length, and for mdlm time_conditioning. `ema` selects the averaged weights of a
    Lightning checkpoint. kind: the kind of model, if the source does not say it. begin_id: for ar, the token with which
    its rows begin.

    >>> read_published(Path("no/such/model"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: no/such/model does not exist
    """
    source = Path(source)
    config, said = _config(source, overrides or {})
    if kind not in (None, *get_args(Kind)):
        raise UsageError(f"unknown kind {kind!r} of a published model; {did_you_mean(str(kind), get_args(Kind))}")
    if None not in (kind, said) and kind != said:
        raise UsageError(f"{source} says that it is {said}, not {kind}: leave out --kind")
    tensors, shadow = read_source(source)
    weights = strip(source, tensors)
    kind = said or kind or ("mdlm" if "sigma_map.mlp.0.weight" in weights else "ar")
    if ema:
        blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.") and name.count(".") > 1}
        weights = averaged(source, weights, shadow, list(published_names(len(blocks), kind)))
    sizes = _sizes(source, weights, config, kind)
    notes: list[str] = []
    denoiser = _describe(source, sizes, config, kind, notes)
    vocab_size, length = sizes["vocab_size"], config.get("model_length")
    if length is None or length < 1:
        raise UsageError(f"{source} does not say the length of its rows; give model_length (--model-length)")
    mask_id = config.get("mask_id", vocab_size - 1)
    if not 0 <= mask_id < vocab_size:
        raise UsageError(f"mask_id must lie in 0..{vocab_size - 1}, got {mask_id}")
    state = _to_ours(source, weights, denoiser, kind, vocab_size, mask_id)
    if kind == "ar":
        if begin_id is None or not 0 <= begin_id < vocab_size:
            raise UsageError(f"{source} is autoregressive: say which id its rows begin with (begin_id), not {begin_id}")
        state["embed.weight"][mask_id] = state["embed.weight"][begin_id]
    return Published(denoiser, state, vocab_size, mask_id, length, kind, notes)


def write_published(denoiser: DiTNetwork, folder: Path, *, length: int, kind: Kind = "mdlm") -> None:
    """Write config.json and model.safetensors in the format of the authors of mdlm or sedd; `folder` must be new or
    empty.

    >>> import tempfile
    >>> dit = DiT(hidden=8, blocks=1, heads=2, conditioning="constant", qk_norm=False)
    >>> net = dit.build(num_ids=5, mask_id=4)
    >>> write_published(net, Path(tempfile.mkdtemp()) / "out", length=16)
    """
    config = denoiser.config
    if kind == "ar":
        raise UsageError("an autoregressive model has no published form that is read without its code")
    wanted = ("sigma",) if kind == "sedd" else ("constant", "sigma")
    if config.conditioning not in wanted:
        raise UsageError(
            f"a network with conditioning {config.conditioning!r} has no published form: "
            f"it needs the adaLN branch, conditioning {' or '.join(map(repr, wanted))}"
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
    state = denoiser.state_dict()
    prefix = "" if kind == "sedd" else PREFIX
    tensors = {prefix + published: state[ours] for published, ours in published_names(config.dims[1]).items()}
    if kind == "sedd" and denoiser.mask_id != denoiser.num_ids - 1:
        raise UsageError("SEDD's authors have the mask as the last id: this vocabulary has it elsewhere")
    about = _sedd_config(denoiser, length) if kind == "sedd" else _mdlm_config(denoiser, length)
    with atomic_folder(folder) as temp:
        (temp / "config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        write_tensors(temp / "model.safetensors", tensors, {"format": "pt"})


def _mdlm_config(denoiser: DiTNetwork, length: int) -> dict[str, Any]:
    config = denoiser.config
    hidden, blocks, heads = config.dims
    return {
        "model_type": "mdlm",
        "vocab_size": denoiser.num_ids,
        "model_length": length,
        "hidden_dim": hidden,
        "cond_dim": config.cond_dim,
        "n_blocks": blocks,
        "n_heads": heads,
        "dropout": config.dropout,
        "time_conditioning": config.conditioning == "sigma",
        "mask_id": denoiser.mask_id,  # not a published key: there it is the last id or the tokenizer's
    }


def _sedd_config(denoiser: DiTNetwork, length: int) -> dict[str, Any]:
    config = denoiser.config
    hidden, blocks, heads = config.dims
    sizes = {"hidden_size": hidden, "cond_dim": config.cond_dim, "length": length, "n_blocks": blocks, "n_heads": heads}
    return {
        "tokens": denoiser.num_ids - 1,
        "graph": {"type": "absorb"},
        "noise": {"type": "loglinear"},
        "model": {"type": "ddit", **sizes, "scale_by_sigma": True, "dropout": config.dropout},
    }


# --- what the model is ------------------------------------------------------------------------------------------------


def _config(source: Path, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], Kind | None]:
    """config.json merged with the overrides, types checked; and the kind of model that it names."""
    for key in overrides:
        if key not in SETTINGS:
            raise UsageError(f"unknown setting {key!r} of a published model; {did_you_mean(key, SETTINGS)}")
    if not source.exists():
        raise ModelFolderError(f"{source} does not exist")
    config: dict[str, Any] = {}
    kind: Kind | None = None
    if source.is_dir():
        path = source / "config.json"
        saved = read_json(path)
        if saved.get("model_type") == "mdlm":
            kind, config = "mdlm", {key: saved[key] for key in SETTINGS if saved.get(key) is not None}
        elif "graph" in saved and "tokens" in saved:
            kind, config = "sedd", _said_by_sedd(path, saved)
        else:
            kinds = str(saved.get("model_type"))[:40]
            raise ModelFolderError(f"{path} has model_type {kinds!r}, not 'mdlm'; one of transformers is hf:{source}")
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
    return config, kind


def _said_by_sedd(path: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the recipe of SEDD's authors into MDLM's keys."""
    graph, noise, model = (saved.get(key) for key in ("graph", "noise", "model"))
    if not (isinstance(graph, dict) and isinstance(noise, dict) and isinstance(model, dict)):
        raise ModelFolderError(f"{path} has no graph, noise and model of a SEDD")
    if graph.get("type") != "absorb":
        raise UsageError(
            f"{path} is of the graph {str(graph.get('type'))[:40]!r}: there the network gives the score itself, which "
            "has no finite bound with exact ends; only 'absorb' is read"
        )
    if noise.get("type") != "loglinear":
        raise UsageError(f"{path} has the noise {str(noise.get('type'))[:40]!r}: only 'loglinear' is read")
    if model.get("scale_by_sigma") is not True:
        raise UsageError(f"{path} is without scale_by_sigma: its logits mean something else than ours")
    tokens = saved["tokens"]
    config = {"vocab_size": tokens + 1 if type(tokens) is int else tokens, "time_conditioning": True}
    names = {"length": "model_length", "hidden_size": "hidden_dim"}
    names |= {key: key for key in ("cond_dim", "n_blocks", "n_heads", "dropout")}
    return config | {ours: model[theirs] for theirs, ours in names.items() if model.get(theirs) is not None}


def _sizes(source: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], kind: Kind) -> dict[str, int]:
    """The sizes that follow from the tensors; config.json must not contradict them."""
    for name in ("vocab_embed.embedding", "sigma_map.mlp.0.weight")[: 1 if kind == "ar" else 2]:
        if name not in weights:
            raise ModelFolderError(f"{source} lacks the tensor {PREFIX}{name}; is it a published {kind.upper()}?")
        if weights[name].ndim != 2:
            raise ModelFolderError(f"{source}: {PREFIX}{name} has shape {tuple(weights[name].shape)}, not two axes")
    vocab_size, hidden = weights["vocab_embed.embedding"].shape
    # Counted, not taken from the largest number: otherwise a malicious name could request a billion blocks.
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.") and name.count(".") > 1}
    sizes = {"vocab_size": vocab_size, "hidden_dim": hidden, "n_blocks": len(blocks)}
    if kind != "ar":
        sizes["cond_dim"] = weights["sigma_map.mlp.0.weight"].shape[0]
    for key, size in sizes.items():
        if config.get(key, size) == size:
            continue
        hint = ""
        if key == "n_blocks" and 0 <= config[key] - size <= 1000:
            gap = next(n for n in range(config[key]) if str(n) not in blocks)
            hint = f": {PREFIX}blocks.{gap} is missing"
        elif key != "n_blocks":
            tensor = "vocab_embed.embedding" if key in ("vocab_size", "hidden_dim") else "sigma_map.mlp.0.weight"
            hint = f": {PREFIX}{tensor} has shape {tuple(weights[tensor].shape)}"
        raise ModelFolderError(f"{source} was said to have {key} {config[key]}, its tensors have {size}{hint}")
    return sizes


def _describe(source: Path, sizes: Mapping[str, int], config: Mapping[str, Any], kind: Kind, notes: list[str]) -> DiT:
    hidden, blocks = sizes["hidden_dim"], sizes["n_blocks"]
    heads = config.get("n_heads")
    if heads is None:
        if hidden % 64:
            raise UsageError(f"{source} does not say its number of heads; give n_heads (--n-heads)")
        heads = hidden // 64
        notes.append(f"n_heads was not given: took {heads}, heads of 64 as in the published models")
    if "time_conditioning" not in config and kind == "mdlm":
        raise UsageError(
            f"{source} does not say whether it is conditioned on time, and its tensors cannot show it; "
            "give time_conditioning (--time-conditioning or --no-time-conditioning)"
        )
    size = next((name for name, dims in SIZES.items() if dims == (hidden, blocks, heads)), None)
    dims: dict[str, Any] = {"size": size} if size else {"hidden": hidden, "blocks": blocks, "heads": heads}
    if min(hidden, blocks, heads) < 1:
        raise ModelFolderError(f"{source} describes no network: hidden {hidden}, blocks {blocks}, heads {heads}")
    common: dict[str, Any] = {"dropout": float(config.get("dropout", 0.1)), "qk_norm": False, "zero_init": False}
    if kind == "ar":  # as published, which is not our default
        return DiT(**dims, **common, causal=True)
    sees = "sigma" if config.get("time_conditioning", True) else "constant"
    return DiT(**dims, **common, conditioning=sees, cond_dim=sizes["cond_dim"])  # type: ignore[arg-type]


# --- the tensors ------------------------------------------------------------------------------------------------------


def _to_ours(
    source: Path, weights: Mapping[str, Tensor], denoiser: DiT, kind: Kind, num_ids: int, mask_id: int
) -> dict[str, Tensor]:
    """The tensors under our names: all present, of the right shape, finite, float32, and none left over."""
    with torch.device("meta"):
        expected = denoiser.build(num_ids=num_ids, mask_id=mask_id).state_dict()
    names = published_names(denoiser.dims[1], kind)
    missing = [name for name in names if name not in weights]
    unexpected = [name for name in weights if name not in names]
    for problem, odd in (("lacks", missing), ("holds an unexpected", unexpected)):
        if odd:
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            raise ModelFolderError(f"{source} {problem} tensor {PREFIX}{odd[0][:80]}{more}")
    state: dict[str, Tensor] = {}
    for name, ours in names.items():
        tensor, shape = weights[name], expected[ours].shape
        if tensor.shape != shape:
            shapes = f"{tuple(tensor.shape)}, not {tuple(shape)}"
            raise ModelFolderError(f"{source}: {PREFIX}{name} has shape {shapes}")
        state[ours] = tensor.detach().to(torch.float32, copy=True).contiguous()
        if not bool(state[ours].isfinite().all()):
            raise ModelFolderError(f"{source}: {PREFIX}{name} holds numbers that are not finite; copy the file again")
    return state
