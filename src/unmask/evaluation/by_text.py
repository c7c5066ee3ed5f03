"""Rows grouped by the text that they are of: an interval over texts takes each text once, however many rows it has.

Rows of one long text are alike, so taking them for independent samples makes an interval far too narrow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.data.rows import Ints, RowBatch, Rows
from unmask.data.tokenizers import Tokenizer
from unmask.evaluation.bound import Bound

MOST = 1024  # rows in memory at a time


def text_numbers(rows: Rows, tokenizer: Tokenizer, indices: Ints) -> Tensor | None:
    """[B] for each of these rows the number of the text in which it begins, counted from 0 without gaps.

    None where rows stand for themselves: each begins in a text of its own, or all in a single one, or the vocabulary
    has no end of a text.

    >>> from unmask.data.packing import pack_texts
    >>> from unmask.data.tokenizers import load_tokenizer
    >>> bytes_ = load_tokenizer("bytes")
    >>> text_numbers(pack_texts(["abcdefg", "hi"], bytes_, "wrap", 3), bytes_, np.arange(4)).tolist()
    [0, 0, 0, 1]
    """
    a_row_each = rows.report.policy in ("fill", "sentence") or (rows.report.policy == "pad" and rows.report.cut_tokens)
    if a_row_each or not tokenizer.ends_texts:  # a text that was cut has no end in its row
        return None
    chosen_C, at_B = np.unique(indices, return_inverse=True)
    number_C = np.cumsum([False, *_ends_before_next(rows, tokenizer.eot_id, chosen_C)])
    return torch.from_numpy(number_C[at_B]) if 1 < number_C[-1] + 1 < len(indices) else None


def said(of_B: Tensor | None, num_rows: int) -> str:
    """What an interval is over, for the protocol.

    >>> said(torch.tensor([0, 0, 1]), 3), said(None, 3), said(None, 1)
    ('over the 2 texts in which rows begin', 'over rows', 'given the only row')
    """
    return said_of_counts(num_rows if of_B is None else int(of_B.max()) + 1, num_rows)


def said_of_counts(num_texts: int, num_rows: int) -> str:
    """The same from what is left of it where only counts are kept; num_texts: num_rows if rows stand for themselves.

    >>> said_of_counts(2, 3), said_of_counts(3, 3)
    ('over the 2 texts in which rows begin', 'over rows')
    """
    if num_texts == num_rows:
        return "over rows" if num_rows > 1 else "given the only row"
    return f"over the {num_texts:,} texts in which rows begin"


def _ends_before_next(rows: Rows, eot_id: int, chosen_C: Ints) -> list[bool]:
    """For each of these rows but the last, whether a text ends in it or in a row between it and the next of them.

    Rows in between are read in growing pieces, and only up to the first end: there may be far more of them.
    """
    found: list[bool] = []
    for lo in range(0, len(chosen_C) - 1, MOST):
        found += _ends(rows.take(chosen_C[:-1][lo : lo + MOST]), eot_id).tolist()
    for i in [i for i, ended in enumerate(found) if not ended]:
        lo, size = int(chosen_C[i]) + 1, 1
        while lo < chosen_C[i + 1] and not found[i]:
            found[i] = bool(_ends(rows.take(np.arange(lo, min(lo + size, chosen_C[i + 1]))), eot_id).any())
            lo, size = lo + size, min(2 * size, MOST)
    return found


def _ends(part: RowBatch, eot_id: int) -> NDArray[np.bool_]:
    """Whether a text ends in each row."""
    position_L = np.arange(part.x.shape[1])
    scored_BL = (position_L >= part.prefix_len[:, None]) & (position_L < (part.valid_len - part.suffix)[:, None])
    ends_B: NDArray[np.bool_] = ((part.x == eot_id) & scored_BL).any(axis=1)
    return ends_B


def summed(bound: Bound, of_B: Tensor) -> Bound:
    """A bound summed over the rows of each text. of_B: the text number of each row.

    >>> bound = Bound(draws_BS=torch.tensor([[1.0], [2.0], [4.0]]), tokens_B=torch.tensor([1, 1, 1]))
    >>> summed(bound, torch.tensor([0, 0, 1])).nats_B.tolist()
    [3.0, 4.0]
    """
    num = int(of_B.max()) + 1
    draws_TS = bound.draws_BS.new_zeros(num, bound.draws_BS.shape[1]).index_add(0, of_B, bound.draws_BS)
    return replace(
        bound, of_B=None, draws_BS=draws_TS, tokens_B=bound.tokens_B.new_zeros(num).index_add(0, of_B, bound.tokens_B)
    )
