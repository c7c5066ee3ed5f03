"""Sums of two numbers, whose end fixes their beginning: carries run from the last digit to the first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unmask.corpora import Corpus, Document
from unmask.errors import UsageError
from unmask.registry import check_fields
from unmask.rng import fold, row_keys, uniform

Direction = Literal["forward", "reversed"]
Part = Literal["train", "test"]
PROMPT_END = {"forward": "=", "reversed": "=<"}  # < says that the answer is written from its last digit on
TEST_SHARE = 0.1  # of all pairs of numbers, by a hash of the pair
_CHUNK = 4096
_MAX_DIGITS = 18  # int64 has no more
_FIRST, _SECOND, _PROPAGATES = range(3)  # counters of the draws


@dataclass(frozen=True, kw_only=True)
class Addition(Corpus):
    """`num` sums of two numbers of `digits` digits; the sum is the text, the two numbers its prompt.

    A pair of digits that add up to nine hands a carry on; `chains` is the share of them that is made to, so that chains
    of carries are long. What comes first in `forward` writing depends on what comes last; `reversed` writes the answer
    from its last digit on, as carries run. The answer has digits + 1 digits, zeros at its head among them.

    Of all pairs a tenth, by a hash, is only ever in the part `test`, whatever the seed.

    >>> next(Addition(num=1, digits=4).documents())
    Document(text='04866', prompt='4576+0290=', label=None)
    """

    num: int = 200_000
    digits: int = 8
    direction: Direction = "forward"
    part: Part = "train"
    chains: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num < 1:
            raise UsageError(f"num must be at least 1, got {self.num}")
        if not 1 <= self.digits <= _MAX_DIGITS:
            raise UsageError(f"digits must be from 1 to {_MAX_DIGITS}, got {self.digits}")
        if not 0 <= self.chains < 1:
            raise UsageError(f"chains is a share from 0 to below 1, got {self.chains}")

    @property
    def has_prompts(self) -> bool:
        return True

    @property
    def prompt_end(self) -> str:
        return PROMPT_END[self.direction]

    def documents(self) -> Iterator[Document]:
        left, start = self.num, 0
        while left:
            pairs = self._pairs(start)
            for a, b in pairs[:left]:
                yield self._document(a, b)
            left -= min(left, len(pairs))
            start += _CHUNK

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def _document(self, a: int, b: int) -> Document:
        answer = f"{a + b:0{self.digits + 1}d}"
        text = answer if self.direction == "forward" else answer[::-1]
        return Document(text, f"{a:0{self.digits}d}+{b:0{self.digits}d}{self.prompt_end}")

    def _pairs(self, start: int) -> list[list[int]]:
        """The pairs of this part among a chunk of draws."""
        key_B1 = row_keys(self.seed, torch.arange(start, start + _CHUNK))[:, None]
        place_D = torch.arange(self.digits)
        first_BD = (uniform(key_B1, _FIRST, place_D) * 10).long()
        second_BD = (uniform(key_B1, _SECOND, place_D) * 10).long()
        second_BD = torch.where(uniform(key_B1, _PROPAGATES, place_D) < self.chains, 9 - first_BD, second_BD)
        pair_B2 = torch.stack([_number(first_BD), _number(second_BD)], dim=1)
        hashed_B = fold(fold(torch.tensor(0), pair_B2[:, 0]), pair_B2[:, 1])
        test_B = uniform(hashed_B) < TEST_SHARE
        mine: list[list[int]] = pair_B2[test_B if self.part == "test" else ~test_B].tolist()
        return mine


def _number(digits_BD: Tensor) -> Tensor:
    number_B = digits_BD.new_zeros(len(digits_BD))
    for digit_B in digits_BD.unbind(dim=1):
        number_B = number_B * 10 + digit_B
    return number_B


def longest_carry(a: int, b: int) -> int:
    """How many digits the longest run of a carry reaches: one where a pair makes it, one more for each that hands it
    on.

    >>> longest_carry(125, 875), longest_carry(55, 55), longest_carry(12, 13)
    (3, 1, 0)
    """
    longest = run = 0
    while a or b:
        total = a % 10 + b % 10
        run = run + 1 if run and total == 9 else int(total > 9)
        longest = max(longest, run)
        a, b = a // 10, b // 10
    return longest
