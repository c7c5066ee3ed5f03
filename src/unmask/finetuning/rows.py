"""Examples as rows of ids: begin anchors, the text, for pairs the separator and the second text, end anchors.

For a network that reads both strands of DNA at once, conjoined rows contain only the sequence: any token around it
would be at the opposite end of the other strand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from unmask.errors import DataError, UsageError
from unmask.finetuning.examples import Example
from unmask.heads.task import Task

if TYPE_CHECKING:
    from unmask.data.tokenizers import Tokenizer
    from unmask.model import Model

CHUNK = 1024  # texts to tokenize together


class TaskBatch(NamedTuple):
    """Rows of ids, padded at the end. text_BL: positions that are not anchors. second_BL: from the second text of a
    pair to the row's end."""

    ids_BL: Tensor
    valid_BL: Tensor
    text_BL: Tensor
    second_BL: Tensor


@dataclass(frozen=True)
class TaskRows:
    """The rows of a split. cut: the number of tokens of each row that did not fit. second: where the second text of
    each row begins, or the row's length. complement: of a conjoined task."""

    rows: list[list[int]]
    frame: tuple[int, int]  # number of anchor ids at a row's begin and end
    pad_id: int
    cut: list[int]
    second: list[int]
    ends: int = 1  # number of ids that end a text
    complement: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def cut_texts(self) -> int:
        return sum(n > 0 for n in self.cut)

    def take(self, indices: Sequence[int]) -> TaskRows:
        """The rows with these indices, as a split of their own."""
        cut, second = ([numbers[i] for i in indices] for numbers in (self.cut, self.second))
        return replace(self, rows=[self.rows[i] for i in indices], cut=cut, second=second)

    def other_strand(self, i: int) -> list[int]:
        """A row with its text replaced by the reverse complement; the ids around the text stay."""
        row = self.rows[i]
        begin, end = self.frame[0], len(row) - self.frame[1] - self.ends
        return [*row[:begin], *(self.complement[id] for id in reversed(row[begin:end])), *row[end:]]

    def batch(self, indices: Sequence[int], *, other: Sequence[bool] | None = None) -> TaskBatch:
        """The rows with these indices, padded to the longest of them. other: which of them to read as the
        other strand."""
        turned = other if other is not None else [False] * len(indices)
        rows = [self.other_strand(i) if turn else self.rows[i] for i, turn in zip(indices, turned, strict=True)]
        longest = max(map(len, rows))
        ids_BL = torch.tensor([row + [self.pad_id] * (longest - len(row)) for row in rows])
        length_B1 = torch.tensor([[len(row)] for row in rows])
        second_B1 = torch.tensor([[self.second[i]] for i in indices])
        place_L = torch.arange(longest)
        (begin, end), valid_BL = self.frame, place_L < length_B1
        text_BL = (place_L >= begin) & (place_L < length_B1 - end)
        return TaskBatch(ids_BL, valid_BL, text_BL, valid_BL & (place_L >= second_B1))

    def by_length(self, size: int) -> Iterator[list[int]]:
        """The indices of all rows in groups of `size`, with rows of similar length together."""
        order = sorted(range(len(self.rows)), key=lambda i: (len(self.rows[i]), i))
        for lo in range(0, len(order), size):
            yield order[lo : lo + size]


def make_rows(examples: Sequence[Example], task: Task, model: Model) -> TaskRows:
    """The rows of texts or pairs. Of a pair that is too long, the longer text is cut at its end, token by token.

    A sequence of a conjoined task is cut equally at both ends, so that both strands are cut at the same positions.

    >>> make_rows([Example("a text", None, None, "")], task, model).rows  # doctest: +SKIP
    """
    tokenizer, begin, end = model.tokenizer, model.begin, model.end
    between = [tokenizer.eot_id] if not task.between else tokenizer.encode(task.between)
    last = [tokenizer.eot_id]  # so that a causal network has a position after the whole text
    if task.joins_vectors(model.denoiser):
        begin, last, end = [], [], []
    elif not tokenizer.ends_texts and end == last:
        end = []  # an end anchor that equals the text's end, such as [SEP], is not repeated
    room = task.length - len(begin) - len(end) - len(last) - (len(between) if task.pairs else 0)
    if room < 2:
        raise UsageError(f"a length of {task.length} leaves no room for a text: give at least {task.length - room + 2}")
    rows, cut, seconds = list[list[int]](), list[int](), list[int]()
    for lo in range(0, len(examples), CHUNK):
        part = examples[lo : lo + CHUNK]
        for one, (first, second) in zip(part, _encoded(part, task, tokenizer), strict=True):
            a, b = kept(len(first), len(second), room)
            start, stop = middle(len(first), room) if task.conjoined else (0, a)
            if not (begin or last or stop > start):
                raise DataError(f"{one.where or 'a text'} has no bases: give it some, or take it out")
            cut.append(len(first) + len(second) - (stop - start) - b)
            row = [*begin, *first[start:stop], *(between if task.pairs else [])]
            rows.append([*row, *(second[:b] if task.pairs else []), *last, *end])
            seconds.append(len(row) if task.pairs else len(rows[-1]))
    return TaskRows(rows, (len(begin), len(end)), tokenizer.eot_id, cut, seconds, len(last), task.complement)


def _encoded(part: Sequence[Example], task: Task, tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """The ids of texts and their pairs; a text that the vocabulary cannot represent is reported with its file
    and line."""
    try:
        firsts = tokenizer.encode_batch([one.text for one in part])
        seconds = tokenizer.encode_batch([one.pair or "" for one in part]) if task.pairs else [[]] * len(part)
    except DataError:
        for one in part:
            try:
                tokenizer.encode(one.text)
                tokenizer.encode(one.pair or "")
            except DataError as e:
                raise (DataError(f"{one.where}: {e}") if one.where else e) from None
        raise
    yield from zip(firsts, seconds, strict=True)


def middle(count: int, room: int) -> tuple[int, int]:
    """The range of a sequence that remains when it is cut equally at both ends.

    >>> middle(5, 8), middle(10, 8), middle(11, 8)
    ((0, 5), (1, 9), (2, 9))
    """
    over = max(0, (count - room + 1) // 2)
    return over, count - over


def kept(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts remain: the longer one is cut until both fit; at equal length the second.

    >>> kept(3, 4, 9), kept(10, 3, 9), kept(10, 9, 9), kept(10, 0, 9)
    ((3, 4), (6, 3), (5, 4), (9, 0))
    """
    over = first + second - room
    if over <= 0:
        return first, second
    apart = min(over, abs(first - second))
    first, second = (first - apart, second) if first > second else (first, second - apart)
    rest = over - apart
    return first - rest // 2, second - (rest - rest // 2)
