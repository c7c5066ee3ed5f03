"""Export of our models to transformers' layout: as one of its own architectures if possible, otherwise as
`unmask.hf`'s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from unmask.data.subwords import Subwords
from unmask.denoisers.encoder import Encoder, EncoderNetwork
from unmask.denoisers.encoder.heads import FAMILIES, config_of
from unmask.errors import UsageError
from unmask.model import Model
from unmask.pretrained.encoders import INSIDE
from unmask.pretrained.native import native_of, write_native
from unmask.pretrained.registered import architecture_of, write_registered
from unmask.storage.atomic import atomic_folder
from unmask.storage.model_folder import unshared
from unmask.storage.tensor_file import write_tensors


def write_transformers(model: Model, folder: Path) -> str:
    """Write config.json, model.safetensors and the tokenizer's files, so that transformers' classes can load them.

    `folder` must be new or empty. An encoder is exported as a plain masked language model: such a folder does not
    record its training, its noise or which tokens it never predicts. Autoregression in a `llama` is exported as one of
    transformers' own causal models (`native`). All others use the classes that `import unmask.hf` registers. The
    folders of the last two are complete. Returns a sentence with the class and anything else that users must know.

    >>> write_transformers(unmask.load("runs/bert"), Path("bert-mdlm"))  # doctest: +SKIP
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; give the name of a new folder")
    network, tokenizer = model.denoiser, model.tokenizer
    if not isinstance(network, EncoderNetwork) or not isinstance(tokenizer, Subwords):
        return _of_ours(model, folder)
    if network.objective is not None:
        raise UsageError("the model's objective has parameters of its own, which a transformers folder cannot hold")
    described, weights = network.saved(unshared(network))
    assert isinstance(described, Encoder)
    ids = {"num_ids": network.num_ids, "mask_id": network.mask_id}
    config = config_of(described.family, described.all_settings, **ids, dropout=described.dropout).to_dict()
    config |= {"architectures": [FAMILIES[described.family].model], "dtype": "float32"}
    vocabulary, about = _tokenizer(tokenizer, described)
    about["model_max_length"] = described.positions
    with atomic_folder(folder) as temp:
        (temp / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        (temp / "tokenizer.json").write_text(vocabulary, encoding="utf-8")
        (temp / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        write_tensors(temp / "model.safetensors", _tensors(described, weights, network.mask_id), {"format": "pt"})
    return f"{FAMILIES[described.family].model}, which says nothing of noise, objective or fixed tokens"


def _of_ours(model: Model, folder: Path) -> str:
    native = native_of(model)
    if native.model_type:
        return write_native(model, folder)
    write_registered(model, folder)
    why = f": {native.why}" if model.process is None else ""
    return f"{architecture_of(model)}, a class of ours that import unmask.hf registers{why}"


def _tensors(described: Encoder, weights: dict[str, Tensor], mask_id: int) -> dict[str, Tensor]:
    """The weights under transformers' names, and the other tensors that it expects."""
    tensors = {name.removeprefix(INSIDE): t.detach() for name, t in weights.items()}
    if described.family != "esm":
        return tensors
    settings = described.all_settings
    if not settings["mask_embedding"]:  # there, masks contribute nothing only if their embedding is zero
        name = "esm.embeddings.word_embeddings.weight"
        tensors[name] = tensors[name].clone()
        tensors[name][mask_id] = 0
    maps = settings["num_hidden_layers"] * settings["num_attention_heads"]
    unused = {"weight": torch.zeros(1, maps), "bias": torch.zeros(1)}
    return tensors | {f"esm.contact_head.regression.{name}": t for name, t in unused.items()}


def _tokenizer(tokenizer: Subwords, described: Encoder) -> tuple[str, dict[str, Any]]:
    """tokenizer.json, which adds the anchors to each text, and the content of its config."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_vocabulary())
    ids = {"mask_token": tokenizer.mask_id, "cls_token": tokenizer.bos_id, "sep_token": tokenizer.eot_id}
    ids["pad_token"] = described.all_settings["pad_token_id"]
    about: dict[str, Any] = {role: inner.id_to_token(id) for role, id in ids.items() if id is not None}
    if unknown := json.loads(inner.to_str())["model"].get("unk_token"):
        about["unk_token"] = unknown
    begin, end = about["cls_token"], about["sep_token"]
    if inner.post_processor is None:
        inner.post_processor = TemplateProcessing(
            single=f"{begin} $A {end}",
            pair=f"{begin} $A {end} $B:1 {end}:1",
            special_tokens=[(begin, tokenizer.bos_id), (end, tokenizer.eot_id)],
        )
    return inner.to_str(), about | {"tokenizer_class": "PreTrainedTokenizerFast"}
