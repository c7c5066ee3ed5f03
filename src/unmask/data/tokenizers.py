"""Text ↔ ids. Every vocabulary has one mask id, which no text can produce, and one end-of-text id."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.corpora import Corpus
from unmask.data.roles import WITH_ROLES
from unmask.errors import DataError, MissingExtraError, ModelFolderError, Public, UsageError, did_you_mean
from unmask.storage.untrusted import parse_json, read_text

MASK_TEXT = "[MASK]"  # how a mask is displayed, whatever its spelling in the vocabulary
EOT_TEXT = "<|endoftext|>"

Span = tuple[NDArray[np.int64], NDArray[np.int64]]
"""A text's ids, and for each the UTF-8 bytes of the text up to and with it."""


class Tokenizer(ABC):
    """Text ↔ ids.

    >>> tokenizer = load_tokenizer("bytes")
    >>> tokenizer.encode("hi"), tokenizer.eot_id, tokenizer.mask_id, tokenizer.num_ids
    ([104, 105], 256, 257, 258)
    >>> tokenizer.decode([104, 257])
    'h[MASK]'
    """

    num_ids: int  # number of logits, including the mask
    mask_id: int
    eot_id: int  # after every document
    bos_id: int | None = None  # before a sentence, if the vocabulary has such an id
    # Ids that may occur in a row and are never noised, scored or generated, such as [CLS], [SEP] and [UNK] of an
    # encoder.
    fixed_ids: tuple[int, ...] = ()

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of the text alone: nothing is added, and special tokens spelled out in the text are ordinary
        characters."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; masks appear as `[MASK]`, other special tokens in their own spelling."""

    @abstractmethod
    def token_text(self, id: int) -> str:
        """One id for display."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of a model folder's `tokenizer.json`, which `tokenizer_from_json` reads back."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def encode_spans(self, texts: Sequence[str]) -> list[Span]:
        """The ids of many texts as arrays, with the number of text bytes covered by each prefix of the ids.

        >>> [ends.tolist() for ids, ends in load_tokenizer("bytes").encode_spans(["hé"])]
        [[1, 2, 3]]
        """

    def spellings(self) -> tuple[list[bytes | None], list[bytes | None]]:
        """The bytes that each id adds to a text: as its first token, and after another one (None: it adds no bytes).

        >>> first, inside = load_tokenizer("bytes").spellings()
        >>> first[104], inside[257]
        (b'h', None)
        """
        raise UsageError(
            "the tokenizer {tokenizer} does not tell how its ids are spelled: no constraints",
            tokenizer=Public(type(self).__name__),
        )

    @property
    def ends_texts(self) -> bool:
        """Whether end-of-text is an ordinary token, which a model learns to write after a text."""
        return self.eot_id not in self.fixed_ids

    def never_ids(self) -> list[int]:
        """Ids other than the mask that a model must never generate: padding, unknown, start-of-text and similar."""
        return []

    def fingerprint(self) -> str:
        """Changes exactly when the ids or their meaning change."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


class Bytes(Tokenizer):
    """UTF-8 bytes: ids 0–255, then end of text and mask. Any text, no training, nothing unknown."""

    num_ids, eot_id, mask_id = 258, 256, 257

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def encode_spans(self, texts: Sequence[str]) -> list[Span]:
        return [_one_byte_each(np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int64)) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        # Special tokens are spelled out within the byte string, so that a character they interrupt decodes as
        # invalid.
        return b"".join(self._bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_text(self, id: int) -> str:
        text = self._bytes(id).decode("utf-8", errors="replace")
        return text if id < 128 or id > 255 else f"<0x{id:02X}>"

    def spellings(self) -> tuple[list[bytes | None], list[bytes | None]]:
        words: list[bytes | None] = [*(bytes((b,)) for b in range(256)), None, None]
        return words, words

    def to_json(self) -> str:
        return json.dumps({"unmask": "bytes"})

    def _bytes(self, id: int) -> bytes:
        if id < 256:
            return bytes((id,))
        return (MASK_TEXT if id == self.mask_id else EOT_TEXT).encode()


class Chars(Tokenizer):
    """text8's 27 characters: space and a–z, then end of text and mask."""

    num_ids, eot_id, mask_id = 29, 27, 28
    _ALPHABET = " abcdefghijklmnopqrstuvwxyz"
    _STRANGE = re.compile(r"[^ a-z]")

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._ids(text)]

    def encode_spans(self, texts: Sequence[str]) -> list[Span]:
        return [_one_byte_each(self._ids(text)) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.token_text(i) for i in ids)

    def token_text(self, id: int) -> str:
        if id < len(self._ALPHABET):
            return self._ALPHABET[id]
        return MASK_TEXT if id == self.mask_id else EOT_TEXT

    def spellings(self) -> tuple[list[bytes | None], list[bytes | None]]:
        words: list[bytes | None] = [*(char.encode() for char in self._ALPHABET), None, None]
        return words, words

    def to_json(self) -> str:
        return json.dumps({"unmask": "chars"})

    def _ids(self, text: str) -> NDArray[np.int64]:
        strange = self._STRANGE.search(text)
        if strange:
            raise DataError(
                "the tokenizer chars knows only space and a-z, the text has {character!r} at position {position}; "
                "lower-case and clean the text, or use the tokenizer bytes",
                character=strange[0],
                position=Public(strange.start()),
            )
        codes = np.frombuffer(text.encode("ascii"), dtype=np.uint8).astype(np.int64)
        return np.where(codes == ord(" "), 0, codes - ord("a") + 1)


def load_tokenizer(spec: str, corpus: Corpus | None = None) -> Tokenizer:
    """Load a tokenizer by the name that recipes use.

    One of: `bytes`; `chars` (text8's); `dna`; `bpe:SIZE`, trained on `corpus`; a `tokenizer.json`; a folder with one,
    with GPT-2's `vocab.json` and `merges.txt`, or with BERT's `vocab.txt`; `hf:PATH_OR_ID` for that of a pretrained
    model; otherwise a name on the Hugging Face hub.

    >>> load_tokenizer("chars").decode([1, 2, 28])
    'ab[MASK]'
    """
    if spec in _OWN:
        return _own(spec)
    if spec.startswith("hf:"):
        from unmask.pretrained.families import read_pretrained

        return read_pretrained(spec).tokenizer
    if spec == "bpe" or spec.startswith("bpe:"):
        from unmask.data.subwords import train_bpe

        if corpus is None:
            raise UsageError(f"the tokenizer {spec} is trained on a corpus, and none is given; use a trained one")
        return train_bpe(_bpe_size(spec), corpus)
    path = Path(spec).expanduser()
    if path.is_file():
        return _from_file(path)
    if path.is_dir():
        return _from_folder(path)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", spec) and not spec.endswith((".json", ".txt")):
        return _from_hub(spec)
    raise DataError(f"no tokenizer at {spec}: give bytes, chars, dna, bpe:SIZE, a tokenizer.json or a folder with one")


def tokenizer_from_json(text: str) -> Tokenizer:
    """The tokenizer of a model folder. The text is untrusted: it is checked, and nothing in it is executed.

    >>> tokenizer_from_json(load_tokenizer("bytes").to_json()).num_ids
    258
    """
    try:
        data = parse_json(text)
    except (ValueError, RecursionError) as e:
        raise ModelFolderError(f"the tokenizer is not valid JSON: {str(e)[:120]}") from None
    if not isinstance(data, dict):
        raise ModelFolderError("the tokenizer is not a JSON object")
    if "unmask" in data:
        own = data["unmask"]
        if own == WITH_ROLES:
            from unmask.data.subwords import subwords_with_roles

            return subwords_with_roles(data)
        if not isinstance(own, str) or own not in _OWN or len(data) != 1:
            raise ModelFolderError(f"unknown tokenizer {str(own)[:40]!r}; {did_you_mean(str(own)[:40], _OWN)}")
        return _own(own)
    from unmask.data.subwords import Subwords

    return Subwords.from_data(data)


_OWN = ("bytes", "chars", "dna")


def _own(name: str) -> Tokenizer:
    if name == "dna":
        from unmask.data.dna import Dna  # it derives from the classes here

        return Dna()
    return Bytes() if name == "bytes" else Chars()


def _bpe_size(spec: str) -> int:
    size = spec.removeprefix("bpe").removeprefix(":")
    if not re.fullmatch(r"[0-9]{1,7}", size) or int(size) < 257:
        raise UsageError(f"{spec!r}: write bpe:SIZE with a SIZE of at least 257 (256 bytes and end of text)")
    return int(size)


def _from_file(path: Path) -> Tokenizer:
    text = read_text(path)
    try:
        return tokenizer_from_json(text)
    except ModelFolderError as e:
        raise ModelFolderError(f"{path}: {e}") from None


def _from_folder(path: Path) -> Tokenizer:
    if (path / "tokenizer.json").is_file():
        return _from_file(path / "tokenizer.json")
    from unmask.data.subwords import from_bert_vocab, from_gpt2_vocab

    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return from_gpt2_vocab(path / "vocab.json", path / "merges.txt")
    if (path / "vocab.txt").is_file():
        return from_bert_vocab(path / "vocab.txt")
    raise DataError(f"the folder {path} holds no tokenizer.json, no vocab.json with merges.txt and no vocab.txt")


def _from_hub(name: str) -> Tokenizer:
    try:
        import importlib

        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        what = f"the tokenizer {name!r} is no file or folder here ({did_you_mean(name, ['bpe:SIZE', *_OWN])}); the hub"
        raise MissingExtraError("huggingface-hub", "hf", what) from None
    try:
        file = hub.hf_hub_download(name, "tokenizer.json")
    except Exception as e:  # the hub's client has many layers with their own exceptions
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        hint = did_you_mean(name, ["bpe:SIZE", *_OWN])
        raise DataError(f"no tokenizer {name!r} here ({hint}), and the hub gives none: {reason}") from None
    return _from_file(Path(file))


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise lone_surrogate(text, e.start) from None


def lone_surrogate(text: str, at: int) -> DataError:
    """The error message for a text that UTF-8 cannot encode."""
    return DataError(
        "the text has half a character (U+{code:04X}) at position {position}; remove or repair it",
        code=ord(text[at]),
        position=Public(at),
    )


def _one_byte_each(ids: NDArray[np.int64]) -> Span:
    return ids, np.arange(1, len(ids) + 1, dtype=np.int64)
