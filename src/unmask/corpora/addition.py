"""Addition problems: carries run from the last digit to the first, so the end determines the beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from unmask.corpora import Corpus, Document
from unmask.errors import UsageError
from unmask.registry import check_fields
from unmask.rng import fold, row_keys, uniform

Direction = Literal["forward", "reversed"]
Part = Literal["train", "test"]
PROMPT_END = {"forward": "=", "reversed": "=<"}  # < marks numbers written from their last digit on
TEST_SHARE = 0.1  # share of all sums, by a hash
_CHUNK = 4096
_MAX_DIGITS = 17  # int64 holds the sum of ten such numbers
_DIGIT, _PROPAGATES = range(2)  # counters of the draws


@dataclass(frozen=True, kw_only=True)
class Addition(Corpus):
    """`num` sums of `terms` numbers of `digits` digits; the sum is the text, the numbers are its prompt.

    A column whose digit sum ends in nine passes a carry on; `chains` is the share of columns that are made to, so that
    carry chains are long. In `forward` writing the first digits depend on the last; `reversed` writes all numbers from
    their last digit on, in the direction of carries, so that corresponding digits are equally far apart in both. The
    answer has digits + 1 digits, including leading zeros.

    A tenth of all possible sums, by a hash, only ever occurs in the part `test`, whatever the seed.

    >>> next(Addition(num=1, digits=4, terms=2).documents())
    Document(text='11949', prompt='4733+7216=', label=None)
    """

    num: int = 200_000
    digits: int = 8
    terms: int = 2
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
        if not 2 <= self.terms <= 10:
            raise UsageError(f"terms must be from 2 to 10, whose sum has one digit more; got {self.terms}")
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
            sums = self._sums(start)
            for numbers in sums[:left]:
                yield self._document(numbers)
            left -= min(left, len(sums))
            start += _CHUNK

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def _document(self, numbers: list[int]) -> Document:
        answer = f"{sum(numbers):0{self.digits + 1}d}"
        terms = [f"{number:0{self.digits}d}" for number in numbers]
        if self.direction == "reversed":
            answer, terms = answer[::-1], [term[::-1] for term in terms]
        return Document(answer, "+".join(terms) + self.prompt_end)

    def _sums(self, start: int) -> list[list[int]]:
        """The numbers to add, for those draws of a chunk whose sums belong to this part."""
        key_B = row_keys(self.seed, torch.arange(start, start + _CHUNK))
        place_D = torch.arange(self.digits)
        digit_BKD = (uniform(key_B[:, None, None], _DIGIT, torch.arange(self.terms)[:, None], place_D) * 10).long()
        nine_BD = (9 - digit_BKD[:, :-1].sum(dim=1)) % 10
        chained_BD = uniform(key_B[:, None], _PROPAGATES, place_D) < self.chains
        digit_BKD[:, -1] = torch.where(chained_BD, nine_BD, digit_BKD[:, -1])
        number_BK = digit_BKD.new_zeros(digit_BKD.shape[:2])
        for digit_BK in digit_BKD.unbind(dim=2):
            number_BK = number_BK * 10 + digit_BK
        hashed_B = torch.zeros(len(number_BK), dtype=torch.long)
        for number_B in number_BK.unbind(dim=1):
            hashed_B = fold(hashed_B, number_B)
        test_B = uniform(hashed_B) < TEST_SHARE
        mine: list[list[int]] = number_BK[test_B if self.part == "test" else ~test_B].tolist()
        return mine


def longest_chain(numbers: Sequence[int]) -> int:
    """The longest run of columns whose carry depends on the carry before it, plus the column that starts it.

    It says how far the end of a sum reaches.

    >>> longest_chain([125, 875]), longest_chain([55, 55]), longest_chain([12, 13])
    (3, 1, 0)
    """
    longest = run = carry = 0
    left = list(numbers)
    while any(left):
        column = sum(number % 10 for number in left)
        carried = (column + carry) // 10
        handed_on = carried != column // 10  # whether the carry would differ without the carry before it
        run = run + 1 if run and handed_on else int(carried > 0)
        longest, carry = max(longest, run), carried
        left = [number // 10 for number in left]
    return longest
