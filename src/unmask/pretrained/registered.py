"""Our models in transformers' layout, for the classes of `unmask.hf`; reading them back gives identical weights.

config.json contains that of our model folder, as plain data under "unmask", and under "unmask_tokenizer" whatever a
standard `tokenizer.json` cannot express about our tokenizer. Tensors have our names after "network.".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.data.roles import WITH_ROLES
from unmask.data.subwords import Subwords
from unmask.data.tokenizers import Tokenizer, tokenizer_from_json
from unmask.errors import ModelFolderError, UsageError
from unmask.model import Model
from unmask.pretrained import llama
from unmask.pretrained.base import Pretrained, Source
from unmask.pretrained.plain_vocabulary import vocabulary_of
from unmask.pretrained.source import Folder as SourceFolder
from unmask.pretrained.source import open_source
from unmask.storage import model_folder
from unmask.storage.atomic import atomic_folder
from unmask.storage.model_folder import Weights
from unmask.storage.tensor_file import read_shapes, read_tensors, write_tensors
from unmask.storage.untrusted import printable
from unmask.text.prompts import spaces_lead

MODEL_TYPES = ("unmask",)
PREFIX = "network."  # prefix of our tensors' names
MASK_ROWS = "unmask.safetensors"  # beside a class of theirs: what our mask's rows hold, each [D] by its matrix's name
MASKED, CAUSAL = "UnmaskForMaskedLM", "UnmaskForCausalLM"


def architecture_of(model: Model) -> str:
    """Which of our classes computes this model's predictions; a model that predicts neither masks nor next tokens is
    refused.

    >>> architecture_of(unmask.load("stories"))  # doctest: +SKIP
    'UnmaskForMaskedLM'
    """
    process = model.process
    if process is None:
        return CAUSAL
    if process.name != "absorbing":
        raise UsageError(
            f"the model knows no masks, its process is {process.name}: transformers has no class for what it predicts"
        )
    return MASKED


def write_registered(model: Model, folder: Path) -> None:
    """Write a new folder that transformers' Auto classes can read after `import unmask.hf`.

    They are `AutoTokenizer` and `AutoModelForMaskedLM`, or `AutoModelForCausalLM` for an autoregressive model.

    >>> write_registered(unmask.load("stories"), Path("stories-hf"))  # doctest: +SKIP
    """
    config, weights = config_of(model)
    vocabulary, about = tokenizer_files(model)
    with atomic_folder(folder) as temp:
        (temp / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        (temp / "tokenizer.json").write_text(vocabulary, encoding="utf-8")
        (temp / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        write_tensors(temp / "model.safetensors", weights, {"format": "pt"})


def config_of(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of config.json, and the tensors under their exported names.

    >>> config_of(unmask.load("stories"))[0]["model_type"]  # doctest: +SKIP
    'unmask'
    """
    tokenizer = model.tokenizer
    described, weights = model_folder.described(model)
    config = {
        "model_type": MODEL_TYPES[0],
        "architectures": [architecture_of(model)],
        "dtype": "float32",
        "vocab_size": tokenizer.num_ids,
        "max_position_embeddings": model.length,
        "mask_token_id": tokenizer.mask_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eot_id,
        "pad_token_id": tokenizer.eot_id,
        "tie_word_embeddings": False,  # our network ties its own weights
        "unmask": described,
        "unmask_tokenizer": about_tokenizer(tokenizer),
    }
    plain: dict[str, Any] = json.loads(json.dumps(config))
    return plain, {PREFIX + name: tensor.detach() for name, tensor in weights.items()}


def about_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a standard `tokenizer.json` cannot express about our tokenizer.

    >>> about_tokenizer(unmask.load_tokenizer("bytes"))  # doctest: +SKIP
    {'unmask': 'bytes'}
    """
    if not isinstance(tokenizer, Subwords):
        own: dict[str, Any] = json.loads(tokenizer.to_json())
        return own
    said = json.loads(tokenizer.to_json())
    inner = said["tokenizer"] if tokenizer.roles is not None else said
    return {"roles": said.get("roles"), "post_processor": inner.get("post_processor"), "lstrip": _lstrip(inner, None)}


def _lstrip(inner: dict[str, Any], mask_id: int | None) -> list[int]:
    """The ids of special tokens that absorb the space before them; makes mask_id one of them."""
    taking = []
    for token in inner.get("added_tokens") or ():
        token["lstrip"] = bool(token["lstrip"]) or token["id"] == mask_id
        taking += [token["id"]] if token["lstrip"] else []
    return taking


def tokenizer_files(model: Model) -> tuple[str, dict[str, Any]]:
    """tokenizer.json, which adds this model's anchors to a text, and the content of its config.

    >>> tokenizer_files(unmask.load("stories"))[1]["mask_token"]  # doctest: +SKIP
    '[MASK]'
    """
    tokenizer = model.tokenizer
    inner = vocabulary_of(tokenizer)
    ids = {"mask_token": tokenizer.mask_id, "eos_token": tokenizer.eot_id, "pad_token": tokenizer.eot_id}
    ids |= {} if tokenizer.bos_id is None else {"bos_token": tokenizer.bos_id}
    about: dict[str, Any] = {}
    for role, id in ids.items():
        if (spelled := inner.id_to_token(id)) is None:
            raise UsageError(f"the vocabulary has no spelling for its {role}, the id {id}, which transformers needs")
        about[role] = spelled
    data = json.loads(inner.to_str())
    if isinstance(tokenizer, Subwords) and spaces_lead(tokenizer):
        _lstrip(data, tokenizer.mask_id)  # as in texts with gaps: the space before a mask is the word's in its place
    data["post_processor"] = frame(inner.id_to_token, model.begin, model.end)
    return json.dumps(data, ensure_ascii=False), about | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def frame(spelling: Any, begin: list[int], end: list[int]) -> dict[str, Any] | None:
    """The anchors of every row as a template of `tokenizers`. spelling: maps an id to its token.

    >>> frame({7: "<s>"}.get, [7], [])["single"][0]
    {'SpecialToken': {'id': '<s>', 'type_id': 0}}
    """
    if not begin and not end:
        return None
    names = {id: str(spelling(id)) for id in (*begin, *end)}
    first, last = ([{"SpecialToken": {"id": names[id], "type_id": 0}} for id in ids] for ids in (begin, end))
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    specials = {name: {"id": name, "ids": [id], "tokens": [name]} for id, name in names.items()}
    single = [*first, texts[0], *last]
    pair = [*single, texts[1], *last]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}


# --- back ---


def is_ours(source: Source) -> bool:
    """Whether a source holds one of our models: in transformers' layout (possibly in one of its classes), or our own
    folder.

    >>> is_ours(open_source("hf:models/bert-base-uncased"))  # doctest: +SKIP
    False
    """
    native = source.model_type in llama.MODEL_TYPES and "unmask" in source.config
    return source.model_type in MODEL_TYPES or "format_version" in source.config or native


def read_ours(name: str) -> model_folder.Folder:
    """Read our model from `hf:NAME` or `hf:DIR`; nothing in it is executed.

    >>> read_ours("hf:somebody/stories").length  # doctest: +SKIP
    """
    source = open_source(name)
    if not is_ours(source):
        kind = printable(source.model_type or "model", 40)
        raise UsageError(
            f"{source.where} is a {kind} of transformers': turn it into a model of ours with unmask import "
            f"hf:{source.where} OUT, or train on from it with --init"
        )
    return read_source(source)


def read_source(source: Source) -> model_folder.Folder:
    """Read our model from the result of `open_source`.

    >>> read_source(open_source("hf:stories-hf")).length  # doctest: +SKIP
    """
    if isinstance(source, SourceFolder) and "format_version" in source.config:
        return model_folder.read_folder(source.path, links=source.linked)
    said = f"config.json of {source.where}"
    config = model_folder.checked(source.config.get("unmask"), f"{said}, under unmask")
    tokenizer = _tokenizer(source, said)

    def weights() -> Weights:
        if source.model_type in llama.MODEL_TYPES:
            return native_weights(source, tokenizer)
        ours = {name: name.removeprefix(PREFIX) for name in source.shapes()}
        shapes = {ours[name]: tensor for name, tensor in source.shapes().items()}
        return Weights(source.where, shapes, lambda: {ours[name]: tensor for name, tensor in source.tensors.items()})

    return model_folder.read_described(config, tokenizer, weights, said)


def native_weights(source: Source, tokenizer: Tokenizer) -> Weights:
    """The weights of an export by `native.write_native`; the mask's rows, which their class cannot hold, are in our own
    file.

    >>> native_weights(open_source("stories-hf"), tokenizer).shapes["embed.weight"].shape  # doctest: +SKIP
    """
    held = llama.weights_of(source, tokenizer.num_ids)
    path = source.path / MASK_ROWS if isinstance(source, SourceFolder) else None
    if path is None or not path.exists() or tokenizer.num_ids == source.config["vocab_size"]:
        return held
    for name, row in read_shapes(path).items():
        if name not in held.shapes or row.shape != held.shapes[name].shape[1:] or row.dtype != torch.float32:
            raise ModelFolderError(f"{path}: {printable(name)} is no row of the mask of this model")

    def read() -> dict[str, Tensor]:
        state = held.read()
        for name, row in read_tensors(path).items():
            state[name] = torch.cat([state[name][:-1], row[None]])
        return state

    return Weights(held.where, held.shapes, read)


def _tokenizer(source: Source, said: str) -> Tokenizer:
    about = source.config.get("unmask_tokenizer")
    if isinstance(about, dict) and about.keys() == {"unmask"} and about["unmask"] != WITH_ROLES:
        return tokenizer_from_json(json.dumps(about))
    if not isinstance(about, dict) or about.keys() != {"roles", "post_processor", "lstrip"}:
        raise ModelFolderError(f"{said} does not say what unmask_tokenizer is; the folder is damaged")
    inner = json.loads(source.tokenizer().to_str()) | {"post_processor": about["post_processor"]}
    for token in inner["added_tokens"]:
        token["lstrip"] = isinstance(about["lstrip"], list) and token["id"] in about["lstrip"]
    if about["roles"] is None:
        return tokenizer_from_json(json.dumps(inner))
    return tokenizer_from_json(json.dumps({"unmask": WITH_ROLES, "roles": about["roles"], "tokenizer": inner}))


def read(source: Source) -> Pretrained:
    """Read it as any pretrained model: network, weights, tokenizer and window, to continue from in a recipe."""
    stored = read_source(source)
    if stored.task is not None:
        raise UsageError(
            f"{source.where} is fine-tuned for a {stored.task.kind}: a recipe goes on from what writes text"
        )
    network = stored.network
    state = model_folder.unshared(network)
    state = {name: t.detach() for name, t in state.items() if not name.startswith("objective.")}
    return Pretrained(
        denoiser=network.config,
        state=state,
        tokenizer=stored.tokenizer,
        length=stored.length,
        causal=network.causal,
    )
