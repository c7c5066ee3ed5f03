"""Augmentation: changes rows as they are read, so that a text is not always read as it was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from unmask.data.complement import complement_of
from unmask.data.order import coins
from unmask.data.rows import Ints, RowBatch
from unmask.data.splitting import SplitTokens, merged_from
from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.config import DataConfig
    from unmask.data.tokenizers import Tokenizer

IUPAC = {bytes([letter]) for letter in b"ACGTUNRYSWKMBDHV"}  # IUPAC codes of nucleotides, including ambiguous ones


@dataclass(frozen=True)
class ReverseComplement:
    """Replaces a row by its reverse complement every second time that it is read.

    A keyed coin decides which strand comes first. Prompts and end markers keep their places.
    """

    complement_I: Ints
    seed: int

    def __call__(self, rows: RowBatch, epochs: Ints) -> RowBatch:
        x = rows.x.copy()
        for i in np.flatnonzero(coins(self.seed, rows.indices) ^ (epochs % 2 == 1)):
            text = slice(int(rows.prefix_len[i]), int(rows.valid_len[i]) - rows.suffix)
            x[i, text] = self.complement_I[x[i, text]][::-1]
        return replace(rows, x=x)


def augmentation(data: DataConfig, tokenizer: Tokenizer, seed: int) -> Callable[[RowBatch, Ints], RowBatch] | None:
    """The augmentation that the recipe requests; None: rows are read unchanged.

    >>> from unmask.config import DataConfig
    >>> from unmask.data.tokenizers import load_tokenizer
    >>> augmentation(DataConfig(augment="reverse_complement"), load_tokenizer("dna"), 0).complement_I.tolist()
    [3, 2, 1, 0, 4, 5, 6]
    """
    if data.split_tokens:
        return SplitTokens(merged_from(tokenizer), data.split_tokens, seed)
    if data.augment == "none":
        return None
    complement = complement_of(tokenizer)
    words = [word for word in tokenizer.spellings()[1] if word is not None and len(word) == 1 and word.isalpha()]
    if others := [word.decode() for word in words if word.upper() not in IUPAC]:
        raise UsageError(
            f"data.augment = reverse_complement is for DNA, this vocabulary has other letters, such as {others[0]!r}: "
            "take the tokenizer dna, or leave it out"
        )
    return ReverseComplement(np.array(complement, dtype=np.int64), seed)
