"""Intervals over texts: rows of one text are one sample, however many they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import unmask
from tiny_encoders import save_encoder
from unmask.data.packing import Rows, pack_texts
from unmask.data.tokenizers import load_tokenizer
from unmask.evaluation.against import Pair, Shared, shared_by
from unmask.evaluation.bound import Bound
from unmask.evaluation.by_text import summed, text_numbers
from unmask.evaluation.evaluate import chosen_rows
from unmask.evaluation.measurement import ratio_ci95
from unmask.model import Model
from unmask.pretrained import read_pretrained

BYTES = load_tokenizer("bytes")


def numbers(texts: list[str], policy: str, length: int, most: int | None = None) -> list[int] | None:
    rows = pack_texts(texts, BYTES, policy, length, go_on=True)  # type: ignore[arg-type]
    indices = np.arange(len(rows)) if most is None else np.linspace(0, len(rows) - 1, most).astype(np.int64)
    found = text_numbers(rows, BYTES, indices)
    return None if found is None else found.tolist()


def test_a_row_is_of_the_text_in_which_it_begins() -> None:
    assert numbers(["a" * 10, "b" * 2, "c" * 6], "wrap", 4) == [0, 0, 0, 1, 2, 2]
    assert numbers(["a" * 10, "b" * 2, "c" * 6], "pad", 4) == [0, 0, 0, 1, 2, 2]
    assert numbers(["a" * 10, "b" * 2, "c" * 6], "pad", 4, most=3) == [0, 0, 1]
    assert numbers(["a" * 40], "wrap", 4) is None  # of one text alone nothing can be said of others
    assert numbers(["a", "b", "c"], "pad", 4) is None  # every row is a text
    cut = pack_texts(["a" * 9, "b", "c" * 9, "d"], BYTES, "pad", 4)  # the rest of a long text is left out
    assert cut.report.cut_tokens
    assert text_numbers(cut, BYTES, np.arange(4)) is None


@pytest.mark.parametrize(("policy", "most"), [("wrap", None), ("wrap", 9), ("wrap", 2), ("pad", 9)])
def test_the_texts_are_those_of_counting_every_end(policy: str, most: int | None) -> None:
    rng = np.random.default_rng(0)
    for mean in (2, 8, 40, 400):
        texts = ["a" * size for size in rng.geometric(1 / mean, max(3, 800 // mean)).tolist()]
        rows = pack_texts(texts, BYTES, policy, 4, go_on=True)  # type: ignore[arg-type]
        every = rows.take(np.arange(len(rows)))
        ends_B = [int((x[:size] == BYTES.eot_id).sum()) for x, size in zip(every.x, every.valid_len, strict=True)]
        before_B = np.cumsum(ends_B) - ends_B
        of_B = np.unique(before_B[chosen_rows(rows, most)], return_inverse=True)[1]
        alone = of_B.max() in (0, len(of_B) - 1)
        assert numbers(texts, policy, 4, most) == (None if alone else of_B.tolist()), mean


def test_few_of_many_rows_are_numbered_without_reading_all(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    take = Rows.take
    monkeypatch.setattr(Rows, "take", lambda self, at, *shift: (read.extend(at.tolist()), take(self, at, *shift))[1])
    short = pack_texts(["abc"] * 4000, BYTES, "wrap", 4)
    chosen = chosen_rows(short, 8)
    assert text_numbers(short, BYTES, chosen) is None
    assert read == chosen[:-1].tolist()
    read.clear()
    long = pack_texts(["a" * 39] * 400, BYTES, "wrap", 4)  # of ten rows each
    chosen = chosen_rows(long, 8)
    assert text_numbers(long, BYTES, np.sort(np.append(chosen, chosen[3] + 1))) is not None
    assert len(read) == len(set(read)) <= 8 * 2 * 10


def test_a_vocabulary_without_an_end_of_text_says_nothing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_encoder("roberta", tmp_path / "roberta")
    spells = read_pretrained(str(tmp_path / "roberta")).tokenizer
    rows = pack_texts(["the cat sat on the mat " * 4] * 3, spells, "pad", 12, "both", go_on=True)
    assert text_numbers(rows, spells, np.arange(len(rows))) is None


def test_the_interval_over_texts_covers_where_that_over_rows_does_not() -> None:
    """Texts of several rows that share a difficulty: 95% over texts, far less over rows."""
    rng, repeats, held = np.random.default_rng(0), 1000, [0, 0]
    for _ in range(repeats):
        size_T = rng.integers(1, 12, 25)
        of_B = torch.from_numpy(np.repeat(np.arange(25), size_T))
        level_T = rng.normal(3.0, 0.3, 25)
        nats_B = 50 * (torch.from_numpy(level_T)[of_B] + torch.from_numpy(rng.normal(0, 0.2, len(of_B))))
        bound = Bound(draws_BS=nats_B[:, None], tokens_B=torch.full((len(of_B),), 50))
        for i, one in enumerate((bound, replace(bound, of_B=of_B))):
            held[i] += one.ci95[0] <= 3.0 <= one.ci95[1]
        assert summed(bound, of_B).ci95 == pytest.approx(one.ci95)
        assert ratio_ci95(nats_B, bound.tokens_B, of_B) == pytest.approx(one.ci95)
    assert held[0] / repeats < 0.75
    assert 0.92 < held[1] / repeats < 0.97


def test_what_is_measured_says_of_how_many_texts_it_is(model: Model, ar_model: Model) -> None:
    texts = ["the cat sat on the mat " * 8, "a dog ran " * 12, "no rat"]
    for metric in ("perplexity", "order_likelihood"):
        measured = unmask.evaluate(ar_model if metric == "perplexity" else model, texts, metric=metric, packing="wrap")
        bound = measured.bound
        assert bound is not None
        assert bound.of_B is not None
        assert bound.summary()["texts"] == bound.num_texts < len(bound.tokens_B)
        assert measured.protocol["interval"] == f"over the {bound.num_texts} texts in which rows begin"
        assert measured.ci95 == pytest.approx(tuple(map(math.exp, summed(bound, bound.of_B).ci95)))
    right = unmask.evaluate(model, texts, metric="masked_accuracy", packing="wrap")
    assert right.protocol["interval"] == f"over the {bound.num_texts} texts in which rows begin"
    one = unmask.evaluate(ar_model, ["a dog ran"], packing="wrap")
    assert one.protocol["interval"] == "given the only row"


def test_differences_are_over_texts_too() -> None:
    rows = pack_texts(["a" * 10, "b" * 2, "c" * 6], BYTES, "wrap", 4)
    shared = shared_by((rows, BYTES), (rows, BYTES))
    assert shared.texts is not None
    assert [of_B.tolist() for of_B in shared.texts] == [[0, 0, 0, 1, 2, 2]] * 2
    draws = torch.Generator().manual_seed(0)
    ours, theirs = (Bound(torch.rand(6, 3, generator=draws), torch.full((6,), 4)) for _ in range(2))
    by_row, by_text = (Pair(ours, theirs, one).difference for one in (Shared(), shared))
    assert by_text.draws_half == by_row.draws_half  # draws of rows are independent, also within a text
    assert by_text.interval.texts_half != by_row.interval.texts_half
    assert math.isclose(float(summed(Bound(torch.ones(6, 1), torch.ones(6)), shared.texts[0]).nats), 6.0)
