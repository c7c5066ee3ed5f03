"""Tiny random models of the Llama family as others save them, and what reads them without any file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from unmask.model import Model
from unmask.objectives.ar import AR
from unmask.pretrained.base import Pretrained, Source
from unmask.storage.model_folder import load_weights

END = "<|endoftext|>"
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"), ("Ġ", "c"), ("Ġc", "at"), ("o", "n")]
ROWS = 280  # of the embedding; the vocabulary has fewer ids


def vocabulary(end: str = END) -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(a + b for a, b in MERGES)]
    inner = tokenizers.Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    return inner


class Held(Source):
    """A model in memory."""

    def __init__(self, config: dict[str, Any], tensors: Mapping[str, Tensor], words: tokenizers.Tokenizer) -> None:
        self.where, self.config, self.held, self.words = "tiny", config, dict(tensors), words

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.held

    def shapes(self) -> dict[str, Tensor]:
        return {name: t.to("meta") for name, t in self.held.items()}

    def tokenizer(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.words.to_str())

    @property
    def special(self) -> dict[str, str]:
        return {}


SMALL: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LONGER = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.2": ("llama", {"rope_parameters": LONGER, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "Llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "Llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "SmolLM2": ("llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "Qwen2.5": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Qwen3": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "Qwen3 with biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


def of_transformers(kind: str, **more: Any) -> Any:
    """A random network of that kind, all of its numbers large enough to be seen."""
    import transformers

    model_type, options = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **options, **more})
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, p in network.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3 if p.ndim == 1 else 0.15)
    return network


def held(network: Any, words: tokenizers.Tokenizer | None = None) -> Held:
    return Held(json.loads(network.config.to_json_string()), network.state_dict(), words or vocabulary())


def save(network: Any, folder: Path) -> Path:
    """As transformers writes it, with its tokenizer."""
    network.save_pretrained(folder)
    vocabulary().save(str(folder / "tokenizer.json"))
    return folder


def ours(read: Pretrained) -> Model:
    """Autoregression with these weights."""
    network = read.denoiser.build(num_ids=read.tokenizer.num_ids, mask_id=read.tokenizer.mask_id)
    read.denoiser.describe(network)
    load_weights(network, dict(read.state), "tiny")
    return Model(denoiser=network, tokenizer=read.tokenizer, objective=AR(), length=read.length)
