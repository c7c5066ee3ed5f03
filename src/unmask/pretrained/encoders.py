"""Masked language models of transformers as denoisers: config, tensor names and special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.data.roles import Roles
from unmask.data.subwords import BOSES, EOTS, MASKS, Subwords
from unmask.denoisers.encoder import Encoder
from unmask.denoisers.encoder.settings import SETTINGS
from unmask.denoisers.network import Network
from unmask.errors import ModelFolderError, UsageError
from unmask.pretrained.base import Pretrained, Source
from unmask.pretrained.renaming import FLOATS, check_rows
from unmask.storage.model_folder import NoStart, check_sizes, unshared
from unmask.storage.untrusted import printable

if TYPE_CHECKING:
    import tokenizers

MODEL_TYPES = tuple(SETTINGS)
DENOISER = "encoder"

INSIDE = "encoder."  # prefix of transformers' names in ours
# Role: the keys of a tokenizer's config that may name it, and the spellings to try otherwise.
PARTS = {
    "mask": (("mask_token",), MASKS),
    "begin": (("cls_token", "bos_token"), (*BOSES, "<cls>")),
    "end": (("sep_token", "eos_token"), EOTS),
}

# What transformers assumes where a config.json leaves a key out, if our defaults, those of published models, differ.
ABSENT: dict[str, dict[str, Any]] = {
    "esm": {"layer_norm_eps": 1e-12, "position_embedding_type": "absolute"},
    "roberta": {"layer_norm_eps": 1e-12, "pad_token_id": 1},
}


def read(source: Source) -> Pretrained:
    """The masked language model in `source`.

    >>> read(open_source("models/bert-base-uncased")).denoiser.family  # doctest: +SKIP
    'bert'
    """
    family, config = source.model_type, source.config
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise UsageError(f"{source.where} is set up as a decoder (is_decoder), which sees one side of a mask alone")
    shapes = source.shapes()
    try:
        settings = _settings(family, config, shapes)
        num_ids = _num_ids(source, shapes)
        roles = _roles(source, source.tokenizer(), num_ids)
        tokenizer = Subwords(source.tokenizer(), roles)
        denoiser = Encoder(family=family, settings=settings, fixed=roles.fixed)  # type: ignore[arg-type]
        check_sizes(denoiser, shapes, f"{source.where}/config.json", "its weights file")
        with torch.device("meta"), NoStart():
            network = denoiser.build(num_ids=num_ids, mask_id=roles.mask)
    except UsageError as e:
        raise UsageError(f"{source.where}: {e}") from None
    names = _names(source, network, shapes)
    state = State(source.tensors, names)
    return Pretrained(denoiser=denoiser, state=state, tokenizer=tokenizer, length=denoiser.positions)


class State(Mapping[str, Tensor]):
    """The tensors of a source under our names, in float32, each read when requested."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]].float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# --- the config -------------------------------------------------------------------------------------------------------


def _settings(family: str, config: Mapping[str, Any], shapes: Mapping[str, Tensor]) -> dict[str, Any]:
    given = {name: config[name] for name in SETTINGS[family] if config.get(name) is not None}
    given = {name: value for name, value in ABSENT.get(family, {}).items() if name not in config} | given
    if family == "modernbert":
        return given | _modernbert(config)
    if config.get("position_embedding_type", "absolute") != "absolute" and family != "esm":
        raise UsageError(
            f"its positions are {printable(config['position_embedding_type'])!r}, not absolute: unknown here"
        )
    if family == "deberta-v2":
        kinds = given.get("pos_att_type", [])
        if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
            given["pos_att_type"] = "|".join(kinds)
        given["legacy"] = "lm_predictions.lm_head.bias" not in shapes  # missing in the authors' own checkpoints
    if family == "esm":
        if config.get("is_folding_model"):
            raise UsageError("it folds proteins (is_folding_model): use the masked language model that it is built on")
        given["mask_embedding"] = not config.get("token_dropout", False)
        rope = config.get("rope_parameters")
        if isinstance(rope, dict):
            given["rope_theta"] = rope.get("rope_theta", 10000.0)
    return given


def _modernbert(config: Mapping[str, Any]) -> dict[str, Any]:
    """How often a layer attends globally, and the rotary bases, in the current or the previous notation."""
    given: dict[str, Any] = {}
    layers, every = config.get("layer_types"), config.get("global_attn_every_n_layers", 3)
    if isinstance(layers, list):
        whole = [i for i, kind in enumerate(layers) if kind == "full_attention"]
        every = whole[1] if len(whole) > 1 else max(1, len(layers))
        if layers != ["full_attention" if i % every == 0 else "sliding_attention" for i in range(len(layers))]:
            raise UsageError("its layers see everything in no regular order (layer_types): unknown here")
    given["global_attn_every_n_layers"] = every
    rope = config.get("rope_parameters") or {}
    for name, kind in (("global", "full_attention"), ("local", "sliding_attention")):
        part = rope.get(kind, {}) if isinstance(rope, dict) else {}
        if not isinstance(part, dict) or part.get("rope_type", "default") != "default":
            raise UsageError("its rotary positions are stretched (rope_type): unknown here")
        theta = part.get("rope_theta", config.get(f"{name}_rope_theta"))
        given |= {} if theta is None else {f"{name}_rope_theta": theta}
    return given


def _num_ids(source: Source, shapes: Mapping[str, Tensor]) -> int:
    num_ids = source.config.get("vocab_size")
    if type(num_ids) is not int or num_ids < 2:
        raise ModelFolderError(f"{source.where}: config.json says no vocab_size")
    check_rows(source, shapes, num_ids)
    return num_ids


# --- the special tokens -----------------------------------------------------------------------------------------------


def _roles(source: Source, inner: tokenizers.Tokenizer, num_ids: int) -> Roles:
    """Mask, begin and end; all tokens that the tokenizer marks as special, and ids without a token, are fixed."""
    vocab = inner.get_vocab(with_added_tokens=True)
    ids = {part: _id_of(source.special, vocab, *known) for part, known in PARTS.items()}
    if ids["mask"] is None:
        raise UsageError(
            "its vocabulary has no mask token (mask_token in tokenizer_config.json): it was trained for something else"
        )
    for part, missing in (("begin", "cls_token"), ("end", "sep_token")):
        if ids[part] is None:
            raise UsageError(f"its vocabulary has no token that rows {part} with ({missing} in tokenizer_config.json)")
    most = max(vocab.values())
    special = {id for id, token in inner.get_added_tokens_decoder().items() if token.special}
    special |= {vocab[text] for text in source.special.values() if text in vocab}
    special |= set(range(num_ids)) - set(vocab.values()) if most < num_ids else set()
    fixed = tuple(sorted((special | {ids["begin"], ids["end"]}) - {ids["mask"]}))
    roles = Roles(mask=ids["mask"], end=ids["end"], begin=ids["begin"], num_ids=num_ids, fixed=fixed)
    try:
        roles.check(most)
    except ModelFolderError as e:
        raise UsageError(str(e)) from None
    return roles


def _id_of(special: Mapping[str, str], vocab: Mapping[str, int], keys: Iterable[str], known: Iterable[str]) -> Any:
    said = [special[key] for key in keys if key in special]
    return next((vocab[text] for text in (said or known) if text in vocab), None)


# --- the tensors ------------------------------------------------------------------------------------------------------


def _names(source: Source, network: Network, shapes: Mapping[str, Tensor]) -> dict[str, str]:
    """Ours → theirs. Tensors used only by other tasks (poolers, next sentences, contacts) are ignored."""
    names: dict[str, str] = {}
    wanted, optional = unshared(network), network.begins_anew()
    for ours in wanted:
        plain = ours.removeprefix(INSIDE)
        theirs = next((name for name in _spellings(plain) if name in shapes), None)
        if theirs is None and ours in optional:
            continue
        if theirs is None:
            raise ModelFolderError(_missing(source, plain, shapes))
        if shapes[theirs].shape != wanted[ours].shape:
            raise ModelFolderError(
                f"{source.where}: {theirs} has shape {tuple(shapes[theirs].shape)}, config.json asks for "
                f"{tuple(wanted[ours].shape)}"
            )
        if shapes[theirs].dtype not in FLOATS:
            raise ModelFolderError(f"{source.where}: {theirs} holds {shapes[theirs].dtype}, no floating-point numbers")
        names[ours] = theirs
    return names


def _spellings(name: str) -> list[str]:
    """The possible names of a tensor: norms have an older one, the decoder's bias has two, rotary tables one
    per layer."""
    found = [name]
    if "norm" in name.lower():
        found += [name.replace(".weight", ".gamma"), name.replace(".bias", ".beta")]
    if name.endswith(("predictions.bias", "lm_head.bias")):
        found += [name.removesuffix("bias") + "decoder.bias"]
    if name == "esm.rotary_embeddings.inv_freq":
        found += ["esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq"]
    return found


def _missing(source: Source, name: str, shapes: Mapping[str, Tensor]) -> str:
    trunk = any("embeddings" in known for known in shapes)
    if trunk and "embeddings" not in name and "layer" not in name.replace("layer_norm", ""):
        return (
            f"{source.where} holds an encoder without the head that predicts tokens ({name} is missing): take the "
            "checkpoint of the masked language model, of ELECTRA the generator"
        )
    return f"{source.where}: the tensor {name} is missing; the weights and config.json do not belong together"
