"""Gaps in known texts: how many tokens are hidden, where, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from unmask.data.tokenizers import load_tokenizer
from unmask.evaluation.gaps import gaps_of, hide_spans, hide_tokens, seam
from unmask.rng import row_keys

Hide = Callable[[int, float, torch.Tensor], Any]


def runs(mask: Any) -> list[int]:
    return [len(gap.reference) for gap in gaps_of(mask, [0] * len(mask), [0] * len(mask))]


@pytest.mark.parametrize("hide", [hide_tokens, hide_spans])
@pytest.mark.parametrize("share", [0.15, 0.3, 0.45, 0.6, 0.75, 1.0])
@pytest.mark.parametrize("length", [1, 2, 8, 33, 100])
def test_how_many_are_hidden(hide: Hide, share: float, length: int) -> None:
    for key in row_keys(0, torch.arange(5)):
        mask = hide(length, share, key)
        assert mask.sum() == max(1, round(length * share))
        assert len(mask) == length


def test_spans_are_three_tokens_in_the_mean_with_room_between_them() -> None:
    for key in row_keys(1, torch.arange(50)):
        assert len(runs(hide_spans(60, 0.3, key))) == 6
        assert len(runs(hide_spans(60, 0.75, key))) == 15
    assert len(runs(hide_spans(10, 0.9, torch.tensor(3)))) <= 2  # one visible token parts two at most


def test_every_choice_of_tokens_is_as_likely() -> None:
    drawn = Counter(tuple(np.flatnonzero(hide_tokens(5, 0.4, key))) for key in row_keys(7, torch.arange(2000)))
    every = list(combinations(range(5), 2))
    assert drawn.keys() == set(every)
    assert chisquare([drawn[one] for one in every]).pvalue > 1e-3


def test_every_choice_of_spans_is_as_likely() -> None:
    """Six of nine tokens in two spans: lengths 1+5 ... 5+1, in any two of the four places that the visible make."""
    drawn = Counter(tuple(np.flatnonzero(hide_spans(9, 2 / 3, key))) for key in row_keys(7, torch.arange(3000)))
    assert len(drawn) == 5 * 6
    assert all(len(runs(np.isin(np.arange(9), one))) == 2 for one in drawn)
    assert chisquare(list(drawn.values())).pvalue > 1e-3


def test_gaps_at_both_ends() -> None:
    mask = np.array([True, False, True, True])
    assert gaps_of(mask, [1, 2, 3, 4], [9, 2, 3, 8]) == [([1], [9]), ([3, 4], [3, 8])]


def test_the_seam_keeps_the_text() -> None:
    tokenizer = load_tokenizer("bytes")
    for context, rest in (("a b", " c"), ("a b ", "c"), ("", "c")):
        before, after = seam(tokenizer, context, rest)
        assert tokenizer.decode([*before, *after]) == context + rest
        assert tokenizer.decode(after).strip() == "c"
