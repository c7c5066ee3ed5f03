"""Splits tokens into the two they were merged from: the same text in other tokens, each time that it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from unmask.data.rows import Ints, RowBatch
from unmask.errors import UsageError
from unmask.rng import fold, row_keys, uniform

if TYPE_CHECKING:
    from unmask.data.tokenizers import Tokenizer

_DRAW_SPLIT = 1 << 20  # far from the counters of other draws, and of epochs


@dataclass(frozen=True)
class SplitTokens:
    """Splits each token with probability `share`, with other draws in each epoch. parts_I2: the two ids, -1 for a token
    that was not merged.

    What no longer fits is left out, so that a row keeps its number of tokens.
    """

    parts_I2: Ints
    share: float
    seed: int

    def __call__(self, rows: RowBatch, epochs: Ints) -> RowBatch:
        key_B = fold(row_keys(self.seed, torch.from_numpy(rows.indices)), _DRAW_SPLIT, torch.from_numpy(epochs))
        u_BL = uniform(key_B[:, None], torch.arange(rows.x.shape[1])).numpy()
        x = rows.x.copy()
        for i in range(len(rows)):
            text = slice(int(rows.prefix_len[i]), int(rows.valid_len[i]) - rows.suffix)
            x[i, text] = self.split(x[i, text], u_BL[i, text] < self.share)
        return replace(rows, x=x)

    def split(self, x_N: Ints, chosen_N: np.ndarray) -> Ints:
        """The tokens with the chosen ones split, without those at the end that no longer fit.

        >>> parts_I2 = np.array([[-1, -1], [-1, -1], [0, 1], [2, 1]])
        >>> SplitTokens(parts_I2, 0.1, 0).split(np.array([3, 0, 2]), np.array([True, True, False]))
        array([2, 1, 0])
        """
        parts_N2 = self.parts_I2[x_N]
        whole_N2 = np.stack([x_N, np.full_like(x_N, -1)], axis=1)
        wide_N2 = np.where((chosen_N & (parts_N2[:, 0] >= 0))[:, None], parts_N2, whole_N2)
        return wide_N2[wide_N2 >= 0][: len(x_N)]


def merged_from(tokenizer: Tokenizer) -> Ints:
    """[I, 2] the two ids that each id of a BPE was merged from, by the first merge that makes it; -1 for all others.

    >>> from unmask.corpora.memory import Memory
    >>> from unmask.data.tokenizers import load_tokenizer
    >>> bpe = load_tokenizer("bpe:258", Memory(texts=("aaab",) * 9))
    >>> [bpe.token_text(int(id)) for id in merged_from(bpe)[bpe.encode("aa")[0]]]
    ['a', 'a']
    """
    model = json.loads(tokenizer.to_json()).get("model") or {}
    parts_I2 = np.full((tokenizer.num_ids, 2), -1, dtype=np.int64)
    vocab: dict[str, int] = model.get("vocab", {})
    inside = len(model.get("continuing_subword_prefix") or "")  # of parts inside of a word, which a merge leaves out
    for merge in reversed(model.get("merges") or []):
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        parts_I2[vocab[left + right[inside:]]] = vocab[left], vocab[right]
    if not (parts_I2 >= 0).any():
        raise UsageError(
            "data.split_tokens is for a BPE, this vocabulary has no merges: take bpe:SIZE, or leave it out"
        )
    return parts_I2
