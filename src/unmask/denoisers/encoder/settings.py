"""What is needed of a transformers config to build an encoder, family by family: names, kinds, limits, defaults.

The names are transformers' own, so that one who knows a config.json knows these. Dropouts, which are the recipe's, and
what says nothing of a masked language model (labels, poolers, generation) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from unmask.errors import Public, UsageError, did_you_mean
from unmask.reader import Word, from_dict

MOST = 1 << 22  # of any size; a model folder's are held to the tensors there besides
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_python", "gelu_fast", "relu", "silu", "swish", "tanh")

FamilyName = Literal["bert", "deberta-v2", "distilbert", "electra", "esm", "modernbert", "roberta"]


class Setting(NamedTuple):
    """kind: int, float, bool, or the words among which one is chosen. A default of None: it may be left unset."""

    kind: Any
    default: Any
    least: float = 0
    most: float = MOST

    def read(self, name: str, value: Any) -> Any:
        """The value, or a sentence."""
        if value is None and self.default is None:
            return None
        if isinstance(value, Word) and self.kind in (int, float, bool):
            value = from_dict(self.kind, value, f"settings.{name}")
        if isinstance(self.kind, tuple):
            if isinstance(value, str) and str(value) in self.kind:
                return str(value)
            hint = Public(did_you_mean(str(value)[:40], self.kind))
            raise UsageError("settings.{name} is {value}; {hint}", name=Public(name), value=_said(value), hint=hint)
        right = isinstance(value, bool) if self.kind is bool else isinstance(value, int | float)
        if self.kind is int:
            right = type(value) is int
        if not right or (self.kind is not bool and (isinstance(value, bool) or not self.least <= value <= self.most)):
            raise UsageError(
                "settings.{name} must be {kind}, got {value}",
                name=Public(name),
                kind=Public(self.wanted),
                value=_said(value),
            )
        return float(value) if self.kind is float else value

    @property
    def wanted(self) -> str:
        if self.kind is bool:
            return "true or false"
        return f"{'a whole number' if self.kind is int else 'a number'} from {self.least:g} to {self.most:g}"


def _said(value: object) -> str:
    """The beginning of a stranger's value; `repr` spells out control characters."""
    return repr(value)[:80]


def _size(default: int) -> Setting:
    return Setting(int, default, 1)


def _transformer(hidden: int, blocks: int, heads: int, inner: int, positions: int, eps: float) -> dict[str, Setting]:
    return {
        "hidden_size": _size(hidden),
        "num_hidden_layers": _size(blocks),
        "num_attention_heads": _size(heads),
        "intermediate_size": _size(inner),
        "hidden_act": Setting(ACTIVATIONS, "gelu"),
        "max_position_embeddings": _size(positions),
        "layer_norm_eps": Setting(float, eps, 0, 1),
        "initializer_range": Setting(float, 0.02, 0, 1),
        "pad_token_id": Setting(int, None),
        "tie_word_embeddings": Setting(bool, True),
    }


_TYPES = {"type_vocab_size": _size(2)}
_BERT = _transformer(768, 12, 12, 3072, 512, 1e-12) | _TYPES
_DISTILBERT = {
    "dim": _size(768),
    "n_layers": _size(6),
    "n_heads": _size(12),
    "hidden_dim": _size(3072),
    "activation": Setting(ACTIVATIONS, "gelu"),
    "max_position_embeddings": _size(512),
    "sinusoidal_pos_embds": Setting(bool, False),
    "initializer_range": Setting(float, 0.02, 0, 1),
    "pad_token_id": Setting(int, None),
    "tie_word_embeddings": Setting(bool, True),
}
_DEBERTA = _transformer(768, 12, 12, 3072, 512, 1e-7) | {
    "type_vocab_size": Setting(int, 0),
    "relative_attention": Setting(bool, False),
    "max_relative_positions": Setting(int, -1, -1),
    "position_buckets": Setting(int, -1, -1),
    "position_biased_input": Setting(bool, True),
    "pos_att_type": Setting(("", "c2p", "p2c", "c2p|p2c", "p2c|c2p"), ""),
    "share_att_key": Setting(bool, False),
    "norm_rel_ebd": Setting(("none", "layer_norm"), "none"),
    "conv_kernel_size": Setting(int, 0),
    "conv_groups": _size(1),
    "conv_act": Setting(ACTIVATIONS, "tanh"),
    "attention_head_size": Setting(int, None, 1),
    "embedding_size": Setting(int, None, 1),
    "legacy": Setting(bool, True),
}
_ESM = _transformer(320, 6, 20, 1280, 1026, 1e-5) | {
    "position_embedding_type": Setting(("absolute", "rotary"), "rotary"),
    "emb_layer_norm_before": Setting(bool, False),
    "rope_theta": Setting(float, 10000.0, 1, 1e12),
    "mask_embedding": Setting(bool, True),  # false: masks read as nothing, as where it was trained with token_dropout
}
del _ESM["hidden_act"]  # written into its layers
_MODERNBERT = {
    "hidden_size": _size(768),
    "num_hidden_layers": _size(22),
    "num_attention_heads": _size(12),
    "intermediate_size": _size(1152),
    "hidden_activation": Setting(ACTIVATIONS, "gelu"),
    "classifier_activation": Setting(ACTIVATIONS, "gelu"),
    "max_position_embeddings": _size(8192),
    "norm_eps": Setting(float, 1e-5, 0, 1),
    "norm_bias": Setting(bool, False),
    "attention_bias": Setting(bool, False),
    "mlp_bias": Setting(bool, False),
    "classifier_bias": Setting(bool, False),
    "decoder_bias": Setting(bool, True),
    "global_attn_every_n_layers": _size(3),
    "local_attention": _size(128),
    "global_rope_theta": Setting(float, 160000.0, 1, 1e12),
    "local_rope_theta": Setting(float, 10000.0, 1, 1e12),
    "initializer_range": Setting(float, 0.02, 0, 1),
    "initializer_cutoff_factor": Setting(float, 2.0, 1, 100),
    "pad_token_id": Setting(int, None),
    "tie_word_embeddings": Setting(bool, True),
}

SETTINGS: dict[str, dict[str, Setting]] = {
    "bert": _BERT,
    "deberta-v2": _DEBERTA,
    "distilbert": _DISTILBERT,
    "electra": _transformer(256, 12, 4, 1024, 512, 1e-12) | _TYPES | {"embedding_size": _size(128)},
    "esm": _ESM,
    "modernbert": _MODERNBERT,
    "roberta": _transformer(768, 12, 12, 3072, 514, 1e-5) | _TYPES,
}


def read_settings(family: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a family: those given, checked, and the defaults of the others.

    >>> read_settings("bert", {"hidden_size": 64, "num_attention_heads": 4})["intermediate_size"]
    3072
    """
    known = SETTINGS[family]
    for name in given:
        if name not in known:
            hint = Public(did_you_mean(str(name)[:40], known))
            raise UsageError("settings.{name} is unknown; {hint}", name=str(name)[:40], hint=hint)
    settings = {name: setting.read(name, given.get(name, setting.default)) for name, setting in known.items()}
    width: int = settings["dim" if family == "distilbert" else "hidden_size"]
    heads: int = settings["n_heads" if family == "distilbert" else "num_attention_heads"]
    rotary = family == "modernbert" or settings.get("position_embedding_type") == "rotary"
    if width % heads or (rotary and (width // heads) % 2):
        raise UsageError(
            "settings: a width of {width} is no multiple of {heads} heads{rotary}",
            width=Public(width),
            heads=Public(heads),
            rotary=Public(" of an even width each" if rotary else ""),
        )
    if num_positions(family, settings) < 2:
        raise UsageError("settings.max_position_embeddings leaves no room for a text: give more")
    return settings


def first_position(family: str, settings: Mapping[str, Any]) -> int:
    """The number of the first token's position: RoBERTa and ESM count from after the padding's id."""
    pad = settings["pad_token_id"]
    return pad + 1 if family in ("roberta", "esm") and pad is not None else 0


def num_positions(family: str, settings: Mapping[str, Any]) -> int:
    """The longest row that the encoder can read.

    >>> num_positions("roberta", {"max_position_embeddings": 514, "pad_token_id": 1})
    512
    """
    return int(settings["max_position_embeddings"]) - first_position(family, settings)
