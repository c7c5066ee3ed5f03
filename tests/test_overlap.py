"""Overlap with references: exact match, ROUGE-L, BLEU, chrF and their intervals, against hand values and sacrebleu."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from unmask.errors import DataError, MissingExtraError
from unmask.evaluation import bootstrap
from unmask.evaluation.bootstrap import bootstrap_ci95, resampled_counts
from unmask.evaluation.ngram_classifier import train_classifier
from unmask.evaluation.overlap import bleu, chrf, need_sacrebleu, rouge_l, share

OUTPUTS = ["the cat sat on the mat today", "a dog", "no rat ate the old oat cake", "the sun and the moon"]
REFERENCES = ["the cat sat on a mat today", "the dog ran", "no rat ate the oat cake", "the sun and the moon rose"]


@pytest.mark.parametrize(
    ("output", "reference", "value"),
    [
        ("police killed the gunman", "police kill the gunman", 3 / 4),
        ("the gunman kill police", "police kill the gunman", 2 / 4),
        ("a b c d e", "a c e", 2 * 3 / 8),
        ("", "word", 0.0),
        ("", "", 1.0),
        ("Yes.", "yes .", 1 / 2),
    ],
)
def test_rouge_l_by_hand(output: str, reference: str, value: float) -> None:
    """F1 of the longest common subsequence; the first two sentences are Lin's own example (2004)."""
    assert rouge_l(output, reference) == pytest.approx(value)
    assert rouge_l(reference, output) == pytest.approx(value)


def test_a_share_by_hand() -> None:
    score = share("right", [1, 0, 3], [2, 1, 5])
    assert score.value == pytest.approx(100 * 4 / 8)
    assert score.n == 3
    assert score.ci95 is None
    score = share("right", [1, 0, 3] * 4, [2, 1, 5] * 4)
    assert score.ci95 is not None
    assert score.ci95[0] < 50 < score.ci95[1]


def test_few_texts_have_no_interval() -> None:
    """Percentiles of resamples are too narrow then: of two texts they are hardly more than the two values."""
    assert share("right", [1, 0] * 4 + [1]).ci95 is None
    assert share("right", [1, 0] * 5).ci95 is not None
    rng, held = np.random.default_rng(0), 0
    for _ in range(200):
        count_N = rng.integers(5, 40, 10)
        right_N = rng.binomial(count_N, rng.beta(8, 2, 10))
        ends = share("right", right_N.tolist(), count_N.tolist()).ci95
        assert ends is not None
        held += ends[0] <= 80 <= ends[1]
    assert held / 200 > 0.83


def test_texts_that_are_all_right_do_not_prove_that_all_are() -> None:
    """Clopper and Pearson (1934), by hand; resamples would say 100 – 100."""
    for right, ends in ((1, (100 * 0.025 ** (1 / 20), 100.0)), (0, (0.0, 100 * (1 - 0.025 ** (1 / 20))))):
        assert share("right", [right] * 20).ci95 == pytest.approx(ends)
    assert share("right", [1] * 9).ci95 is None


def test_the_interval_is_that_of_a_binomial_share() -> None:
    """400 texts, 30% right: the normal interval is ±4.49."""
    score = share("right", [i % 10 < 3 for i in range(400)], seed=3)
    assert score.ci95 is not None
    half = 100 * 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert score.ci95[0] == pytest.approx(30 - half, abs=0.6)
    assert score.ci95[1] == pytest.approx(30 + half, abs=0.6)


def test_an_interval_repeats_and_follows_its_seed() -> None:
    stats = np.stack([np.arange(50) % 3, np.ones(50)], axis=1)

    def mean(total: np.ndarray) -> float:
        return float(total[0] / total[1])

    assert bootstrap_ci95(stats, mean, seed=1) == bootstrap_ci95(stats, mean, seed=1)
    assert bootstrap_ci95(stats, mean, seed=1) != bootstrap_ci95(stats, mean, seed=2)


def test_resamples_are_the_same_however_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = np.random.default_rng(0).normal(size=(50, 1))
    whole, interval = list(resampled_counts(50)), bootstrap_ci95(stats, lambda total_K: float(total_K[0]))
    assert [len(some) for some in whole] == [1000]
    monkeypatch.setattr(bootstrap, "KEPT", 0)
    monkeypatch.setattr(bootstrap, "AT_ONCE", 50 * 300)
    parts = list(resampled_counts(50))
    assert [len(some) for some in parts] == [300, 300, 300, 100]  # a large set's are never all in memory
    assert np.array_equal(np.concatenate(parts), whole[0])
    assert (whole[0].sum(axis=1) == 50).all()
    assert bootstrap_ci95(stats, lambda total_K: float(total_K[0])) == interval


def test_bleu_by_hand() -> None:
    """Precisions 4/5, 3/4, 2/3, 1/2, one word more than the reference has: no penalty."""
    score = bleu(["the cat sat down now"], [["the cat sat down"]])
    assert score.value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4))
    short = bleu(["the cat sat on"], [["the cat sat on it"]])
    assert short.value == pytest.approx(100 * math.exp(1 - 5 / 4))


@pytest.mark.parametrize(("measure", "flag"), [(bleu, "bleu"), (chrf, "chrf")])
def test_the_number_is_that_of_sacrebleus_command_line(measure: object, flag: str, tmp_path: Path) -> None:
    for name, texts in (("out", OUTPUTS), ("ref", REFERENCES)):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    words = [sys.executable, "-m", "sacrebleu", "ref", "-i", "out", "-m", flag, "-b", "-w", "10"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    score = measure(OUTPUTS, [REFERENCES])  # type: ignore[operator]
    assert score.value == pytest.approx(float(done.stdout), abs=1e-9)
    assert "version" in score.signature
    score = measure(OUTPUTS * 3, [REFERENCES * 3])  # type: ignore[operator]
    assert score.ci95[0] < score.value < score.ci95[1]


def test_the_counts_of_texts_sum_to_the_number_of_all() -> None:
    """What the interval is made of: drawn once each, the texts give the score itself."""
    from sacrebleu.metrics import BLEU, CHRF

    for metric in (BLEU(force=True), CHRF()):
        total = np.array(metric._extract_corpus_statistics(OUTPUTS, [REFERENCES])).sum(axis=0)
        score = metric._compute_score_from_stats(total.tolist()).score
        assert score == pytest.approx(metric.corpus_score(OUTPUTS, [REFERENCES]).score)


def test_without_sacrebleu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(MissingExtraError, match=r"BLEU and chrF needs the package sacrebleu.*unmask\[eval\]"):
        need_sacrebleu()


# --- the classifier ---------------------------------------------------------------------------------------------------


def sentences() -> tuple[list[str], list[int]]:
    """A word of a hundred fillers before the word that tells the class, so that all texts differ."""
    texts = [f"the w{i % 101} was {'good' if i % 2 else 'bad'} w{i % 53}" for i in range(1000)]
    return texts, [i % 2 for i in range(1000)]


def test_a_classifier_learns_the_word_that_tells() -> None:
    classifier = train_classifier(*sentences())
    assert classifier.held_out.value == 100
    assert 20 < classifier.held_out.n < 90
    good, bad = classifier.probabilities(["the soup was good", "the soup was bad"]).tolist()
    assert bad < 0.5 < good
    assert "100.00% right" in classifier.sentence()
    again = train_classifier(*sentences())
    assert again.weight_V1.equal(classifier.weight_V1)


def test_held_out_accuracy_of_coin_flips_is_a_half() -> None:
    """Labels that no word tells: what is learned by heart does not show in the number."""
    texts = [f"word{i}" for i in range(4000)]
    score = train_classifier(texts, [i * 7919 % 13 % 2 for i in range(4000)]).held_out
    assert abs(score.value - 50) < 4 * 50 / math.sqrt(score.n)


def test_too_few_texts_for_a_classifier() -> None:
    with pytest.raises(DataError, match="2 texts are too few"):
        train_classifier(["good", "bad"], [1, 0])
