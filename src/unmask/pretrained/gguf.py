"""GGUF files of the Llama family, read with the package `gguf` and presented under transformers' names."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.errors import MissingExtraError, ModelFolderError, UnmaskError, UsageError
from unmask.pretrained.base import Source
from unmask.pretrained.sentencepiece import BPE, BYTE, Piece, SpmFile, vocabulary_of
from unmask.storage.untrusted import check_plain, printable

if TYPE_CHECKING:
    import tokenizers

ARCHITECTURES = ("llama", "qwen2", "qwen3")

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONFIG = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "attention.sliding_window": "sliding_window",
}
CONTROL, UNKNOWN, UNUSED, USER = 3, 2, 5, 4  # token types


def open_gguf(path: Path) -> Source:
    """The model of a GGUF file.

    >>> open_gguf(Path("nowhere.gguf"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.gguf is missing
    """
    check_plain(path)
    return GGUF(path)


class GGUF(Source):
    """A file in the GGUF format. Quantised tensors are converted to float32."""

    def __init__(self, path: Path) -> None:
        try:
            self._gguf: Any = importlib.import_module("gguf")
            current = hasattr(importlib.import_module("gguf.gguf_reader").ReaderField, "contents")
        except ImportError:
            raise MissingExtraError("gguf", "eval", f"to read {path}, unmask") from None
        if not current:
            raise UsageError(f"the package gguf is too old to read {path}: pip install 'gguf>=0.17'")
        self.where = str(path)
        with self._guard():
            self._reader = self._gguf.GGUFReader(path)
            self._tensors = {str(t.name): t for t in self._reader.tensors}
            if len(self._tensors) < len(self._reader.tensors):
                raise ModelFolderError(f"{path} holds two tensors of one name; it is damaged")
            self._names = self._renamed()
            self.config = self._config()

    # --- metadata ---

    def _field(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    @property
    def _architecture(self) -> str:
        said = self._field("general.architecture")
        if said not in ARCHITECTURES:
            raise UsageError(
                f"{self.where} holds the architecture {printable(said)!r}; {', '.join(ARCHITECTURES)} can be read"
            )
        return str(said)

    def _config(self) -> dict[str, Any]:
        kind = self._architecture
        config: dict[str, Any] = {"model_type": kind, "hidden_act": "silu"}
        for theirs, ours in CONFIG.items():
            if (value := self._field(f"{kind}.{theirs}")) is not None:
                config[ours] = value
        if (scaling := self._field(f"{kind}.rope.scaling.type")) not in (None, "none"):
            factor = self._field(f"{kind}.rope.scaling.factor")
            config["rope_scaling"] = {"rope_type": scaling, "factor": factor}
        if "rope_freqs.weight" in self._tensors:
            raise UsageError(
                f"{self.where} scales its rotary positions by a tensor, rope_freqs.weight, which is not read: take the "
                "model's safetensors"
            )
        config["vocab_size"] = self._shape("token_embd.weight")[0] if "token_embd.weight" in self._tensors else 0
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        for role in ("bos", "eos"):
            config[f"{role}_token_id"] = self._field(f"tokenizer.ggml.{role}_token_id")
        turned = self._field(f"{kind}.rope.dimension_count")
        head_dim = config.get("head_dim") or config.get("hidden_size", 0) // max(
            1, config.get("num_attention_heads", 1)
        )
        if turned not in (None, head_dim):
            config["partial_rotary_factor"] = turned / head_dim if head_dim else 0.0
        return config

    @property
    def special(self) -> dict[str, str]:
        tokens, said = self._field("tokenizer.ggml.tokens") or [], {}
        for role in ("bos", "eos", "padding", "unknown"):
            id = self._field(f"tokenizer.ggml.{role}_token_id")
            if isinstance(id, int) and 0 <= id < len(tokens):
                said[{"padding": "pad", "unknown": "unk"}.get(role, role) + "_token"] = str(tokens[id])
        return said

    # --- tensors ---

    def _renamed(self) -> dict[str, str]:
        """transformers' name of each tensor → the file's. A tensor without such a name keeps its own."""
        names = {}
        for name in self._tensors:
            head, _, rest = name.partition(".")
            number, _, inner = rest.partition(".")
            part, _, kind = inner.rpartition(".")
            if head == "blk" and part in LAYER:
                names[f"model.layers.{number}.{LAYER[part]}.{kind}"] = name
            else:
                names[TOP.get(name, name)] = name
        return names

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))  # the file lists the fastest axis first

    def shapes(self) -> dict[str, Tensor]:
        return {name: torch.empty(self._shape(own), device="meta") for name, own in self._names.items()}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return _Tensors(self)

    def read(self, name: str) -> Tensor:
        """One tensor by its name in transformers, in float32."""
        own = self._names[name]
        with self._guard():
            held = self._tensors[own]
            numbers = self._gguf.quants.dequantize(held.data, held.tensor_type)
            tensor = torch.from_numpy(numbers.copy()).to(torch.float32).reshape(self._shape(own))
        if self._architecture == "llama" and ".self_attn.q_proj." in name:
            return unpermuted(tensor, self.config["num_attention_heads"])
        if self._architecture == "llama" and ".self_attn.k_proj." in name:
            return unpermuted(tensor, self.config.get("num_key_value_heads") or self.config["num_attention_heads"])
        return tensor

    def names(self) -> Mapping[str, str]:
        return self._names

    # --- its vocabulary ---

    def tokenizer(self) -> tokenizers.Tokenizer:
        kind, pre = self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre") or "gpt-2"
        if kind == "llama":
            return self._sentence_pieces()
        if kind != "gpt2" or pre not in SPLITS:
            what = f"of the kind {printable(kind)!r}" if kind != "gpt2" else f"split as {printable(pre)!r}"
            raise UsageError(
                f"{self.where} has a vocabulary {what}; byte-level BPE split as {', '.join(sorted(SPLITS))} can be read"
            )
        with self._guard():
            tokens, merges = self._field("tokenizer.ggml.tokens"), self._field("tokenizer.ggml.merges") or []
            types = self._field("tokenizer.ggml.token_type") or [1] * len(tokens)
            return byte_level_bpe(list(map(str, tokens)), list(map(str, merges)), list(types), pre)

    def _sentence_pieces(self) -> tokenizers.Tokenizer:
        """SentencePiece's BPE, as Llama 2 has it."""
        with self._guard():
            tokens, scores, types = (
                self._field(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type")
            )
            if scores is None or types is None or not len(tokens) == len(scores) == len(types):
                raise UsageError(
                    f"{self.where} has a vocabulary of the kind 'llama' without scores and types of its pieces"
                )
            pieces = [Piece(str(t), float(s), int(k)) for t, s, k in zip(tokens, scores, types, strict=True)]
            said = SpmFile(pieces, algorithm=BPE, byte_fallback=any(piece.kind == BYTE for piece in pieces))
            said.space_first = self._field("tokenizer.ggml.add_space_prefix") is not False
            said.one_space = self._field("tokenizer.ggml.remove_extra_whitespaces") is True
        try:
            return vocabulary_of(said)
        except ModelFolderError as e:
            raise ModelFolderError(f"{self.where}: {e}") from None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """The reader raises many kinds of exceptions for damaged files; all are reported alike."""
        try:
            yield
        except (UnmaskError, MemoryError):
            raise
        except Exception as e:
            reason = printable(str(e) or type(e).__name__, 120)
            raise ModelFolderError(f"{self.where} is damaged or no GGUF file: {reason}") from None


class _Tensors(Mapping[str, Tensor]):
    def __init__(self, source: GGUF) -> None:
        self._source = source

    def __getitem__(self, name: str) -> Tensor:
        return self._source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.names())

    def __len__(self) -> int:
        return len(self._source.names())


def unpermuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in transformers' order.

    GGUF files of this architecture store the two components that rotate together next to each other, transformers half
    a head apart.

    >>> unpermuted(torch.arange(4), heads=1)
    tensor([0, 2, 1, 3])
    """
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


# How each kind of vocabulary splits a text before its merges, as published with these tokenizers.
_LLAMA_3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "default": None,
    "smollm": "digits",
    "llama-bpe": _LLAMA_3,
    "qwen2": _QWEN_2,
}


def byte_level_bpe(tokens: list[str], merges: list[str], types: list[int], pre: str) -> tokenizers.Tokenizer:
    """GPT-2's kind of vocabulary: each token is spelled with one character per byte.

    >>> byte_level_bpe(["<|endoftext|>", "a", "b", "ab"], ["a b"], [3, 1, 1, 1], "gpt-2").encode("ab").ids
    [3]
    """
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

    split = SPLITS[pre]
    if len(set(tokens)) < len(tokens):
        raise ModelFolderError("the vocabulary spells two tokens alike")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelFolderError("a merge of the vocabulary is not of two tokens")
    vocab = {token: id for id, token in enumerate(tokens)}
    data = {"type": "BPE", "vocab": vocab, "merges": pairs, "ignore_merges": pre == "llama-bpe"}
    empty = tokenizers.Tokenizer(models.BPE())
    inner = tokenizers.Tokenizer.from_str(json.dumps(json.loads(empty.to_str()) | {"model": data}))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split == "digits" else []
    if split not in (None, "digits"):
        steps.append(pre_tokenizers.Split(Regex(split or ""), behavior="isolated"))
    own = bool(split) and split != "digits"  # its own expression replaces GPT-2's
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not own))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    for kinds, special in (((CONTROL, UNKNOWN, UNUSED), True), ((USER,), False)):
        words = [word for word, type in zip(tokens, types, strict=True) if type in kinds]
        added = [AddedToken(word, special=special, normalized=False) for word in words]
        (inner.add_special_tokens if special else inner.add_tokens)(added)
    return inner
