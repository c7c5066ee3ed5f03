"""Rows cut from token shards as they are read: a few shards are in memory at a time, and each row is found by its
index."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.corpora.tokens import Shard, Tokens
from unmask.data.order import Blocks
from unmask.data.rows import Ints, Report, Rows, dtypes
from unmask.data.tokenizers import Tokenizer
from unmask.errors import DataError, UsageError


def shard_rows(corpus: Tokens, tokenizer: Tokenizer, part: str, *, policy: str, length: int) -> Rows:
    """The rows of a tokenized corpus. Each shard is packed separately, so only its last row may be shorter.

    >>> shard_rows(Tokens(path="tokens/"), tokenizer, "train", policy="wrap", length=512)  # doctest: +SKIP
    """
    if policy != "wrap":
        raise UsageError(f"token ids are packed by wrap, not by {policy!r}: tokenize keeps no prompts and no lines")
    check_shardable(tokenizer)
    if part != "all" and not corpus.has_part(part):
        raise UsageError(
            f"{corpus.path} does not say what is held out: name a corpus for data.valid, or tokenize with --held-out"
        )
    shards = [shard for shard in corpus.shards(part) if shard.documents]
    for shard in shards:
        if shard.tokenizer not in (None, tokenizer.fingerprint()):
            raise DataError(f"{shard.file} was made with another tokenizer: set tokenizer = {corpus.path}")
    if not shards:
        raise DataError(f"{corpus.path} holds no tokens")
    lay = _Layout.of(shards, length, ended=corpus.ended)
    tokens = _TokensOf(corpus, shards, lay, tokenizer)
    known = [shard.bytes for shard in shards if shard.bytes is not None]
    report = Report(
        policy="wrap",
        length=length,
        documents=sum(shard.documents for shard in shards),
        rows=int(lay.first_row[-1]),
        tokens=int(lay.first_token[-1]),
        bytes=sum(known) if len(known) == len(shards) else 0,
    )
    none = np.broadcast_to(np.uint32(0), (report.rows,))
    parts: dict[str, Any] = {"tokens": tokens, "ends": _Ends(lay), "prefixes": none, "bytes": _BytesOf(tokens, lay)}
    rows = Rows(parts, report, tokenizer.eot_id, tokenizer.num_ids)
    rows.blocks = Blocks(np.diff(lay.first_row), corpus.buffer)
    source = ["shards", corpus.fingerprint(), tokenizer.fingerprint(), length, part]
    rows.key = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:40]
    return rows


def check_shardable(tokenizer: Tokenizer) -> None:
    """Refuse vocabularies that rows from shards do not support.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> check_shardable(load_tokenizer("dna"))
    Traceback (most recent call last):
    unmask.errors.UsageError: token shards are for vocabularies without fixed tokens, which an encoder's and dna's have
    """
    if tokenizer.fixed_ids:
        raise UsageError("token shards are for vocabularies without fixed tokens, which an encoder's and dna's have")


@dataclass(frozen=True)
class _Layout:
    """Where each shard's rows and tokens begin, followed by where all end."""

    length: int
    first_row: Ints
    first_token: Ints

    @classmethod
    def of(cls, shards: Sequence[Shard], length: int, *, ended: bool) -> _Layout:
        tokens = np.array([shard.tokens + (0 if ended else shard.documents) for shard in shards], dtype=np.int64)
        first = np.zeros(len(shards) + 1, dtype=np.int64)
        return cls(length, *(np.concatenate([first[:1], np.cumsum(n)]) for n in (-(-tokens // length), tokens)))

    def end(self, row: Ints) -> Ints:
        """The end of these rows in the stream of all shards."""
        shard = np.searchsorted(self.first_row, row, side="right") - 1
        within = (row - self.first_row[shard] + 1) * self.length
        ends: Ints = np.minimum(self.first_token[shard] + within, self.first_token[shard + 1])
        return ends


class _Ends:
    """The ends of rows, computed instead of stored."""

    def __init__(self, lay: _Layout) -> None:
        self.lay = lay

    def __len__(self) -> int:
        return int(self.lay.first_row[-1])

    def __getitem__(self, row: Any) -> Any:
        return self.lay.end(np.asarray(row, dtype=np.int64))


class _TokensOf:
    """The stream of all shards' tokens; the most recently used shards are in memory."""

    def __init__(self, corpus: Tokens, shards: Sequence[Shard], lay: _Layout, tokenizer: Tokenizer) -> None:
        self.corpus, self.shards, self.lay, self.tokenizer = corpus, shards, lay, tokenizer
        self.dtype = dtypes(tokenizer.num_ids)["tokens"]
        self.kept: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self.lock = threading.Lock()  # needed because a thread reads ahead

    def __len__(self) -> int:
        return int(self.lay.first_token[-1])

    def __getitem__(self, span: slice) -> NDArray[Any]:
        start, stop, _ = span.indices(len(self))
        parts = []
        while start < stop:
            shard = int(np.searchsorted(self.lay.first_token, start, side="right")) - 1
            begin, end = self.lay.first_token[shard : shard + 2].tolist()
            parts.append(self.shard(shard)[start - begin : min(stop, end) - begin])
            start = min(stop, end)
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, dtype=self.dtype)])

    def shard(self, number: int) -> NDArray[Any]:
        with self.lock:
            if number not in self.kept:
                # Twice the buffer: at the boundary of two blocks of shards a batch may need both.
                while len(self.kept) >= 2 * self.corpus.buffer:
                    self.kept.popitem(last=False)
                self.kept[number] = self._read(number)
            self.kept.move_to_end(number)
            return self.kept[number]

    def _read(self, number: int) -> NDArray[Any]:
        shard = self.shards[number]
        chain = self.corpus.read(shard, self.tokenizer.eot_id)
        if len(chain) != self.lay.first_token[number + 1] - self.lay.first_token[number]:
            raise DataError(f"{shard.file} holds other tokens than it says, or has changed: tokenize again")
        if len(chain) and not 0 <= int(chain.min()) <= int(chain.max()) < self.tokenizer.num_ids:
            raise DataError(
                f"{shard.file} has ids from {chain.min()} to {chain.max()}, the tokenizer only 0 to "
                f"{self.tokenizer.num_ids - 1}: set the tokenizer that it was made with"
            )
        return chain.astype(self.dtype)


class _BytesOf:
    """The number of bytes of each row's tokens, by the tokenizer's spelling of its ids; 0 if that is unknown."""

    def __init__(self, tokens: _TokensOf, lay: _Layout) -> None:
        self.tokens, self.lay = tokens, lay
        self.of_id: Ints | None = None

    def __getitem__(self, rows: Any) -> NDArray[np.int64]:
        if self.of_id is None:
            tokenizer = self.tokens.tokenizer
            try:
                inside = tokenizer.spellings()[1]
            except UsageError:
                inside = []
            self.of_id = np.array([len(word or b"") for word in inside] or [0], dtype=np.int64)
            if len(inside):
                self.of_id[[tokenizer.eot_id, tokenizer.mask_id]] = 0  # they have a spelling but are not text
        ends = self.lay.end(rows)
        starts = np.where(rows > 0, self.lay.end(np.maximum(rows - 1, 0)), 0)
        out = np.zeros(len(rows), dtype=np.int64)
        if len(self.of_id) > 1:
            for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                out[i] = self.of_id[self.tokens[start:end]].sum()
        return out
