"""Where each family keeps its parts: the trunk, what turns its vectors into the decoder's, the decoder, the layers.

transformers has one class a family for a masked language model; each names these parts otherwise.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from unmask.errors import MissingExtraError, UsageError


class Parts(NamedTuple):
    """trunk(...).last_hidden_state → transform → weight, bias."""

    trunk: nn.Module
    transform: Callable[[Tensor], Tensor]
    weight: nn.Parameter
    bias: nn.Parameter | None
    layers: list[nn.Module]


class Family(NamedTuple):
    """config, model: the classes' names in transformers. dropouts: the config's keys of them. stacked: endings of the
    names of matrices that hold several maps, and how many. types: whether it takes token types. pairs: whether its
    tokenizer gives the second text of a pair a type of its own."""

    config: str
    model: str
    dropouts: tuple[str, ...]
    stacked: Mapping[str, int] = {}
    types: bool = False
    pairs: bool = False


_TWO = ("hidden_dropout_prob", "attention_probs_dropout_prob")
FAMILIES: dict[str, Family] = {
    "bert": Family("BertConfig", "BertForMaskedLM", _TWO, types=True, pairs=True),
    "deberta-v2": Family("DebertaV2Config", "DebertaV2ForMaskedLM", _TWO, types=True, pairs=True),
    "distilbert": Family("DistilBertConfig", "DistilBertForMaskedLM", ("dropout", "attention_dropout")),
    "electra": Family("ElectraConfig", "ElectraForMaskedLM", _TWO, types=True, pairs=True),
    "esm": Family("EsmConfig", "EsmForMaskedLM", _TWO),
    "modernbert": Family(
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        ("attention_dropout", "embedding_dropout", "mlp_dropout"),
        stacked={"Wqkv.weight": 3, "Wi.weight": 2},
    ),
    "roberta": Family("RobertaConfig", "RobertaForMaskedLM", _TWO, types=True),
}


def transformers() -> Any:
    """The package, or the extra that has it."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise MissingExtraError("transformers", "hf", "a pretrained encoder") from None


def config_of(family: str, settings: Mapping[str, Any], *, num_ids: int, mask_id: int, dropout: float) -> Any:
    """The transformers config that these settings mean."""
    kind = FAMILIES[family]
    values = {name: value for name, value in settings.items() if value is not None and name != "mask_embedding"}
    values |= dict.fromkeys(kind.dropouts, dropout)
    values |= {"vocab_size": num_ids, "pad_token_id": settings["pad_token_id"]}
    values |= {"bos_token_id": None, "eos_token_id": None}  # of generation, of which it knows nothing
    if family == "esm":
        # token_dropout would scale what is visible by how many masks there are: see `hide_masks` for its other half.
        values |= {"mask_token_id": mask_id, "token_dropout": False}
    if family == "modernbert":
        # Its other names of begin and end are defaults beyond a small vocabulary.
        values |= {"cls_token_id": None, "sep_token_id": None}
    if family == "deberta-v2":
        values["pos_att_type"] = [one for one in values["pos_att_type"].split("|") if one]
        if not settings["relative_attention"]:
            del values["position_buckets"]
    package = transformers()
    try:
        return getattr(package, kind.config)(**values)
    except (TypeError, ValueError, KeyError) as e:  # what its own checks say
        reason = " ".join(str(e).split())[:200]
        raise UsageError(f"transformers makes no {family} of these settings: {reason}") from None


def make_model(family: str, config: Any) -> Any:
    """The network, freshly started, in float32, without a word of transformers' about it."""
    model = getattr(transformers(), FAMILIES[family].model)(config)
    if family == "esm":
        del model.esm.contact_head  # reads attention maps, of which a masked language model has no use
    return model


def hide_masks(model: Any, mask_id: int) -> None:
    """Masks of ESM read as nothing, whatever their embedding is. An embedding of zeros would do the same until it is
    trained: under the norm that reads it, its gradient is hundreds of times everything else's."""
    model.esm.embeddings.word_embeddings.register_forward_hook(partial(_hidden, mask_id))


def _hidden(mask_id: int, module: nn.Module, inputs: tuple[Tensor], e_BLD: Tensor) -> Tensor:
    return e_BLD.masked_fill((inputs[0] == mask_id).unsqueeze(-1), 0.0)


def parts_of(family: str, model: Any) -> Parts:
    if family == "bert":
        head = model.cls.predictions
        return _parts(model.bert, head.transform, head.decoder, layers=model.bert.encoder.layer)
    if family == "electra":
        trunk = model.electra
        return _parts(trunk, model.generator_predictions, model.generator_lm_head, layers=trunk.encoder.layer)
    if family == "modernbert":
        return _parts(model.model, model.head, model.decoder, layers=model.model.layers)
    if family == "distilbert":

        def projected(h: Tensor) -> Tensor:
            return cast(Tensor, model.vocab_layer_norm(model.activation(model.vocab_transform(h))))

        layers = model.distilbert.transformer.layer
        return _parts(model.distilbert, projected, model.vocab_projector, layers=layers)
    if family == "deberta-v2":
        trunk = model.deberta
        if model.legacy:
            return _parts(trunk, model.cls.predictions.transform, model.cls.predictions.decoder, trunk.encoder.layer)
        newer = model.lm_predictions.lm_head

        def transformed(h: Tensor) -> Tensor:
            return cast(Tensor, newer.LayerNorm(newer.transform_act_fn(newer.dense(h))))

        weight = trunk.embeddings.word_embeddings.weight
        return Parts(trunk, transformed, weight, newer.bias, list(trunk.encoder.layer))
    trunk, head = (model.esm if family == "esm" else model.roberta), model.lm_head

    def normed(h: Tensor) -> Tensor:
        return cast(Tensor, head.layer_norm(nn.functional.gelu(head.dense(h))))

    return Parts(trunk, normed, head.decoder.weight, head.bias, list(trunk.encoder.layer))


def _parts(trunk: Any, transform: Any, decoder: Any, layers: Any) -> Parts:
    return Parts(trunk, transform, decoder.weight, decoder.bias, list(layers))
