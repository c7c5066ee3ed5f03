"""Packed rows: how they are written as a stream and read through a memory map."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from unmask.corpora.labels import class_words, is_number
from unmask.data.order import Blocks
from unmask.errors import DataError, UsageError, did_you_mean

Ints = NDArray[np.int64]
Policy = Literal["wrap", "pad", "fill", "sentence"]
Windows = Literal["fixed", "shifted"]
Anchor = Literal["none", "begin", "both"]
"""What frames each row's text, never noised, scored or part of the text: nothing, a begin token, or also an end marker.

Relative positions alone give every position of an all-masked row the same law: a fixed token at an end breaks the tie.
"""
FILES = ("tokens", "ends", "prefixes", "bytes")  # bytes: of the scored text of each row
COUNTED = 1 << 24  # tokens of a memory map to count at a time
LABELS = "labels"  # a further file if there are labels: each row's class, or its word's index, plus 1; 0 for none


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of the documents."""

    policy: Policy
    length: int
    anchor: Anchor = "none"
    documents: int = 0  # documents read in this part
    rows: int = 0
    tokens: int = 0  # excluding padding, prompts and anchors
    bytes: int = 0  # UTF-8 bytes of the text whose tokens are in the rows
    cut_tokens: int = 0  # did not fit their row
    dropped_documents: int = 0  # the prompt alone filled the row
    empty_documents: int = 0
    split_rows: bool = False  # too few documents to hold some out: the last rows are held out instead

    def sentence(self) -> str:
        """One line for the user.

        >>> Report(policy="pad", length=8, documents=2, rows=2, tokens=9, bytes=7, cut_tokens=3).sentence()
        '2 documents in 2 rows of up to 8: 9 tokens, 7 bytes; 3 tokens cut'
        """
        rows = f"{_count(self.rows, 'row')} of {'' if self.policy == 'wrap' else 'up to '}{self.length:,}"
        head = f"{_count(self.documents, 'document')} in {rows}"
        parts = [f"{head}: {_count(self.tokens, 'token')}, {_count(self.bytes, 'byte')}"]
        if self.cut_tokens:
            parts.append(f"{_count(self.cut_tokens, 'token')} cut")
        if self.dropped_documents:
            parts.append(f"{_count(self.dropped_documents, 'document')} dropped, the prompt fills the row")
        if self.empty_documents:
            parts.append(f"{_count(self.empty_documents, 'empty document')} skipped")
        if self.split_rows:
            parts.append("too few documents to hold some out, so the last rows are held out")
        return "; ".join(parts)


@dataclass(frozen=True)
class RowBatch:
    """Rows as packed, before any noise: produced by loaders and consumed by `unmask.data.batch.batch_of`.

    >>> rows = RowBatch(np.array([3, 1]), np.zeros((2, 4), np.int64), np.array([4, 2]), np.array([0, 0]))
    >>> rows.part(1, 2).indices
    array([1])
    """

    indices: Ints  # [n], indices among all rows
    x: Ints  # [n, L], padded at the end
    valid_len: Ints  # [n]
    prefix_len: Ints  # [n]: tokens at the beginning that are neither noised nor scored
    label: Ints | None = None  # [n], the rows' classes, -1 for none; None: the documents carry no labels
    suffix: int = 0  # tokens at the end of each row that are neither noised nor scored
    fixed_ids: tuple[int, ...] = ()  # ids that are neither noised nor scored at any position

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, lo: int, hi: int) -> RowBatch:
        """The rows lo..hi, such as one micro-batch."""
        arrays = (self.indices, self.x, self.valid_len, self.prefix_len)
        indices, x, valid_len, prefix_len = (array[lo:hi] for array in arrays)
        label = None if self.label is None else self.label[lo:hi]
        return RowBatch(indices, x, valid_len, prefix_len, label, self.suffix, self.fixed_ids)


def _count(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


class Rows:
    """Fixed-length rows, on disk or in memory; padding is end-of-text.

    >>> from unmask.data.packing import pack_texts
    >>> from unmask.data.tokenizers import load_tokenizer
    >>> rows = pack_texts(["ab", "c"], load_tokenizer("bytes"), "wrap", 3)
    >>> rows.take(np.array([1])).x.tolist()
    [[99, 256, 256]]
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        report: Report,
        eot_id: int,
        num_ids: int,
        words: Sequence[str] = (),
        fixed_ids: tuple[int, ...] = (),
    ) -> None:
        self.report, self.length = report, report.length
        self._tokens, self._prefixes, self._bytes = parts["tokens"], parts["prefixes"], parts["bytes"]
        self._ends, self._labels = parts["ends"], parts.get(LABELS)
        self._eot_id, self._num_ids = eot_id, num_ids
        self.fixed_ids = fixed_ids  # neither noised nor scored at any position
        self._lo, self._hi = 0, len(self._ends)
        self.blocks: Blocks | None = None  # for rows that are read from shards, a few of which are in memory at a time
        self.key = ""  # cache key: determined by the corpus's content, the tokenizer and the packing
        self.words = tuple(words)  # words of classes, in order of appearance; see `classed`
        self._class_of: Ints | None = None  # index of a word plus 1 → class plus 1

    def __len__(self) -> int:
        return self._hi - self._lo

    def take(self, indices: Ints, shift: Ints | None = None) -> RowBatch:
        """These rows; without labels if those are words whose classes have not been determined yet.

        shift: [n], read each row this many tokens later in the stream of `wrap`, whose end is joined to its beginning.
        Rows with equal shifts contain every token once, like the rows themselves, and each keeps its length.
        """
        at = self._at(indices)
        ends = self._ends[at].astype(np.int64)
        starts = np.where(at > 0, self._ends[np.maximum(at - 1, 0)], 0).astype(np.int64)
        valid_n = ends - starts
        first, last = self._stream()
        if len(at) and not (
            valid_n.min() > 0
            and valid_n.max() <= self.length
            and first <= starts.min()
            and ends.max() <= last <= len(self._tokens)
        ):
            raise _damaged()
        if shift is not None:
            if self.report.policy != "wrap":
                raise UsageError(f"rows of the packing {self.report.policy!r} hold whole texts: only 'wrap' is shifted")
            starts = first + (starts - first + shift) % (last - first)
        x_nl = np.full((len(at), self.length), self._eot_id, dtype=np.int64)
        for row, start, size in zip(x_nl, starts.tolist(), valid_n.tolist(), strict=True):
            head = min(size, last - start)
            row[:head] = self._tokens[start : start + head]
            row[head:size] = self._tokens[first : first + size - head]
        if len(at) and x_nl.max() >= self._num_ids:
            raise _damaged()
        label = None if self.words and self._class_of is None else self.labels_of(indices)
        return RowBatch(indices, x_nl, valid_n, self._prefixes[at].astype(np.int64), label, self.suffix, self.fixed_ids)

    def _stream(self) -> tuple[int, int]:
        """Where the tokens of these rows begin and end in the file; data outside may be held out."""
        return int(self._ends[self._lo - 1]) if self._lo else 0, int(self._ends[self._hi - 1]) if self._hi else 0

    @property
    def suffix(self) -> int:
        """Tokens at the end of every row that are neither noised nor scored."""
        return 1 if self.report.anchor == "both" else 0

    def counts(self, indices: Ints) -> tuple[int, int]:
        """Token counts of these rows: scored tokens, and tokens including prompts and anchors."""
        at = self._at(indices)
        starts = np.where(at > 0, self._ends[np.maximum(at - 1, 0)], 0).astype(np.int64)
        tokens = int((self._ends[at].astype(np.int64) - starts).sum())
        scored = tokens - int(self._prefixes[at].sum(dtype=np.int64)) - self.suffix * len(at)
        return scored - self._num_fixed(at, starts), tokens

    def _num_fixed(self, at: Ints, starts: Ints) -> int:
        """The number of tokens of fixed ids in these rows, between prompt and suffix."""
        if not self.fixed_ids:
            return 0
        fixed_I = fixed_table(self.fixed_ids, self._num_ids)
        firsts, lasts = starts + self._prefixes[at], self._ends[at].astype(np.int64) - self.suffix
        texts = zip(firsts.tolist(), lasts.tolist(), strict=True)
        return sum(int(fixed_I[self._tokens[first:last]].sum()) for first, last in texts)

    def token_counts(self) -> Ints:
        """[num_ids] how often each id occurs in these rows, including prompts and anchors.

        >>> from unmask.data.packing import pack_texts
        >>> from unmask.data.tokenizers import load_tokenizer
        >>> int(pack_texts(["abba", "b"], load_tokenizer("bytes"), "wrap", 3).token_counts()[ord("b")])
        3
        """
        (first, last), counts = self._stream(), np.zeros(self._num_ids, dtype=np.int64)
        for lo in range(first, last, COUNTED):
            found = np.bincount(self._tokens[lo : min(lo + COUNTED, last)], minlength=self._num_ids)
            if len(found) > self._num_ids:
                raise _damaged()
            counts += found
        return counts

    def typical_length(self) -> int | None:
        """The mean number of tokens per row, including prompt and anchors, if each row is one text; None for full
        windows.

        >>> from unmask.data.packing import pack_texts
        >>> from unmask.data.tokenizers import load_tokenizer
        >>> pack_texts(["abc", "abcde"], load_tokenizer("bytes"), "pad", 16).typical_length()
        5
        """
        if self.report.policy == "wrap":
            return None
        first, last = self._stream()
        return round((last - first) / len(self))

    def bytes_of(self, indices: Ints) -> Ints:
        """UTF-8 bytes of the scored text in each of these rows: the denominator of bits per byte."""
        counts: Ints = self._bytes[self._at(indices)].astype(np.int64)
        return counts

    def scored(self, indices: Ints) -> Iterator[Ints]:
        """The scored tokens of each of these rows: without prompt, anchors and padding.

        >>> from unmask.data.packing import pack_texts
        >>> from unmask.data.tokenizers import load_tokenizer
        >>> [x.tolist() for x in pack_texts(["ab"], load_tokenizer("bytes"), "pad", 8).scored(np.array([0]))]
        [[97, 98, 256]]
        """
        for lo in range(0, len(indices), 1024):
            part = self.take(indices[lo : lo + 1024])
            for x, valid, prefix in zip(part.x, part.valid_len, part.prefix_len, strict=True):
                yield x[prefix : valid - part.suffix]

    @property
    def labelled(self) -> bool:
        """Whether the documents have labels."""
        return self._labels is not None

    def labels_of(self, indices: Ints) -> Ints | None:
        """The classes of these rows, -1 for none; None if the documents have no labels."""
        if self._labels is None:
            return None
        return self._classes(self._labels[self._at(indices)]) - 1

    def _classes(self, stored_n: Any) -> Ints:
        """Stored values → classes plus 1."""
        if self._class_of is not None:
            return np.asarray(self._class_of[stored_n])
        if self.words:
            raise UsageError(
                f"the labels are words such as {self.words[0]!r}: Rows.classed says which classes they are"
            )
        classes: Ints = stored_n.astype(np.int64)
        return classes

    @property
    def class_words(self) -> tuple[str, ...]:
        """The words of the classes 0, 1, ... of a model trained on these rows; empty if classes are numbers.

        >>> from unmask.corpora import Document
        >>> from unmask.data.packing import pack_texts
        >>> from unmask.data.tokenizers import load_tokenizer
        >>> documents = [Document("hm", label="bad"), Document("ah", label="a")]
        >>> pack_texts(documents, load_tokenizer("bytes"), "pad").class_words
        ('a', 'bad')
        """
        return class_words(self.words)

    def classed(self, labels: Sequence[str]) -> Rows:
        """The same rows, with words mapped to the classes of a model with these `labels`; an unknown word is refused.

        >>> from unmask.corpora import Document
        >>> from unmask.data.packing import pack_texts
        >>> from unmask.data.tokenizers import load_tokenizer
        >>> rows = pack_texts([Document("hm", label="bad")], load_tokenizer("bytes"), "pad", 8)
        >>> rows.classed(["awful", "bad"]).labels_of(np.array([0])).tolist()
        [1]
        """
        number = (
            {word: i for i, word in enumerate(labels)} if labels else {w: int(w) for w in self.words if is_number(w)}
        )
        for word in self.words:
            if word not in number and labels:
                raise DataError(
                    f"the corpus has the label {word!r}, which the model does not know; {did_you_mean(word, labels)}"
                )
            if word not in number:
                raise DataError(
                    f"the corpus has the label {word!r}, the model's classes are numbers: give their numbers"
                )
        view = copy.copy(self)
        view._class_of = (
            np.array([0, *(number[word] + 1 for word in self.words)], dtype=np.int64) if self.words else None
        )
        return view

    def check_labels(self, classes: int) -> None:
        """Refuse a denoiser whose number of classes does not fit these labels."""
        if self._labels is None:
            if classes:
                raise DataError(
                    "the denoiser has classes and the corpus no labels: name its label_field, or leave out classes"
                )
            return
        most = int(self._classes(self._labels[self._lo : self._hi]).max(initial=0))
        if (words := len(self.class_words)) > classes:
            raise DataError(f"the corpus has {words} labels that are words: set denoiser.classes = {words} or more")
        if most > classes:
            raise DataError(f"the corpus has labels up to {most - 1}: set denoiser.classes = {most} or more")

    def between(self, lo: int, hi: int, *, split_rows: bool = False) -> Rows:
        """The rows lo..hi as a separate `Rows` with their own counts; cut and dropped tokens are counted only in the
        whole."""
        view = Rows.__new__(Rows)
        view.__dict__.update(self.__dict__)
        view._lo, view._hi = self._lo + lo, self._lo + hi
        view.report = dataclasses.replace(
            self.report,
            rows=hi - lo,
            tokens=view.counts(np.arange(hi - lo))[0],
            bytes=int(self._bytes[view._lo : view._hi].sum(dtype=np.int64)),
            split_rows=split_rows or self.report.split_rows,
        )
        return view

    def _at(self, indices: Ints) -> Ints:
        at = np.asarray(indices, dtype=np.int64)
        if len(at) and not (at.min() >= 0 and at.max() < len(self)):
            raise IndexError(f"row {at.min() if at.min() < 0 else at.max()} of {len(self)}")
        return at + self._lo


def _damaged() -> DataError:
    return DataError("the token cache is damaged; delete its folder, it is built again")


def fixed_table(fixed_ids: Sequence[int], num_ids: int) -> NDArray[np.bool_]:
    """[num_ids] True for fixed ids."""
    table = np.zeros(num_ids, dtype=np.bool_)
    table[list(fixed_ids)] = True
    return table


def dtypes(num_ids: int) -> dict[str, np.dtype[Any]]:
    """The dtype of each file; always little-endian, because caches are copied between machines."""
    kinds = ("<u2" if num_ids <= 1 << 16 else "<u4", "<u8", "<u4", "<u4", "<u4")
    return {name: np.dtype(kind) for name, kind in zip((*FILES, LABELS), kinds, strict=True)}


class RowWriter:
    """Appends rows to number files through a buffer."""

    def __init__(self, files: Mapping[str, BinaryIO], num_ids: int) -> None:
        self._files, self._dtypes = files, dtypes(num_ids)
        self._buffers: dict[str, list[Any]] = {name: [] for name in (*FILES, LABELS)}
        self._buffered = 0
        self.labelled = False
        self.rows = self.total = self.prefix_total = self.byte_total = 0

    def add(self, tokens: Ints, prefix: int, num_bytes: int, label: int | None = None) -> None:
        """One row, without its padding."""
        self.rows += 1
        self.total += len(tokens)
        self.prefix_total += prefix
        self.byte_total += num_bytes
        self.labelled |= label is not None
        values = (tokens, self.total, prefix, num_bytes, 0 if label is None else label + 1)
        for name, value in zip((*FILES, LABELS), values, strict=True):
            self._buffers[name].append(value)
        self._buffered += len(tokens) + 8
        if self._buffered > 1 << 20:
            self.flush()

    def flush(self) -> None:
        """Write the buffer to the files."""
        for name, values in self._buffers.items():
            if values:
                whole = np.concatenate(values) if name == "tokens" else np.array(values, dtype=np.int64)
                self._files[name].write(whole.astype(self._dtypes[name]).tobytes())
                values.clear()
        self._buffered = 0
