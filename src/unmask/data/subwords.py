"""Subword vocabularies (BPE, WordPiece, Unigram), using the `tokenizers` library and its file format."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from unmask.corpora import Corpus
from unmask.data.roles import WITH_ROLES, Roles
from unmask.data.tokenizers import EOT_TEXT, MASK_TEXT, Span, Tokenizer, lone_surrogate
from unmask.errors import DataError, ModelFolderError, Public, UnmaskError
from unmask.storage.untrusted import printable, read_text

# The file format cannot say which id is the mask, so roles are recognised by known spellings, best first.
# The last spelling of mask and end of text is for vocabularies in which all the others are ordinary words.
MASKS = (MASK_TEXT, "<mask>", "<|mask|>", "<|mdm_mask|>", "<MASK>", "<|unmask:mask|>")
EOTS = (EOT_TEXT, "</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<EOS>", "[EOS]", "<|eos|>", "<|unmask:eot|>")
BOSES = ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>", "<BOS>", "[BOS]", "<|bos|>")
MAX_GROWTH = 1 << 12  # maximum growth of a text by the file's replacements; a chain of doublings would exhaust memory
MAX_IDS = 1 << 22  # more ids would exhaust memory for the logits, and are no vocabulary


class Subwords(Tokenizer):
    """A vocabulary of `tokenizers`; mask and end of text are appended if missing, unless `roles` are given.

    >>> Subwords.from_data(json.loads(train_bpe(300, corpus).to_json())).mask_id  # doctest: +SKIP
    300
    """

    def __init__(self, inner: tokenizers.Tokenizer, roles: Roles | None = None) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # "[MASK]" in a text is six characters, not the mask
        if roles is None:
            self.eot_id = _role(inner, EOTS)
            self.mask_id = _role(inner, MASKS)
        self._added = inner.get_added_tokens_decoder()
        special = {token.content: id for id, token in self._added.items() if token.special}
        vocab = inner.get_vocab(with_added_tokens=True)
        most = max(vocab.values(), default=-1)
        if roles is None:
            self.bos_id = next((special[s] for s in BOSES if s in special), None)
            self.num_ids = most + 1
        else:
            roles.check(most)
            self.mask_id, self.eot_id, self.bos_id = roles.mask, roles.end, roles.begin
            self.num_ids, self.fixed_ids = roles.num_ids, roles.fixed
        if self.num_ids > MAX_IDS:
            raise ModelFolderError(f"the tokenizer has ids up to {self.num_ids - 1}; at most {MAX_IDS} are allowed")
        self._inner, self.roles = inner, roles
        named = set(vocab.values())
        never = {*special.values(), *self.fixed_ids, *(set(range(self.num_ids)) - named)}
        self._never = sorted(never - {self.eot_id, self.mask_id})

    @classmethod
    def from_data(cls, data: dict[str, Any], roles: Roles | None = None) -> Subwords:
        """From the parsed content of a `tokenizer.json`."""
        return cls(vocabulary_of(data), roles)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [ids.tolist() for ids, _ in self._encoded(texts, offsets=False)]

    def encode_spans(self, texts: Sequence[str]) -> list[Span]:
        spans: list[Span] = []
        byte_level = isinstance(self._inner.decoder, decoders.ByteLevel)
        for text, (ids, encoding) in zip(texts, self._encoded(texts, offsets=not byte_level), strict=True):
            num_bytes = len(text.encode("utf-8"))
            if byte_level:
                ends = np.cumsum(self._byte_lengths[ids])
                if len(ids) and ends[-1] == num_bytes:
                    spans.append((ids, ends))
                    continue
                encoding = self._encoded([text], offsets=True)[0][1]  # a normalizer or an added space changes the text
            spans.append((ids, _ends_from_offsets(text, encoding.offsets, num_bytes)))
        return spans

    def decode(self, ids: Iterable[int]) -> str:
        ids = [int(i) for i in ids]
        if self._inner.id_to_token(self.mask_id) == MASK_TEXT:
            return str(self._inner.decode(ids, skip_special_tokens=False))
        parts: list[list[int]] = [[]]
        for i in ids:
            if i == self.mask_id:
                parts.append([])
            else:
                parts[-1].append(i)
        return MASK_TEXT.join(str(self._inner.decode(part, skip_special_tokens=False)) for part in parts)

    def token_text(self, id: int) -> str:
        if id == self.mask_id:
            return MASK_TEXT
        if id in self._added:
            return str(self._added[id].content)
        token = self._inner.id_to_token(id)
        if token is None:
            return f"<{id}>"
        if isinstance(self._inner.decoder, decoders.ByteLevel):
            return self.decode([id])
        return str(token)  # decode would drop WordPiece's ## and SentencePiece's ▁, which mark how pieces join

    def spellings(self) -> tuple[list[bytes | None], list[bytes | None]]:
        return self._spellings

    @cached_property
    def _spellings(self) -> tuple[list[bytes | None], list[bytes | None]]:
        if isinstance(self._inner.decoder, decoders.ByteLevel):
            words = [self._byte_level_word(id) for id in range(self.num_ids)]
            return words, words
        # Other decoders join words by their own rules: what an id adds is visible only after a known token.
        anchor = self.encode("a")[:1]
        base = self.decode(anchor)
        ids = range(self.num_ids)
        alone = self._inner.decode_batch([[id] for id in ids], skip_special_tokens=False)
        after = self._inner.decode_batch([[*anchor, id] for id in ids], skip_special_tokens=False)
        inside = [text.removeprefix(base) if text.startswith(base) else None for text in after]
        # A word at the start has no joining space; a piece that continues a word cannot occur there.
        first = [
            text if text in (whole, (whole or "").removeprefix(" ")) else None
            for text, whole in zip(alone, inside, strict=True)
        ]
        return [_whole(word) for word in first], [_whole(word) for word in inside]

    def _byte_level_word(self, id: int) -> bytes | None:
        token = self._inner.id_to_token(id)
        if token is None or id == self.mask_id:
            return None
        if id in self._added:
            return str(token).encode()
        return bytes(_BYTE_OF[char] for char in token) if all(char in _BYTE_OF for char in token) else None

    def never_ids(self) -> list[int]:
        return list(self._never)

    def to_json(self) -> str:
        plain = str(self._inner.to_str())
        if self.roles is None:
            return plain
        said = {"unmask": WITH_ROLES, "roles": dataclasses.asdict(self.roles), "tokenizer": json.loads(plain)}
        return json.dumps(said, ensure_ascii=False)

    def to_vocabulary(self) -> str:
        """A `tokenizer.json` for other programs, without the roles."""
        return str(self._inner.to_str())

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return super().fingerprint()

    @cached_property
    def _byte_lengths(self) -> NDArray[np.int64]:
        """The number of bytes of each id in a byte-level vocabulary, whose tokens use one character per byte."""
        lengths = np.zeros(self.num_ids, dtype=np.int64)
        for token, id in self._inner.get_vocab(with_added_tokens=True).items():
            lengths[id] = len(token.encode()) if id in self._added else len(token)
        return lengths

    def _encoded(self, texts: Sequence[str], *, offsets: bool) -> list[tuple[NDArray[np.int64], Any]]:
        """The ids of each text, and its encoding."""
        encode = self._inner.encode_batch if offsets else self._inner.encode_batch_fast
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as e:
                raise lone_surrogate(text, e.start) from None
        with guard(DataError, "the tokenizer cannot encode the text"):
            encodings: list[Any] = encode(list(texts), add_special_tokens=False)
        encoded = [(np.array(encoding.ids, dtype=np.int64), encoding) for encoding in encodings]
        for ids, _ in encoded:
            for role in (self.mask_id, self.eot_id):
                if (ids == role).any():
                    spelling = self._inner.id_to_token(role)
                    raise DataError(
                        "the text spells {spelling}, which this vocabulary reserves; remove it or use bytes",
                        spelling=Public(spelling),
                    )
        return encoded


def vocabulary_of(data: dict[str, Any]) -> tokenizers.Tokenizer:
    """The vocabulary from the parsed content of a `tokenizer.json`, which is untrusted."""
    model = data.get("model")
    if not isinstance(model, dict):
        raise ModelFolderError("the tokenizer's JSON has no model: it is no tokenizer.json")
    if model.get("dropout"):
        data = data | {"model": model | {"dropout": None}}  # encoding must be deterministic
    with guard(ModelFolderError, "the tokenizer cannot be read"):
        for part in ("normalizer", "decoder"):
            if _growth(data.get(part)) > MAX_GROWTH:
                raise ModelFolderError(f"the tokenizer's {part} makes texts over {MAX_GROWTH} times longer")
        return tokenizers.Tokenizer.from_str(json.dumps(data))


def subwords_with_roles(data: dict[str, Any]) -> Subwords:
    """Read back what `to_json` wrote for a vocabulary with roles."""
    roles, inner = data.get("roles"), data.get("tokenizer")
    if data.keys() != {"unmask", "roles", "tokenizer"} or not isinstance(roles, dict) or not isinstance(inner, dict):
        raise ModelFolderError("the tokenizer does not say which ids are mask, begin and end: its roles are damaged")
    return Subwords.from_data(inner, Roles.from_data(roles))


def _byte_of() -> dict[str, int]:
    """Character → byte in byte-level vocabularies: a byte's own Latin-1 character if printable, otherwise one from 256
    up."""
    printable = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _byte_of()


def _whole(word: str | None) -> bytes | None:
    """The word as UTF-8; None if the token is a piece of a character, which cannot be decoded by itself."""
    return None if word is None or "\ufffd" in word else word.encode()


def train_bpe(size: int, corpus: Corpus) -> Subwords:
    """Train a byte-level BPE of `size` ids (fewer if the corpus has too little to merge), streamed; id 0 ends a text.

    >>> train_bpe(4096, corpus).num_ids  # the mask is one more  # doctest: +SKIP
    4097
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOT_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    num_texts = 0

    def texts() -> Iterator[str]:
        nonlocal num_texts
        for document in corpus.documents():
            for text in (document.prompt, document.text):
                if text:
                    num_texts += 1
                    yield text.encode("utf-8", errors="replace").decode("utf-8")

    inner.train_from_iterator(texts(), trainer=trainer)
    if not num_texts:
        raise DataError("the corpus is empty: there is nothing to train a tokenizer on")
    return Subwords(inner)


def from_gpt2_vocab(vocab: Path, merges: Path) -> Subwords:
    """A vocabulary from GPT-2's two files: byte-level BPE; `<|endoftext|>` ends a text, and the mask is appended."""
    inner = byte_level_vocabulary(vocab, merges)
    with guard(ModelFolderError, f"cannot read the vocabulary {vocab} with {merges.name}"):
        return Subwords(inner)


def byte_level_vocabulary(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    """The BPE of GPT-2 and RoBERTa, from their two files."""
    with guard(ModelFolderError, f"cannot read the vocabulary {vocab} with {merges.name}"):
        inner = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        return inner


def from_bert_vocab(vocab: Path) -> Subwords:
    """A WordPiece vocabulary from BERT's file; text is lower-cased if no word has a capital letter, as in
    bert-base-uncased."""
    inner = word_piece_vocabulary(vocab)
    with guard(ModelFolderError, f"cannot read the vocabulary {vocab}"):
        return Subwords(inner)


def word_piece_vocabulary(vocab: Path, lower: bool | None = None) -> tokenizers.Tokenizer:
    """The WordPiece model of BERT's file; lower=None: lower-case if no word in it has a capital letter."""
    specials = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    with guard(ModelFolderError, f"cannot read the vocabulary {vocab}"):
        inner = tokenizers.Tokenizer(models.WordPiece.from_file(str(vocab), unk_token="[UNK]"))
        words = inner.get_vocab()
        if "[UNK]" not in words:
            raise ModelFolderError(f"the vocabulary {vocab} has no [UNK]: it is no BERT vocabulary")
        if lower is None:
            lower = not any(w != w.lower() for w in words if w not in specials)
        inner.normalizer = normalizers.BertNormalizer(lowercase=lower)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        inner.add_special_tokens([special_token(s) for s in specials if s in words])
        return inner


def residue_vocabulary(vocab: Path) -> tokenizers.Tokenizer:
    """ESM's file: one token per line; a residue is one letter, and spaces between residues are ignored."""
    with guard(ModelFolderError, f"cannot read the vocabulary {vocab}"):
        words = {word.strip(): id for id, word in enumerate(read_text(vocab).splitlines()) if word.strip()}
        if "<unk>" not in words:
            raise ModelFolderError(f"the vocabulary {vocab} has no <unk>: it is no vocabulary of residues")
        inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        letters = pre_tokenizers.Split(tokenizers.Regex(r"\S"), behavior="isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), letters])
        inner.decoder = decoders.Fuse()
        inner.add_special_tokens([special_token(word) for word in words if word.startswith("<")])
        return inner


def _growth(part: Any) -> float:
    """An upper bound on the factor by which a normalizer or decoder in the file can lengthen a text."""
    if not isinstance(part, dict):
        return 1.0
    steps = part.get("normalizers") or part.get("decoders")
    if isinstance(steps, list):
        return math.prod(map(_growth, steps))
    for key in ("content", "prepend"):
        if isinstance(text := part.get(key), str):
            pattern = part.get("pattern")
            replaced = pattern.get("String") if isinstance(pattern, dict) else None
            if isinstance(replaced, str) and replaced:
                return max(1.0, len(text) / len(replaced))
            return 1.0 + len(text)  # inserted before a text, or where a pattern matches nothing
    return 1.0


def _role(inner: tokenizers.Tokenizer, spellings: Sequence[str]) -> int:
    """The id of the first spelling that is special; otherwise of one that no text produces; otherwise of an appended
    one."""
    special = {token.content: id for id, token in inner.get_added_tokens_decoder().items() if token.special}
    for spelling in spellings:
        if spelling in special:
            return int(special[spelling])
    for spelling in spellings:
        id = inner.token_to_id(spelling)
        if id is not None and id not in inner.encode(spelling, add_special_tokens=False).ids:
            inner.add_special_tokens([special_token(spelling)])  # marks an existing id, appends nothing
            return int(id)
    for spelling in (spellings[0], spellings[-1]):
        if inner.token_to_id(spelling) is None:
            inner.add_special_tokens([special_token(spelling)])
            return max(inner.get_vocab(with_added_tokens=True).values())
    raise ModelFolderError(f"the vocabulary uses {spellings[0]} and {spellings[-1]} as words: no spelling is left")


def special_token(spelling: str) -> AddedToken:
    """A token that no text produces."""
    return AddedToken(spelling, special=True, normalized=False)


def _ends_from_offsets(text: str, offsets: Sequence[tuple[int, int]], num_bytes: int) -> NDArray[np.int64]:
    """Bytes up to the end of each token, from the characters it covers; the last token gets the remaining bytes."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    byte_of_char = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(widths)])
    ends = np.array([end for _, end in offsets], dtype=np.int64)
    if not len(ends):
        return ends
    ends = byte_of_char[np.maximum.accumulate(np.minimum(ends, len(text)))]
    ends[-1] = num_bytes
    return ends


@contextmanager
def guard(kind: type[UnmaskError], what: str) -> Iterator[None]:
    """Turn exceptions from the Rust side of `tokenizers`, including panics, into a one-line error.

    >>> with guard(DataError, "it cannot be read"):
    ...     raise ValueError("odd")
    Traceback (most recent call last):
    unmask.errors.DataError: it cannot be read: odd
    """
    try:
        yield
    except UnmaskError:
        raise
    except BaseException as e:
        # A Rust panic is not an Exception subclass, so it is recognised by its name; others are not ours to handle.
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {printable(str(e).strip() or type(e).__name__, 200)}") from None
