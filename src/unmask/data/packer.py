"""Documents → tokens → rows: how each packing policy treats a batch of documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, get_args

import numpy as np

from unmask.corpora import Document
from unmask.corpora.labels import Words
from unmask.data.rows import Anchor, Ints, Policy, Report, RowWriter, fixed_table
from unmask.data.tokenizers import Span, Tokenizer
from unmask.errors import UsageError, did_you_mean

CHUNK = 1 << 20  # characters to tokenize together


@dataclass(frozen=True)
class Tokenized:
    """Documents that were tokenized together."""

    documents: list[Document]
    spans: list[Span]  # ids and cumulative bytes of every text; of every line under `sentence`
    prompts: list[list[int]]  # under `pad` and `fill`
    lines: list[int]  # under `sentence`: the number of lines of each document


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into lists of at least CHUNK characters."""
    waiting: list[Document] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += len(document.text) + len(document.prompt) + 16
        if size > CHUNK:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


class Packer:
    """Writes rows: call `pack` with each result of `tokenize`, batch by batch, then `finish`."""

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
        self._fixed = 0  # tokens of fixed ids in the texts
        self._writer = RowWriter(files, tokenizer.num_ids)
        self.words = Words()  # the words of classes
        self._documents = self._cut = self._dropped = self._empty = 0
        # wrap: the unfinished row, as pieces of tokens
        self._open: list[Ints] = []
        self._open_tokens = self._open_bytes = 0

    def tokenize(self, documents: list[Document]) -> Tokenized:
        """The tokens of a batch.

        It does not change the packer, so a thread may run it while another batch is packed.
        """
        if self._policy not in ("pad", "fill") and any(document.prompt for document in documents):
            raise UsageError(
                f"documents with a prompt need the packing 'pad' or 'fill', not {self._policy!r}: one row each"
            )
        if self._policy == "wrap" and any(document.label is not None for document in documents):
            raise UsageError(
                "documents with a label need the packing 'pad', 'fill' or 'sentence', not 'wrap': a row has one label"
            )
        if self._policy == "sentence":
            lines = [_lines(document) for document in documents]
            spans = self._spans([line for some in lines for line in some])
            return Tokenized(documents, spans, [], [len(some) for some in lines])
        prompts = [] if self._policy == "wrap" else [document.prompt for document in documents]
        encoded = self._tokenizer.encode_batch(prompts) if prompts else []
        return Tokenized(documents, self._spans([document.text for document in documents]), encoded, [])

    def pack(self, batch: Tokenized) -> None:
        """Write the rows that a batch completes."""
        self._documents += len(batch.documents)
        pack = {"wrap": self._wrap, "pad": self._pad, "fill": self._pad, "sentence": self._sentences}[self._policy]
        pack(batch)

    def finish(self) -> Report:
        """Write the unfinished row and report what became of the documents."""
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

    def _wrap(self, batch: Tokenized) -> None:
        room = self._length - len(self._begin) - len(self._end)
        for ids, ends in batch.spans:
            if not len(ids):
                self._empty += 1
                continue
            chain = np.append(ids, self._tokenizer.eot_id)
            reach = np.append(ends, ends[-1])  # end-of-text has no bytes
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

    def _pad(self, batch: Tokenized) -> None:
        for document, prompt, (ids, ends) in zip(batch.documents, batch.prompts, batch.spans, strict=True):
            if not len(ids):
                self._empty += 1
            elif len(prompt) >= self._length - len(self._begin) - len(self._end):
                self._dropped += 1
            else:
                head = np.concatenate([self._begin, np.array(prompt, dtype=np.int64)])
                self._row(head, ids, ends, prefix=len(head), label=self.words.number(document.label))

    def _sentences(self, batch: Tokenized) -> None:
        labels: list[int | None] = []
        for document, lines in zip(batch.documents, batch.lines, strict=True):
            self._empty += not lines
            labels += [self.words.number(document.label)] * lines
        bos = self._tokenizer.bos_id
        # Without an anchor, a begin token is an ordinary token: noised and scored.
        head = np.array([] if bos is None else [bos], dtype=np.int64) if self._anchor == "none" else self._begin
        for label, (ids, ends) in zip(labels, batch.spans, strict=True):
            if len(ids):
                self._row(head, ids, ends, prefix=len(self._begin), label=label)

    def _row(self, head: Ints, ids: Ints, ends: Ints, *, prefix: int, label: int | None) -> None:
        """Write a text's row or rows, each with the head before and the end after its part of the text."""
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
        """Ids and their cumulative bytes. Fixed ids are conditioned on, so their bytes do not count."""
        spans = self._tokenizer.encode_spans(texts)
        if self._fixed_I is None:
            return spans
        return [(ids, np.cumsum(np.diff(ends, prepend=0) * ~self._fixed_I[ids])) for ids, ends in spans]


def _lines(document: Document) -> list[str]:
    """The non-blank lines of a text."""
    return [line for line in document.text.replace("\r\n", "\n").split("\n") if line.strip()]


def anchor_ids(tokenizer: Tokenizer, anchor: Anchor) -> tuple[list[int], list[int]]:
    """The ids before and after the text of an anchored row; end-of-text if the vocabulary has no begin token.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> anchor_ids(load_tokenizer("bytes"), "both")
    ([256], [256])
    """
    begin = tokenizer.eot_id if tokenizer.bos_id is None else tokenizer.bos_id
    return [begin] if anchor != "none" else [], [tokenizer.eot_id] if anchor == "both" else []
