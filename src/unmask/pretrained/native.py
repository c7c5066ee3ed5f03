"""Export of our autoregressive Llama as LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM, whichever fits.

Our network reads a begin token followed by the row without its last token; theirs reads its input as given. So in the
export the begin token precedes each text as the token `bos`, which the tokenizer adds. The mask, which autoregression
neither reads nor writes, has no row in the export, unless it is the begin token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.data.subwords import Subwords
from unmask.data.tokenizers import tokenizer_from_json
from unmask.denoisers.llama import Llama, LlamaNetwork
from unmask.model import Model
from unmask.objectives.ar import AR
from unmask.pretrained.llama import layer_tensors
from unmask.pretrained.plain_vocabulary import vocabulary_of
from unmask.pretrained.registered import MASK_ROWS, about_tokenizer, frame, tokenizer_files
from unmask.storage import model_folder
from unmask.storage.atomic import atomic_folder
from unmask.storage.tensor_file import write_tensors

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PREFIX = "model."  # of their tensors' names, except the head's
ROWS = ("embed.weight", "output.weight")  # our tensors with one row per id


@dataclass(frozen=True)
class Native:
    """model_type: of the matching class; "": there is none, and `why` says in half a sentence what is missing."""

    model_type: str
    why: str = ""


def native_of(model: Model) -> Native:
    """Which of transformers' own classes computes the predictions of this model.

    >>> native_of(unmask.load("stories")).why  # doctest: +SKIP
    'its denoiser is no llama'
    """
    network = model.denoiser
    if not isinstance(network, LlamaNetwork):
        return Native("", "its denoiser is no llama")
    if not isinstance(model.objective, AR) or not network.causal or network.task is not None:
        return Native("", "it is no autoregressive model")
    tokenizer, begin = model.tokenizer, network.begin_id
    if vocabulary_of(tokenizer).id_to_token(begin) is None:
        return Native("", f"its rows begin with the id {begin}, which has no spelling")
    if begin not in (tokenizer.mask_id, tokenizer.eot_id, tokenizer.bos_id, *tokenizer.never_ids()):
        return Native("", f"its rows begin with {tokenizer.token_text(begin)!r}, which texts hold, too")
    return _fitting(network.config)


def _fitting(config: Llama) -> Native:
    """
    >>> _fitting(Llama(qkv_bias=True)).model_type, _fitting(Llama(qk_norm=True)).model_type
    ('qwen2', 'qwen3')
    """
    alike = config.qkv_bias == config.out_bias
    if config.qk_norm:
        if config.mlp_bias or not alike:
            return Native("", "with normed queries and keys there are no biases of the MLP or of one attention map")
        return Native("qwen3")
    if alike:
        return Native("llama")
    if config.qkv_bias and not config.mlp_bias:
        return Native("qwen2")
    return Native("", "no class of transformers has its biases and no others")


def write_native(model: Model, folder: Path) -> str:
    """Write a new folder that `AutoModelForCausalLM`, `AutoTokenizer` and `pipeline("text-generation")` read without
    unmask.

    Returns a sentence on how the begin token is handled.

    >>> write_native(unmask.load("runs/ar"), Path("ar-hf"))  # doctest: +SKIP
    """
    described, state = model_folder.described(model)
    network, kind = model.denoiser, native_of(model).model_type
    assert isinstance(network, LlamaNetwork)
    vocabulary, about = _tokenizer(model, network.begin_id)
    without = _without_mask(model, network.begin_id, vocabulary)
    rows = model.tokenizer.num_ids - (without is not None)
    config = _config(network.config, kind, rows, model)
    config |= {"unmask": described, "unmask_tokenizer": about_tokenizer(model.tokenizer)}
    tensors = {name: t.detach() for name, t in state.items()}
    if without is not None:
        del about["mask_token"]
    files = {
        "config.json": json.dumps(config, indent=2, sort_keys=True) + "\n",
        "generation_config.json": json.dumps(_generation(model, network.begin_id, rows), indent=2) + "\n",
        "tokenizer.json": vocabulary if without is None else without,
        "tokenizer_config.json": json.dumps(about, indent=2) + "\n",
    }
    with atomic_folder(folder) as temp:
        for name, text in files.items():
            (temp / name).write_text(text, encoding="utf-8")
        write_tensors(temp / "model.safetensors", _theirs(network.config, tensors, rows), {"format": "pt"})
        if without is not None:
            held = {name: tensors[name][rows].clone() for name in ROWS if name in tensors}
            write_tensors(temp / MASK_ROWS, held, {"format": "pt"})
    said = f"{CLASSES[kind]}: there a text begins with {about['bos_token']} (bos), which the tokenizer puts before it"
    if without is None:
        said += "; the mask has a logit there that means nothing, and generate() never writes it"
    return said


def _config(config: Llama, kind: str, rows: int, model: Model) -> dict[str, Any]:
    """The content of config.json, with transformers' keys."""
    dims, scaling = config.dims, config.scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.theta}
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        rope |= {"original_max_position_embeddings": scaling.length}
    said = {
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        "dtype": "float32",
        "vocab_size": rows,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.inner,
        "num_hidden_layers": dims.blocks,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.groups,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.length,
        "rms_norm_eps": config.eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied,
        **_ids(model, config.begin),
    }
    if kind != "qwen2":
        said["attention_bias"] = config.qkv_bias
    return said | ({"mlp_bias": config.mlp_bias} if kind == "llama" else {})


def _ids(model: Model, begin: int | None) -> dict[str, int]:
    end = model.tokenizer.eot_id
    return {
        "bos_token_id": model.tokenizer.mask_id if begin is None else begin,
        "eos_token_id": end,
        "pad_token_id": end,
    }


def _generation(model: Model, begin: int, rows: int) -> dict[str, Any]:
    """generation_config.json: the sampling options of `unmask generate`, as far as transformers has them."""
    drawing = model.drawing
    never = [*model.tokenizer.never_ids(), *model.denoiser.fixed_ids, model.tokenizer.mask_id]
    said: dict[str, Any] = _ids(model, begin)
    said["suppress_tokens"] = sorted({id for id in never if id < rows and id != model.tokenizer.eot_id})
    if drawing.takes_likeliest or not drawing.temperature:
        return said | {"do_sample": False}
    top = {"top_k": drawing.top_k, "top_p": drawing.top_p}
    return said | {"do_sample": True, "temperature": drawing.temperature, **top}


def _tokenizer(model: Model, begin: int) -> tuple[str, dict[str, Any]]:
    """tokenizer.json, which adds the begin token before each text and nothing after it, and the content of
    its config."""
    vocabulary, about = tokenizer_files(model)
    data = json.loads(vocabulary)
    spelling = vocabulary_of(model.tokenizer).id_to_token
    data["post_processor"] = frame(spelling, [begin, *model.begin], [])
    return json.dumps(data, ensure_ascii=False), about | {"bos_token": spelling(begin), "padding_side": "left"}


def _without_mask(model: Model, begin: int, vocabulary: str) -> str | None:
    """tokenizer.json without the mask, if that is the last id and not the begin token; None if it must stay."""
    tokenizer = model.tokenizer
    mask, data = tokenizer.mask_id, json.loads(vocabulary)
    if mask in (begin, *model.begin) or mask != tokenizer.num_ids - 1 or not isinstance(tokenizer, Subwords):
        return None
    whole = json.loads(tokenizer.to_vocabulary())
    for one in (data, whole):
        one["added_tokens"] = [token for token in one["added_tokens"] if token["id"] != mask]
    # ours comes back by itself where it was put there because the vocabulary had none
    same = tokenizer_from_json(json.dumps(whole)).to_json() == tokenizer.to_json()
    return json.dumps(data, ensure_ascii=False) if same and tokenizer.roles is None else None


def _theirs(config: Llama, tensors: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The weights under transformers' names."""
    state = {
        f"{PREFIX}embed_tokens.weight": tensors["embed.weight"][:rows],
        f"{PREFIX}norm.weight": tensors["norm.weight"],
    }
    if not config.tied:
        state["lm_head.weight"] = tensors["output.weight"][:rows]
    for n in range(config.dims.blocks):
        for ours, (theirs, shapes) in layer_tensors(config).items():
            parts = torch.split(tensors[f"blocks.{n}.{ours}"], [shape[0] for shape in shapes])
            state |= {f"{PREFIX}layers.{n}.{name}": part for name, part in zip(theirs, parts, strict=True)}
    return {name: tensor.contiguous() for name, tensor in state.items()}
