"""Documents → rows of a fixed length, cached on disk as a memory map.

Four policies: `wrap` chains all documents, each with end-of-text after it, and cuts the chain into rows; `pad` gives
each document a row of its own length; `fill` fills that row up with end-of-text, which is noised and scored, so that a
model learns where a text ends; `sentence` gives each line a row. What does not fit a row is cut, and counted, or goes
on in further rows (`go_on`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast, get_args

import numpy as np

from unmask.corpora import Corpus, Document
from unmask.corpora.labels import Words
from unmask.corpora.tokens import Tokens
from unmask.data.cache import cached, default_cache_dir
from unmask.data.rows import FILES, LABELS, Anchor, Ints, Policy, Report, Rows, RowWriter, dtypes, fixed_table
from unmask.data.shards import shard_rows
from unmask.data.share import Share, content_place
from unmask.data.tokenizers import Span, Tokenizer
from unmask.errors import DataError, UsageError, did_you_mean

if TYPE_CHECKING:
    from unmask.config import DataConfig

__all__ = ["Anchor", "Policy", "Report", "Rows", "build_rows", "pack_texts", "rows_of"]

Part = Literal["all", "train", "valid"]
Progress = Callable[[int], None]
FORMAT = 1  # of the cache; a change makes old ones unknown
_CHUNK = 1 << 20  # characters that are tokenized together


class _Packer:
    """Takes documents, writes rows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        policy: Policy,
        length: int,
        anchor: Anchor,
        files: dict[str, BinaryIO],
        go_on: bool = False,
    ) -> None:
        if policy not in get_args(Policy):
            raise UsageError(f"unknown packing {policy!r}; {did_you_mean(policy, get_args(Policy))}")
        if anchor not in get_args(Anchor):
            raise UsageError(f"unknown anchor {anchor!r}; {did_you_mean(anchor, get_args(Anchor))}")
        if policy == "wrap" and anchor != "none" and tokenizer.ends_texts:
            raise UsageError("rows of the packing 'wrap' begin anywhere in a text: anchors need 'pad' or 'sentence'")
        if policy == "fill" and not tokenizer.ends_texts:
            raise UsageError("this vocabulary's texts do not end in a token that is learned: pack by pad, not by fill")
        begin, end = anchor_ids(tokenizer, anchor)
        if length < 2 + len(begin) + len(end):
            raise UsageError(f"a row has at least {2 + len(begin) + len(end)} tokens, got a length of {length}")
        self._tokenizer, self._policy, self._length, self._anchor = tokenizer, policy, length, anchor
        self._begin, self._end = np.array(begin, dtype=np.int64), np.array(end, dtype=np.int64)
        self._go_on = go_on
        self._fixed_I = fixed_table(tokenizer.fixed_ids, tokenizer.num_ids) if tokenizer.fixed_ids else None
        self._fixed = 0  # tokens of fixed ids within the texts
        self._writer = RowWriter(files, tokenizer.num_ids)
        self.words = Words()  # that stand for classes
        self._documents = self._cut = self._dropped = self._empty = 0
        self._waiting: list[Document] = []
        self._waiting_size = 0
        # wrap: the row begun, as pieces of tokens
        self._open: list[Ints] = []
        self._open_tokens = self._open_bytes = 0

    def add(self, document: Document) -> None:
        """One document; it is tokenized together with its neighbours."""
        self._waiting.append(document)
        self._waiting_size += len(document.text) + len(document.prompt) + 16
        if self._waiting_size > _CHUNK:
            self._pack_waiting()

    def finish(self) -> Report:
        """Write what is begun and say what became of everything."""
        self._pack_waiting()
        if self._open_tokens:
            self._close_row()
        writer = self._writer
        writer.flush()
        return Report(
            policy=self._policy,
            length=self._length,
            anchor=self._anchor,
            documents=self._documents,
            rows=writer.rows,
            tokens=writer.total - writer.prefix_total - len(self._end) * writer.rows - self._fixed,
            bytes=writer.byte_total,
            cut_tokens=self._cut,
            dropped_documents=self._dropped,
            empty_documents=self._empty,
        )

    @property
    def labelled(self) -> bool:
        return self._writer.labelled

    def _pack_waiting(self) -> None:
        documents, self._waiting, self._waiting_size = self._waiting, [], 0
        if not documents:
            return
        self._documents += len(documents)
        if self._policy not in ("pad", "fill") and any(document.prompt for document in documents):
            raise UsageError(
                f"documents with a prompt need the packing 'pad' or 'fill', not {self._policy!r}: one row each"
            )
        if self._policy == "wrap" and any(document.label is not None for document in documents):
            raise UsageError(
                "documents with a label need the packing 'pad', 'fill' or 'sentence', not 'wrap': a row has one label"
            )
        pack = {"wrap": self._wrap, "pad": self._pad, "fill": self._pad, "sentence": self._sentences}[self._policy]
        pack(documents)

    def _wrap(self, documents: list[Document]) -> None:
        room = self._length - len(self._begin) - len(self._end)
        for ids, ends in self._spans([document.text for document in documents]):
            if not len(ids):
                self._empty += 1
                continue
            chain = np.append(ids, self._tokenizer.eot_id)
            reach = np.append(ends, ends[-1])  # end-of-text stands for no byte
            done = 0
            while done < len(chain):
                step = min(room - self._open_tokens, len(chain) - done)
                before = int(reach[done - 1]) if done else 0
                self._open.append(chain[done : done + step])
                self._open_tokens += step
                self._open_bytes += int(reach[done + step - 1]) - before
                done += step
                if self._open_tokens == room:
                    self._close_row()

    def _close_row(self) -> None:
        self._write([self._begin, *self._open, self._end], len(self._begin), self._open_bytes)
        self._open, self._open_tokens, self._open_bytes = [], 0, 0

    def _pad(self, documents: list[Document]) -> None:
        prompts = self._tokenizer.encode_batch([document.prompt for document in documents])
        spans = self._spans([document.text for document in documents])
        for document, prompt, (ids, ends) in zip(documents, prompts, spans, strict=True):
            if not len(ids):
                self._empty += 1
            elif len(prompt) >= self._length - len(self._begin) - len(self._end):
                self._dropped += 1
            else:
                head = np.concatenate([self._begin, np.array(prompt, dtype=np.int64)])
                self._row(head, ids, ends, prefix=len(head), label=self.words.number(document.label))

    def _sentences(self, documents: list[Document]) -> None:
        lines: list[str] = []
        labels: list[int | None] = []
        for document in documents:
            filled = [line for line in document.text.replace("\r\n", "\n").split("\n") if line.strip()]
            self._empty += not filled
            lines += filled
            labels += [self.words.number(document.label)] * len(filled)
        bos = self._tokenizer.bos_id
        # Without an anchor a begin token is a token like any other: noised and scored.
        head = np.array([] if bos is None else [bos], dtype=np.int64) if self._anchor == "none" else self._begin
        for label, (ids, ends) in zip(labels, self._spans(lines), strict=True):
            if len(ids):
                self._row(head, ids, ends, prefix=len(self._begin), label=label)

    def _row(self, head: Ints, ids: Ints, ends: Ints, *, prefix: int, label: int | None) -> None:
        """A text's row, or its rows: each with the head before and the end after its part of the text."""
        chain, reach = ids, ends
        if self._tokenizer.ends_texts:
            chain, reach = np.append(ids, self._tokenizer.eot_id), np.append(ends, ends[-1])
        room = self._length - len(head) - len(self._end)
        if self._policy == "fill" and (left := -len(chain) % room):
            chain = np.append(chain, np.full(left, self._tokenizer.eot_id))
            reach = np.append(reach, np.full(left, reach[-1]))
        for lo in range(0, len(chain) if self._go_on else 1, room):
            part = chain[lo : lo + room]
            num_bytes = int(reach[lo + len(part) - 1]) - (int(reach[lo - 1]) if lo else 0)
            self._write([head, part, self._end], prefix, num_bytes, label)
        self._cut += 0 if self._go_on else max(0, len(ids) + self._tokenizer.ends_texts - room)

    def _write(self, parts: list[Ints], prefix: int, num_bytes: int, label: int | None = None) -> None:
        tokens = np.concatenate(parts)
        if self._fixed_I is not None:
            self._fixed += int(self._fixed_I[tokens[prefix : len(tokens) - len(self._end)]].sum())
        self._writer.add(tokens, prefix, num_bytes, label)

    def _spans(self, texts: list[str]) -> list[Span]:
        """Ids, and the bytes up to and with each. What stands for a fixed id is given, so that its bytes count for
        nothing."""
        spans = self._tokenizer.encode_spans(texts)
        if self._fixed_I is None:
            return spans
        return [(ids, np.cumsum(np.diff(ends, prepend=0) * ~self._fixed_I[ids])) for ids, ends in spans]


def anchor_ids(tokenizer: Tokenizer, anchor: Anchor) -> tuple[list[int], list[int]]:
    """What stands before and after the text of an anchored row; end-of-text where the vocabulary has no begin token.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> anchor_ids(load_tokenizer("bytes"), "both")
    ([256], [256])
    """
    begin = tokenizer.eot_id if tokenizer.bos_id is None else tokenizer.bos_id
    return [begin] if anchor != "none" else [], [tokenizer.eot_id] if anchor == "both" else []


def pack_texts(
    texts: Iterable[str | Document],
    tokenizer: Tokenizer,
    policy: Policy = "wrap",
    length: int = 256,
    anchor: Anchor = "none",
    *,
    go_on: bool = False,
) -> Rows:
    """Rows in memory, for texts that are at hand. go_on: what is too long for its row takes further ones, uncut.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> rows = pack_texts(["abc"], load_tokenizer("bytes"), "pad", 6).take(np.array([0]))
    >>> rows.x.tolist(), rows.valid_len.tolist()
    ([[97, 98, 99, 256, 256, 256]], [4])
    """
    files = {name: io.BytesIO() for name in (*FILES, LABELS)}
    packer = _Packer(tokenizer, policy, length, anchor, cast(dict[str, BinaryIO], files), go_on)
    for text in texts:
        packer.add(Document(text) if isinstance(text, str) else text)
    report = packer.finish()
    if not packer.labelled:
        del files[LABELS]
    if not report.rows:
        raise DataError(f"there is no text to pack ({report.sentence()}); give at least one text that is not empty")
    kinds = dtypes(tokenizer.num_ids)
    parts = {name: np.frombuffer(file.getbuffer(), dtype=kinds[name]) for name, file in files.items()}
    words = list(packer.words.numbers)
    return Rows(parts, report, tokenizer.eot_id, tokenizer.num_ids, words, tokenizer.fixed_ids)


def rows_of(
    data: DataConfig,
    tokenizer: Tokenizer,
    part: Literal["train", "valid"],
    *,
    anchor: Anchor = "none",
    progress: Progress | None = None,
) -> Rows:
    """What a run trains on or validates on; anchor: the run's, `RunConfig.anchor`.

    >>> rows_of(load_config("demo").data, load_tokenizer("bytes"), "valid")  # doctest: +SKIP
    """
    cache = None if data.cache is None else Path(data.cache)
    options: dict[str, Any] = {"policy": data.packing, "length": data.length, "anchor": anchor}
    options |= {"cache_dir": cache, "progress": progress}
    train = data.train
    if data.share < 1 and train.tokenized:
        raise UsageError("data.share chooses texts, and these are token ids: leave it out, or train on the texts")
    if data.share < 1 and part == "train":
        train = Share(train, data.share, data.held_out if data.valid is None else 0.0)
    if data.valid is not None:
        for held_out in data.valid.parts:
            data.train.check_beside(held_out)
        return build_rows(train if part == "train" else data.valid, tokenizer, **options)
    return build_rows(train, tokenizer, part=part, held_out=data.held_out, **options)


def build_rows(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    policy: Policy = "wrap",
    length: int = 256,
    anchor: Anchor = "none",
    cache_dir: Path | None = None,
    part: Part = "all",
    held_out: float = 0.02,
    progress: Progress | None = None,
) -> Rows:
    """The corpus's rows, from the cache where they are there; None as folder is the user's cache.

    `part`: documents are held out by a hash of their content, whatever their order. Where that leaves one side without
    any (a single file, a few long texts), the last `held_out` of the rows are held out instead, and the report says so.
    `progress` is called with the characters read since the last call.

    >>> rows = build_rows(Stdlib(), load_tokenizer("bytes"), length=256, part="valid")  # doctest: +SKIP
    >>> print(rows.report.sentence())  # doctest: +SKIP
    """
    if corpus.tokenized:
        return shard_rows(cast(Tokens, corpus), tokenizer, part, policy=policy, length=length)
    if part != "all" and not 0 < held_out < 1:
        raise UsageError(f"held_out must lie between 0 and 1, got {held_out}")
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    source = [FORMAT, corpus.fingerprint(), tokenizer.fingerprint(), policy, length]
    source += [] if anchor == "none" else [anchor]

    def get(part: Part) -> tuple[Path, dict[str, Any]]:
        share = None if part == "all" else (part, held_out)
        key = hashlib.sha256(json.dumps([*source, share]).encode()).hexdigest()[:40]
        build = partial(_pack_corpus, corpus, tokenizer, policy, length, anchor, share, progress)
        return folder / key, cached(folder, key, build)

    path, manifest = get(part)
    if not manifest["split_rows"]:
        return _open(path, manifest, tokenizer)
    whole = _open(*get("all"), tokenizer)
    num = len(whole)
    if num < 2:
        raise DataError(f"the corpus fills one row of {length}: too little to hold a part out; name a corpus for valid")
    cut = num - min(num - 1, max(1, round(num * held_out)))
    return whole.between(*((0, cut) if part == "train" else (cut, num)), split_rows=True)


def _open(path: Path, manifest: dict[str, Any], tokenizer: Tokenizer) -> Rows:
    try:
        report = Report(**manifest["report"])
        kinds = dtypes(tokenizer.num_ids)
        names = [*FILES, LABELS] if LABELS in manifest["files"] else FILES
        parts = {name: np.memmap(path / name, dtype=kinds[name], mode="r") for name in names}
        words = [str(word) for word in manifest.get("words", ())]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise DataError(f"the token cache {path} cannot be opened: {e}; delete it, it is built again") from None
    rows = Rows(parts, report, tokenizer.eot_id, tokenizer.num_ids, words, tokenizer.fixed_ids)
    rows.key = path.name
    return rows


def _pack_corpus(
    corpus: Corpus,
    tokenizer: Tokenizer,
    policy: Policy,
    length: int,
    anchor: Anchor,
    share: tuple[str, float] | None,
    progress: Progress | None,
    work: Path,
) -> dict[str, Any]:
    """Write the rows of the corpus's part into `work`; returns the cache's manifest."""
    sides = [0, 0]  # documents with text: trained on, held out
    with ExitStack() as stack:
        files = {name: stack.enter_context((work / name).open("wb")) for name in (*FILES, LABELS)}
        packer = _Packer(tokenizer, policy, length, anchor, cast(dict[str, BinaryIO], files))
        for document in _read(corpus):
            valid = share is not None and content_place(document) < share[1]
            sides[valid] += bool(document.text.strip())
            packer.words.number(document.label)  # of both parts: their classes are the same
            if share is None or valid == (share[0] == "valid"):
                packer.add(document)
            if progress is not None:
                progress(len(document.text) + len(document.prompt))
        report = packer.finish()
    if not packer.labelled:
        (work / LABELS).unlink()
    if not any(sides):
        raise DataError("the corpus is empty: it has no document with text in it")
    split_rows = share is not None and not all(sides)
    if split_rows:  # the rows come from the cache of the whole; this entry only remembers that
        for path in list(work.iterdir()):
            path.unlink()
    elif not report.rows:
        raise DataError(
            f"no rows for the part {share[0] if share else 'all'}: {report.sentence()}; change length or corpus"
        )
    manifest = {"format": FORMAT, "split_rows": split_rows, "report": dataclasses.asdict(report)}
    return manifest | ({"words": list(packer.words.numbers)} if packer.words.numbers else {})


def _read(corpus: Corpus) -> Iterator[Document]:
    try:
        yield from corpus.documents()
    except OSError as e:  # a third party's corpus; here, so that it is not taken for trouble with the cache
        raise DataError(f"cannot read the corpus: {e.strerror or e}") from None
