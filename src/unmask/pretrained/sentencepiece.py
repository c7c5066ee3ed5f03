"""A SentencePiece file (`spm.model`, `tokenizer.model`) as a vocabulary of `tokenizers`; unigram and BPE.

The file is an untrusted protobuf message. Only the parts of the wire format that such files use are parsed, with every
length checked against what is left. Options under which `tokenizers` would split texts differently are refused by name.
"""

from __future__ import annotations

import math
import string
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from unmask.data.subwords import guard, special_token
from unmask.errors import ModelFolderError
from unmask.storage.untrusted import first_repeat, printable, read_bytes

MAX_FILE = 1 << 24  # bytes; a quarter of a million pieces take 5 million
MAX_PIECE = 256  # characters
MAX_MERGES = 1 << 21  # pairs of pieces that form a piece; a quarter of a million pieces have half a million
MAX_REPLACED = 256  # maximum bytes for one normalized character; the longest known has 33
SPACE = "▁"
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass
class Piece:
    text: str = ""
    score: float = 0.0
    kind: int = NORMAL


@dataclass
class SpmFile:
    """The settings in such a file that affect how a text is split; the defaults are those of the format."""

    pieces: list[Piece] = field(default_factory=list)
    algorithm: int = UNIGRAM
    byte_fallback: bool = False
    space_after: bool = False
    charsmap: bytes = b""
    space_first: bool = True
    one_space: bool = True
    escaped: bool = True
    rewritten: bool = False


def sentence_pieces(path: Path, *, lower: bool = False) -> tokenizers.Tokenizer:
    """The vocabulary in the file, with the same ids for a text as SentencePiece. lower: lower-case the text first.

    >>> sentence_pieces(Path("deberta-v3-base/spm.model")).get_vocab_size()  # doctest: +SKIP
    128000
    """
    data = read_bytes(path, MAX_FILE)
    try:
        return vocabulary_of(read_spm(data), lower=lower)
    except ModelFolderError as e:
        raise ModelFolderError(f"{path}: {e}") from None


def vocabulary_of(said: SpmFile, *, lower: bool = False) -> tokenizers.Tokenizer:
    """Build the vocabulary from the untrusted content of such a file.

    >>> pieces = [Piece("<unk>", kind=UNKNOWN), Piece("\u2581a"), Piece("a", -1.0), Piece("\u2581", -1.0)]
    >>> vocabulary_of(SpmFile(pieces)).encode("a aa").ids
    [1, 1, 2]
    """
    _check(said)
    with guard(ModelFolderError, "its pieces make no vocabulary"):
        inner = _tokenizer(said, lower)
        inner.encode(string.printable)  # detects an invalid table
        return inner


# --- the file ---------------------------------------------------------------------------------------------------------


def read_spm(data: bytes) -> SpmFile:
    """Parse the message, field by field.

    >>> read_spm(b"not a message")
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: it is no SentencePiece model, or a damaged one
    """
    said = SpmFile()
    try:
        for number, value in _fields(data):
            if number == 1:
                said.pieces.append(_piece(_bytes(value)))
            elif number == 2:
                _trained(said, _bytes(value))
            elif number == 3:
                _normalized(said, _bytes(value))
            elif number == 5:
                said.rewritten = any(n == 2 and v for n, v in _fields(_bytes(value)))
    except (ValueError, struct.error):
        raise ModelFolderError("it is no SentencePiece model, or a damaged one") from None
    if not said.pieces:
        raise ModelFolderError("it is no SentencePiece model, or a damaged one")
    return said


def _piece(data: bytes) -> Piece:
    piece = Piece()
    for number, value in _fields(data):
        if number == 1:
            piece.text = _bytes(value).decode("utf-8")
        elif number == 2:
            (piece.score,) = struct.unpack("<f", _bytes(value))
        elif number == 3:
            piece.kind = _whole(value)
    return piece


def _trained(said: SpmFile, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 3:
            said.algorithm = _whole(value)
        elif number == 24:
            said.space_after = bool(_whole(value))
        elif number == 35:
            said.byte_fallback = bool(_whole(value))


def _normalized(said: SpmFile, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2:
            said.charsmap = _bytes(value)
        elif number == 3:
            said.space_first = bool(_whole(value))
        elif number == 4:
            said.one_space = bool(_whole(value))
        elif number == 5:
            said.escaped = bool(_whole(value))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and value of each field of a message: a whole number, or bytes."""
    at, value = 0, b""
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            whole, at = _varint(data, at)
            yield key >> 3, whole
            continue
        size = 8 if kind == FIXED64 else 4
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind not in (FIXED64, FIXED32):
            raise ValueError("no such kind of field")
        value = data[at : at + size]
        if len(value) != size:
            raise ValueError("a field is longer than the message")
        at += size
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a whole number, seven bits per byte, lowest first; returns it and where it ends."""
    value = 0
    for k in range(10):
        if at + k >= len(data):
            raise ValueError("the message ends in a number")
        value |= (data[at + k] & 0x7F) << 7 * k
        if data[at + k] < 0x80:
            return value, at + k + 1
    raise ValueError("a number has more than 64 bits")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes belong")
    return value


def _whole(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("bytes where a number belongs")
    return value


# --- the vocabulary ---------------------------------------------------------------------------------------------------


def _check(said: SpmFile) -> None:
    texts = [piece.text for piece in said.pieces]
    if (twice := first_repeat(texts)) is not None:
        raise ModelFolderError(f"the piece {printable(twice)!r} is there twice")
    if not all(0 < len(text) <= MAX_PIECE for text in texts):
        raise ModelFolderError(f"a piece is empty or has more than {MAX_PIECE} characters")
    if not all(math.isfinite(piece.score) for piece in said.pieces):
        raise ModelFolderError("a piece's score is no number")
    kinds = [piece.kind for piece in said.pieces]
    if kinds.count(UNKNOWN) != 1:
        raise ModelFolderError("it has no piece for what it does not know, or several")
    if BYTE in kinds and not said.byte_fallback:
        raise ModelFolderError("it has pieces for bytes and does not use them (byte_fallback)")
    for wrong, what in (
        (said.algorithm not in (UNIGRAM, BPE), "pieces that are neither of a unigram model nor of BPE (model_type)"),
        (said.space_after, "spaces after words (treat_whitespace_as_suffix)"),
        (not said.escaped, "spaces as they are (escape_whitespaces)"),
        (said.rewritten, "a text that is written otherwise than it was read (denormalizer_spec)"),
        (USER_DEFINED in kinds, "pieces that somebody has defined (USER_DEFINED)"),
        (UNUSED in kinds, "pieces that are never used (UNUSED)"),
        (not {*kinds} <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}, "pieces of an unknown type"),
    ):
        if wrong:
            raise ModelFolderError(f"it has {what}, which is not read: make a tokenizer.json of it with transformers")
    if said.charsmap:
        _check_charsmap(said.charsmap)


def _check_charsmap(table: bytes) -> None:
    """Check the normalization table: the trie's size, the trie, and its values, each a text followed by a 0."""
    size = int.from_bytes(table[:4], "little")
    if not 0 < size <= len(table) - 4 or size % 4:
        raise ModelFolderError("the table that normalizes a text is damaged (precompiled_charsmap)")
    if max(map(len, table[4 + size :].split(b"\0"))) > MAX_REPLACED:
        raise ModelFolderError(f"a character becomes more than {MAX_REPLACED} bytes (precompiled_charsmap)")


def _tokenizer(said: SpmFile, lower: bool) -> tokenizers.Tokenizer:
    unknown = next(id for id, piece in enumerate(said.pieces) if piece.kind == UNKNOWN)
    if said.algorithm == UNIGRAM:
        scored = [(piece.text, piece.score) for piece in said.pieces]
        inner = tokenizers.Tokenizer(models.Unigram(scored, unknown, said.byte_fallback))
    else:
        ids = {piece.text: id for id, piece in enumerate(said.pieces)}
        how = {"unk_token": said.pieces[unknown].text, "fuse_unk": True, "byte_fallback": said.byte_fallback}
        inner = tokenizers.Tokenizer(models.BPE(ids, _merges(said.pieces), **how))
    inner.normalizer = normalizers.Sequence(_normalizers(said, lower))
    if not any(SPACE in piece.text[1:] for piece in said.pieces):  # no piece spans a space: words are split separately
        inner.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if said.space_first else [])])
    never = [piece.text for piece in said.pieces if piece.kind in (UNKNOWN, CONTROL)]
    inner.add_special_tokens([special_token(text) for text in never])
    return inner


def _normalizers(said: SpmFile, lower: bool) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lower else []
    steps += [normalizers.Precompiled(said.charsmap)] if said.charsmap else []
    if said.one_space:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if said.space_first else []
    return [*steps, normalizers.Replace(" ", SPACE)]


def _merges(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Which two neighbours to merge, best first: by the score of the resulting piece, whatever its halves."""
    scores = {piece.text: piece.score for piece in pieces if piece.kind == NORMAL}
    found = (
        (score, text[:k], text[k:])
        for text, score in scores.items()
        for k in range(1, len(text))
        if text[:k] in scores and text[k:] in scores
    )
    halves = list(islice(found, MAX_MERGES + 1))
    if len(halves) > MAX_MERGES:
        raise ModelFolderError(f"its pieces fall into halves in more than {MAX_MERGES:,} ways")
    halves.sort(key=lambda half: (-half[0], -len(half[1])))
    return [(left, right) for _, left, right in halves]
