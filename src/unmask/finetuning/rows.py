"""Examples as rows of ids: the model's frame, the text, for pairs what stands between and the second text, the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.errors import UsageError
from unmask.finetuning.examples import Example
from unmask.heads.task import Task

if TYPE_CHECKING:
    from unmask.model import Model

CHUNK = 1024  # texts that are tokenized together


@dataclass(frozen=True)
class TaskBatch:
    """Rows of ids with padding at their ends. text_BL: what is no frame around a row."""

    ids_BL: Tensor
    valid_BL: Tensor
    text_BL: Tensor


@dataclass(frozen=True)
class TaskRows:
    """Rows of a split. cut: how many tokens of each were beyond the length."""

    rows: list[list[int]]
    frame: tuple[int, int]  # how many ids at a row's begin and end are no text
    pad_id: int
    cut: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def cut_texts(self) -> int:
        return sum(n > 0 for n in self.cut)

    def batch(self, indices: Sequence[int]) -> TaskBatch:
        """The rows of these numbers, as long as the longest of them."""
        rows = [self.rows[i] for i in indices]
        longest = max(map(len, rows))
        ids_BL = torch.tensor([row + [self.pad_id] * (longest - len(row)) for row in rows])
        length_B1 = torch.tensor([[len(row)] for row in rows])
        place_L = torch.arange(longest)
        begin, end = self.frame
        return TaskBatch(ids_BL, place_L < length_B1, (place_L >= begin) & (place_L < length_B1 - end))

    def by_length(self, size: int) -> Iterator[list[int]]:
        """The numbers of all rows, `size` at a time, those of like length together."""
        order = sorted(range(len(self.rows)), key=lambda i: (len(self.rows[i]), i))
        for lo in range(0, len(order), size):
            yield order[lo : lo + size]


def make_rows(examples: Sequence[Example], task: Task, model: Model) -> TaskRows:
    """The rows of texts or pairs. Of a pair that is too long the longer text is cut, token by token, at its end.

    >>> make_rows([Example("a text", None, None, "")], task, model).rows  # doctest: +SKIP
    """
    tokenizer, begin, end = model.tokenizer, model.begin, model.end
    between = [tokenizer.eot_id] if not task.between else tokenizer.encode(task.between)
    last = [tokenizer.eot_id]  # so that a causal network has a position that has read the whole text
    if not tokenizer.ends_texts and end == last:
        end = []  # a frame that ends as the text does, such as [SEP], does so once
    room = task.length - len(begin) - len(end) - len(last) - (len(between) if task.pairs else 0)
    if room < 2:
        raise UsageError(f"a length of {task.length} leaves no room for a text: give at least {task.length - room + 2}")
    rows, cut = list[list[int]](), list[int]()
    for lo in range(0, len(examples), CHUNK):
        part = examples[lo : lo + CHUNK]
        firsts = tokenizer.encode_batch([one.text for one in part])
        seconds = tokenizer.encode_batch([one.pair or "" for one in part]) if task.pairs else [[]] * len(part)
        for first, second in zip(firsts, seconds, strict=True):
            a, b = kept(len(first), len(second), room)
            cut.append(len(first) + len(second) - a - b)
            rows.append([*begin, *first[:a], *([*between, *second[:b]] if task.pairs else []), *last, *end])
    return TaskRows(rows, (len(begin), len(end)), tokenizer.eot_id, cut)


def kept(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay: the longer one loses until both fit, at equal length the second.

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
