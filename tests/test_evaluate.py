"""Measurements: the number, its sign and interval, and a protocol that is enough to repeat it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from unmask.corpora.text import Text
from unmask.data.packing import build_rows, pack_texts
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import UsageError
from unmask.evaluation.evaluate import evaluate_rows
from unmask.evaluation.measurement import Measurement, ratio_ci95
from unmask.metrics.masked_accuracy import MaskedAccuracy
from unmask.metrics.perplexity import Perplexity
from unmask.model import Model
from unmask.objectives.mdlm import MDLM

TEXTS = ["the cat sat on the mat", "a dog ran", "no rat ate the oat cake", "the sun set"]
NEEDED = {"metric", "estimator", "draws_per_row", "seed", "rows", "tokens", "packing", "anchor", "split", "fingerprint"}
NEEDED |= {"device", "dtype", "unmask", "length", "tokenizer", "kind"}


def test_evaluate_is_the_bound_over_the_rows(model: Model, ar_model: Model, corpus_file: Path) -> None:
    rows = build_rows(Text(path=str(corpus_file)), model.tokenizer, length=32)
    for one, kind, sign in ((model, "upper bound", "≤"), (ar_model, "exact", "=")):
        bound = evaluate_rows(one.denoiser, one.objective, rows, seed=3, num_samples=2, max_rows=9)
        for data in (str(corpus_file), corpus_file, Text(path=str(corpus_file)), rows):
            measured = unmask.evaluate(one, data, seed=3, num_samples=2, max_rows=9)
            assert measured.value == pytest.approx(bound.ppl)
            assert measured.ci95 == pytest.approx(tuple(map(math.exp, bound.ci95)))
            assert (measured.n, measured.kind, measured.sign) == (bound.tokens, kind, sign)
            assert measured.protocol.keys() >= NEEDED
            assert measured.protocol["fingerprint"]
            assert (measured.protocol["seed"], measured.protocol["rows"]) == (3, 9)
            assert f"perplexity {sign} {bound.ppl:.4f}" in str(measured)
            json.dumps(measured.summary())
    assert unmask.evaluate(model, rows, metric=Perplexity(num_samples=2, max_rows=9), seed=3).value == pytest.approx(
        unmask.evaluate(model, rows, num_samples=2, max_rows=9, seed=3).value
    )


def test_texts_are_packed_as_the_model_was_trained(model: Model) -> None:
    measured = unmask.evaluate(model, TEXTS, packing="pad")
    rows = pack_texts(TEXTS, model.tokenizer, "pad", model.length)
    assert measured.value == pytest.approx(evaluate_rows(model.denoiser, model.objective, rows).ppl)
    assert measured.protocol["given"] == "row lengths"
    assert unmask.evaluate(model, TEXTS).protocol["packing"] == model.packing
    for wrong in ({"length": 64}, {"nonsense": 3}, {"num_samples": 0}, {"metric": "perplexit"}, {"metric": 3}):
        with pytest.raises(UsageError):
            unmask.evaluate(model, TEXTS, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="packing"):
        unmask.evaluate(model, rows, packing="pad")
    with pytest.raises(UsageError, match="object"):
        unmask.evaluate(model, rows, metric=Perplexity(), num_samples=3)


def only_e(seen: list[Any]) -> Model:
    """A model that expects an e everywhere, and notes what it is shown."""
    tokenizer = load_tokenizer("bytes")

    def f(z_BL: torch.Tensor, level_B: torch.Tensor) -> torch.Tensor:
        seen.append((z_BL, level_B))
        logits = torch.zeros(*z_BL.shape, tokenizer.num_ids)
        logits[..., ord("e")] = 5.0
        return logits

    network = unmask.as_denoiser(f, vocab_size=tokenizer.num_ids - 1, mask_id=tokenizer.mask_id)
    return Model(denoiser=network, tokenizer=tokenizer, objective=MDLM(), length=64)


def test_masked_accuracy_counts_masked_tokens_whose_argmax_is_right() -> None:
    seen: list[Any] = []
    text = ("eeeabe" * 427)[:2559]  # and its end: 40 whole rows, each of which has masks
    mean = {}
    for batch in (7, 16):
        seen.clear()
        measured = unmask.evaluate(only_e(seen), [text], metric=MaskedAccuracy(rate=0.25, batch=batch), seed=1)
        rows = pack_texts([text], load_tokenizer("bytes"), "wrap", 64)
        x_BL = torch.from_numpy(rows.take(torch.arange(len(rows)).numpy()).x)
        mask_id = load_tokenizer("bytes").mask_id
        z_BL = torch.cat([z for z, _ in seen])
        masked_BL = z_BL == mask_id
        assert all(float(level) == 0.25 for _, levels in seen for level in levels)
        assert int(masked_BL.sum()) == measured.n
        kept = (x_BL == z_BL).sum() + masked_BL.sum()
        assert int(kept) == x_BL.numel()  # nothing else was changed
        assert measured.value == pytest.approx(float((x_BL[masked_BL] == ord("e")).double().mean()))
        share = masked_BL.double().mean()
        assert abs(float(share) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / x_BL.numel())
        mean[batch] = measured.value
        assert measured.ci95 is not None
        assert measured.ci95[0] < 4 / 6 < measured.ci95[1]
    assert mean[7] == mean[16]  # however rows are batched
    assert unmask.evaluate(only_e([]), [text], metric="masked_accuracy", rate=1.0).value == pytest.approx(
        4 / 6, abs=0.01
    )


def test_masked_accuracy_is_for_masks(ar_model: Model) -> None:
    with pytest.raises(UsageError, match="left to right"):
        unmask.evaluate(ar_model, TEXTS, metric="masked_accuracy")
    for wrong in ({"rate": 0.0}, {"rate": 1.5}, {"rate": "much"}, {"batch": 0}):
        with pytest.raises(UsageError):
            MaskedAccuracy(**wrong)  # type: ignore[arg-type]


def test_the_interval_of_a_ratio_covers() -> None:
    """95% of intervals hold the truth, of rows that weigh differently and vary."""
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(400):
        count_B = torch.randint(1, 20, (60,), generator=generator)
        p_B = (0.3 + 0.2 * torch.rand(60, generator=generator)) - 0.1
        total_B = torch.binomial(count_B.float(), p_B, generator=generator)
        interval = ratio_ci95(total_B, count_B)
        assert interval is not None
        hits += interval[0] < 0.3 < interval[1]
    assert 400 * 0.95 - 4 * math.sqrt(400 * 0.05 * 0.95) < hits < 400 * 0.95 + 4 * math.sqrt(400 * 0.05 * 0.95)
    assert ratio_ci95(torch.tensor([1.0]), torch.tensor([1])) is None


def test_what_is_not_finite_is_told() -> None:
    assert "not finite" in str(Measurement(math.inf, None, 1))
    assert Measurement(math.nan, None, 1).summary()["value"] is None
