"""A corpus → shards of its tokens, by several processes; if killed at any time, it resumes with the unfinished shard.

One process reads documents in order and sends pieces of text to the others. Their ids come back in that order, so the
shards do not depend on the number of processes. A shard is written atomically and records the last document it covers:
there is no other state.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.corpora import Corpus, Document, sources
from unmask.corpora.tokens import IDS, KEY, PLAN, WHOLE
from unmask.data.shards import check_shardable
from unmask.data.share import content_place
from unmask.data.tokenizers import Tokenizer, tokenizer_from_json
from unmask.errors import DataError, UsageError
from unmask.storage.atomic import atomic_file, atomic_text
from unmask.storage.untrusted import read_json

PIECE = 1 << 20  # characters to send to a process at a time
MOST_TOKENS = 1 << 30  # maximum tokens per shard, because a shard is read as a whole
PARTS = ("train", "valid")
Tell = Callable[[int], None]  # receives the number of characters processed since the last call


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that determines the shards. held_out: the share of documents, by a hash of their content, in the part
    valid."""

    corpus: str  # its fingerprint
    tokenizer: str  # its fingerprint
    held_out: float
    shard_tokens: int
    format: int = 1


@dataclass
class Totals:
    """What has been written, over all shards of the folder."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    shards: int = 0
    before: int = 0  # shards written by earlier calls


@dataclass
class _Part:
    """The shard being filled, and the last document that this part has written."""

    name: str
    reached: int = 0  # documents of the corpus that this part need not read again
    number: int = 0
    ids: list[NDArray[Any]] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True)
class _Missing:
    """A document whose tokens are not in any shard yet. place: its number in the corpus, counted from 1."""

    document: Document
    part: _Part
    place: int


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: Path,
    *,
    processes: int = 1,
    held_out: float = 0.0,
    shard_tokens: int = 1 << 24,
    tell: Tell | None = None,
) -> Totals:
    """Write the corpus's tokens into `out` as Parquet shards, one document per row, together with the tokenizer.

    >>> tokenize(Text(path="texts/"), load_tokenizer("bytes"), Path("tokens"), processes=8)  # doctest: +SKIP
    """
    arrow = sources.optional("pyarrow", "pyarrow", "data", "writing Parquet")
    sources.optional("pyarrow.parquet", "pyarrow", "data", "writing Parquet")
    _check(corpus, tokenizer, processes, held_out, shard_tokens)
    plan = Plan(
        corpus=corpus.fingerprint(), tokenizer=tokenizer.fingerprint(), held_out=held_out, shard_tokens=shard_tokens
    )
    _begin(out, plan, tokenizer)
    totals = Totals()
    parts = {name: _gone_before(arrow, out, name, totals) for name in PARTS[: 2 if held_out else 1]}
    totals.before = totals.shards
    if (out / WHOLE).exists():
        return totals
    read = min(part.reached for part in parts.values())

    def missing() -> Iterator[_Missing]:
        nonlocal read
        for document in islice(_texts(corpus), read, None):
            read += 1
            part = parts["valid" if held_out > 0 and content_place(document) < held_out else "train"]
            if read > part.reached:
                yield _Missing(document, part, read)

    for one, ids in _encoded(missing(), tokenizer, processes, tell):
        if not len(ids):
            continue
        part = one.part
        part.ids.append(ids)
        part.bytes.append(len(one.document.text.encode("utf-8", errors="surrogatepass")))
        part.tokens += len(ids)
        if part.tokens >= shard_tokens:
            _write(arrow, out, part, one.place, plan, totals)
    for part in parts.values():
        if part.ids:
            _write(arrow, out, part, read, plan, totals)
    if not totals.documents:
        raise DataError("the corpus is empty: it has no document with text in it")
    whole = {key: value for key, value in asdict(totals).items() if key != "before"}
    atomic_text(out / WHOLE, json.dumps(whole, indent=1) + "\n")
    return totals


def _check(corpus: Corpus, tokenizer: Tokenizer, processes: int, held_out: float, shard_tokens: int) -> None:
    if processes < 1 or shard_tokens < 1:
        raise UsageError(f"nproc and shard-tokens must be at least 1, got {processes} and {shard_tokens}")
    if not 0 <= held_out < 1:
        raise UsageError(f"held-out must be 0 (none) or a share below 1, got {held_out}")
    if shard_tokens > MOST_TOKENS:
        raise UsageError(f"shard-tokens must be at most {MOST_TOKENS:,}, got {shard_tokens:,}")
    if corpus.tokenized:
        raise UsageError("these are token ids already: train on them as they are")
    check_shardable(tokenizer)


def _begin(out: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Refuse a folder with other content; record what this one will hold."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: give a folder")
    path = out / PLAN
    if path.exists() and any(_file(out, _Part(name)).exists() for name in PARTS):
        before = read_json(path)
        now = asdict(plan)
        for key, word in (("corpus", "another text"), ("tokenizer", "another tokenizer")):
            if before.get(key) != now[key]:
                raise UsageError(f"{out} holds the tokens of {word}: give another folder, or the same again")
        for key in now:
            if before.get(key) != now[key]:
                raise UsageError(f"{out} was begun with {key} = {before.get(key)}, now it is {now[key]}")
        return
    begun = (PLAN, "tokenizer.json")  # an earlier call wrote no shard, so its plan is not binding
    if out.exists() and any(not file.name.startswith(".") and file.name not in begun for file in out.iterdir()):
        raise UsageError(f"{out} is not empty: give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    atomic_text(out / "tokenizer.json", tokenizer.to_json())
    atomic_text(path, json.dumps(asdict(plan), indent=1) + "\n")


def _gone_before(arrow: Any, out: Path, name: str, totals: Totals) -> _Part:
    """Where a part resumes: after the last of its consecutive shards."""
    part = _Part(name)
    while (file := _file(out, part)).exists():
        try:
            said = json.loads(arrow.parquet.read_schema(file).metadata[KEY])
        except (arrow.ArrowException, OSError, KeyError, ValueError, TypeError):
            raise DataError(f"{file} is damaged: remove it, and the same command writes it again") from None
        part.reached, part.number = said["reached"], part.number + 1
        _count(totals, said)
    return part


def _count(totals: Totals, said: dict[str, Any]) -> None:
    totals.documents += said["documents"]
    totals.tokens += said["tokens"]
    totals.bytes += said["bytes"]
    totals.shards += 1


def _file(out: Path, part: _Part) -> Path:
    return out / f"{part.name}-{part.number:05d}.parquet"


def _write(arrow: Any, out: Path, part: _Part, reached: int, plan: Plan, totals: Totals) -> None:
    ids = np.concatenate(part.ids)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in part.ids])]).astype(np.int32)
    lists = arrow.ListArray.from_arrays(arrow.array(offsets), arrow.array(ids))
    counts = {"documents": len(part.ids), "tokens": len(ids), "bytes": sum(part.bytes)}
    said: dict[str, Any] = {**counts, "tokenizer": plan.tokenizer, "reached": reached}
    table = arrow.table({IDS: lists, "bytes": arrow.array(part.bytes, type=arrow.uint32())})
    table = table.replace_schema_metadata({KEY: json.dumps(said)})
    with atomic_file(_file(out, part)) as new:
        arrow.parquet.write_table(table, new, compression="zstd", use_dictionary=False)
    _count(totals, said)
    part.reached, part.number, part.ids, part.bytes, part.tokens = reached, part.number + 1, [], [], 0


def _texts(corpus: Corpus) -> Iterator[Document]:
    for document in corpus.documents():
        if document.prompt or document.label is not None:
            raise UsageError(
                "tokenize keeps texts alone: leave out prompt_field and label_field; a corpus with prompts is packed "
                "as it is read"
            )
        yield document


def _encoded(
    documents: Iterator[_Missing], tokenizer: Tokenizer, processes: int, tell: Tell | None
) -> Iterator[tuple[_Missing, NDArray[Any]]]:
    """Each document with its ids, in order; only as many pieces are in progress as keep the processes busy."""
    dtype = np.uint16 if tokenizer.num_ids <= 1 << 16 else np.uint32
    encode = _Encoder(tokenizer.to_json(), dtype)
    if processes == 1:
        for piece in _pieces(documents):
            yield from _told(piece, encode([one.document.text for one in piece]), tell)
        return
    # One core per process: the tokenizer's own threads would oversubscribe them several times.
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, _one_thread) as pool:
        waiting: deque[tuple[list[_Missing], Future[list[NDArray[Any]]]]] = deque()
        try:
            for piece in _pieces(documents):
                waiting.append((piece, pool.submit(encode, [one.document.text for one in piece])))
                if len(waiting) > 2 * processes:
                    first, ids = waiting.popleft()
                    yield from _told(first, ids.result(), tell)
            while waiting:
                first, ids = waiting.popleft()
                yield from _told(first, ids.result(), tell)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _told(piece: list[_Missing], ids: list[NDArray[Any]], tell: Tell | None) -> Iterator[tuple[_Missing, NDArray[Any]]]:
    yield from zip(piece, ids, strict=True)
    if tell is not None:
        tell(sum(len(one.document.text) for one in piece))


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _pieces(documents: Iterator[_Missing]) -> Iterator[list[_Missing]]:
    piece: list[_Missing] = []
    size = 0
    for one in documents:
        piece.append(one)
        size += len(one.document.text) + 16
        if size >= PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


class _Encoder:
    """Texts → ids, in any process: it carries the tokenizer as JSON, which each process parses once."""

    _read: dict[str, Tokenizer] = {}  # noqa: RUF012 - of a process

    def __init__(self, tokenizer: str, dtype: type[np.unsignedinteger[Any]]) -> None:
        self.tokenizer, self.dtype = tokenizer, dtype

    def __call__(self, texts: list[str]) -> list[NDArray[Any]]:
        if self.tokenizer not in self._read:
            self._read[self.tokenizer] = tokenizer_from_json(self.tokenizer)
        return [np.array(ids, dtype=self.dtype) for ids in self._read[self.tokenizer].encode_batch(texts)]
