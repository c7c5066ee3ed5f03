"""Gaps in known texts: which tokens are hidden, at random or in spans, and what was written in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.data.tokenizers import Tokenizer
from unmask.rng import uniform

SPAN = 3  # mean tokens per span
Mask = NDArray[np.bool_]
_TOKENS, _CUTS, _PLACES = range(3)  # counters of the draws


class Gap(NamedTuple):
    """A run of hidden tokens: the original ones and the written ones."""

    reference: list[int]
    output: list[int]


def hide_tokens(length: int, share: float, key: Tensor) -> Mask:
    """[L] True at the given share of positions, at least one; all sets of that size are equally likely.

    >>> int(hide_tokens(20, 0.3, torch.tensor(7)).sum())
    6
    """
    return _some(length, _count(length, share), key, _TOKENS)


def hide_spans(length: int, share: float, key: Tensor) -> Mask:
    """[L] True at the given share of positions, in spans of three tokens on average with a visible token between them.

    All such sets with the same number of spans are equally likely.

    >>> int(hide_spans(20, 0.3, torch.tensor(7)).sum())
    6
    """
    hidden = _count(length, share)
    visible = length - hidden
    spans = max(1, min(round(hidden / SPAN), visible + 1))
    ends = np.flatnonzero(_some(hidden - 1, spans - 1, key, _CUTS)) + 1
    sizes = np.diff(np.concatenate([[0], ends, [hidden]]))
    before = np.flatnonzero(_some(visible + 1, spans, key, _PLACES))  # visible tokens before each span
    mask = np.zeros(length, dtype=np.bool_)
    for start, size in zip(before + np.concatenate([[0], sizes.cumsum()[:-1]]), sizes, strict=True):
        mask[start : start + size] = True
    return mask


def gaps_of(mask: Mask, ids: Sequence[int], written: Sequence[int]) -> list[Gap]:
    """The runs of hidden tokens, in order.

    >>> gaps_of(np.array([False, True, True, False]), [1, 2, 3, 4], [1, 2, 9, 4])
    [Gap(reference=[2, 3], output=[2, 9])]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [Gap(list(ids[start:stop]), list(written[start:stop])) for start, stop in pairs]


def seam(tokenizer: Tokenizer, context: str, rest: str) -> tuple[list[int], list[int]]:
    """The ids of a context and of its continuation, tokenized as one text and cut where the context ends.

    If a token crosses the boundary, the two are tokenized separately. A space at the end of the context belongs to the
    word after it.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> seam(load_tokenizer("bytes"), "a ", "b")
    ([97], [32, 98])
    """
    kept = context.rstrip() or context
    rest = context[len(kept) :] + rest
    before, whole = tokenizer.encode(kept), tokenizer.encode(kept + rest)
    if whole[: len(before)] == before and len(whole) > len(before):
        return before, whole[len(before) :]
    return before, tokenizer.encode(rest)


def _count(length: int, share: float) -> int:
    return min(length, max(1, round(length * share)))


def _some(length: int, num: int, key: Tensor, counter: int) -> Mask:
    """[L] True at `num` positions."""
    mask = np.zeros(max(0, length), dtype=np.bool_)
    if num:
        mask[np.argsort(uniform(key, counter, torch.arange(length)).numpy(), kind="stable")[:num]] = True
    return mask
