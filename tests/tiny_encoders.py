"""Tiny pretrained encoders, one of each family, as transformers saves them: random weights, own vocabularies."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

FAMILIES = ("bert", "deberta-v2", "distilbert", "electra", "esm", "modernbert", "roberta")
TEXTS = [
    "the cat sat on the mat and the dog lay on the log",
    "a dog and a cat ran to the hat that lay on the mat",
    "she said that the sun had set and the day was done",
] * 8
RESIDUES = "LAGVSERTIDPKQNFYMHWC"
PROTEINS = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHMLEDPVDAFKLLQKAYEEL", "MSDNGPQNQRNAPRITFGGPSD"] * 8

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _SMALL),
    "deberta-v2": (
        "DebertaV2",
        _SMALL
        | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True}
        | {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "max_relative_positions": -1},
    ),
    "distilbert": (
        "DistilBert",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40},
    ),
    "electra": ("Electra", _SMALL | {"embedding_size": 16}),
    "esm": (
        "Esm",
        _SMALL | {"position_embedding_type": "rotary", "token_dropout": True, "emb_layer_norm_before": False},
    ),
    "modernbert": ("ModernBert", _SMALL | {"num_hidden_layers": 4, "local_attention": 8}),
    "roberta": ("Roberta", _SMALL),
}


def texts_of(family: str) -> list[str]:
    return PROTEINS if family == "esm" else TEXTS


@functools.cache
def _vocabulary(family: str) -> tuple[str, dict[str, str]]:
    """A tokenizer.json, and the special tokens by role."""
    if family in ("roberta", "deberta-v2"):
        spelled = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=spelled,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        roles = {"bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "sep_token": "</s>"}
        roles |= {"unk_token": "<unk>", "mask_token": "<mask>"}
    else:
        spelled = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        inner.normalizer = normalizers.BertNormalizer(lowercase=True)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=spelled, show_progress=False)
        roles = {f"{spelling[1:-1].lower()}_token": spelling for spelling in spelled}
    inner.train_from_iterator(TEXTS, trainer=trainer)
    return inner.to_str(), roles


def save_vocabulary(family: str, folder: Path) -> dict[str, int]:
    """The tokenizer's files; the ids of the special tokens by role."""
    if family == "esm":  # as it is published: a line a token, no tokenizer.json
        words = ["<cls>", "<pad>", "<eos>", "<unk>", *RESIDUES, "X", ".", "-", "<null_1>", "<mask>"]
        (folder / "vocab.txt").write_text("\n".join(words) + "\n")
        roles = {"cls_token": "<cls>", "pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        roles["mask_token"] = "<mask>"
        ids = {role: words.index(word) for role, word in roles.items()} | {"num_ids": len(words)}
    else:
        text, roles = _vocabulary(family)
        (folder / "tokenizer.json").write_text(text)
        inner = tokenizers.Tokenizer.from_str(text)
        ids = {role: inner.token_to_id(word) for role, word in roles.items()}
        ids["num_ids"] = inner.get_vocab_size() + 3  # some rows of the embedding have no word
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return ids


def save_encoder(family: str, folder: Path, **changes: Any) -> Any:
    """A folder with config.json, model.safetensors and the tokenizer; the transformers model that is in it."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    ids = save_vocabulary(family, folder)
    name, settings = _CONFIGS[family]
    settings = settings | {
        "vocab_size": ids["num_ids"],
        "pad_token_id": ids["pad_token"],
        "mask_token_id": ids["mask_token"],
    }
    if family == "modernbert":
        settings |= {"cls_token_id": ids["cls_token"], "sep_token_id": ids["sep_token"]}
        settings |= {"bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{name}Config")(**settings | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForMaskedLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that predictions differ between positions
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1) * parameter)
    model.save_pretrained(folder)
    return model
