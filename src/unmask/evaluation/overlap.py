"""Overlap of generated texts with references: exact matches, ROUGE-L, BLEU and chrF, as percentages over a set.

BLEU and chrF are sacrebleu's (Post, arXiv 1804.08771); each score includes its signature, so that others can reproduce
it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.errors import MissingExtraError
from unmask.evaluation.bootstrap import Sums

_PIECES = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number of a set of texts. n: the number of texts. signature: that of the scoring tool, if it has one. sums:
    its statistics per text, if a model wrote them.

    >>> Score(name="exact match", value=50.0, ci95=None, n=2).summary()["value"]
    50.0
    """

    name: str
    value: float
    ci95: tuple[float, float] | None
    n: int
    of: str = "all"
    signature: str = ""
    sums: Sums | None = field(default=None, repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON."""
        ci95 = None if self.ci95 is None else list(self.ci95)
        return {"of": self.of, "name": self.name, "value": self.value, "ci95": ci95, "n": self.n} | (
            {"signature": self.signature} if self.signature else {}
        )


def share(
    name: str,
    right: Sequence[float],
    counts: Sequence[float] | None = None,
    *,
    over: Sequence[int] | None = None,
    **how: Any,
) -> Score:
    """100 · sum(right) / sum(counts) with its bootstrap interval over texts.

    Where all texts are right, or none is, every resample is, too: the interval is then the exact one of a share of N
    texts, of which a few in a thousand others may well be wrong.

    counts: one per text if omitted. over: the indices of these texts in the set, if not all.

    >>> share("exact match", [1, 0, 0, 1]).value
    50.0
    """
    seed = how.pop("seed", 0)
    right_N = np.asarray(right, dtype=np.float64)
    count_N = np.ones_like(right_N) if counts is None else np.asarray(counts, dtype=np.float64)
    stats_N2 = np.stack([right_N, count_N], axis=1)

    def number(total_2: NDArray[np.float64]) -> float:
        return float(100 * total_2[0] / max(total_2[1], 1.0))

    sums = Sums.of(stats_N2, number, over)
    ends = sums.ci95(seed=seed)
    if ends is not None and sums.value in (0.0, 100.0):
        far = 100 * (1 - 0.025 ** (1 / len(right_N)))  # the share of which none of N shows once in 40 times
        ends = (0.0, far) if sums.value == 0 else (100 - far, 100.0)
    return Score(name=name, value=sums.value, ci95=ends, n=len(right_N), sums=sums, **how)


def rouge_l(output: str, reference: str) -> float:
    """F1 of the longest common subsequence (Lin 2004) of words and punctuation, between 0 and 1; case-sensitive.

    >>> rouge_l("the cat sat", "the cat, sat down"), rouge_l("", "")
    (0.75, 1.0)
    """
    ours, theirs = _PIECES.findall(output), _PIECES.findall(reference)
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * _longest_common(ours, theirs) / (len(ours) + len(theirs))


def _longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def need_sacrebleu() -> None:
    """Raise if sacrebleu is missing, before anything is generated."""
    _sacrebleu()


def bleu(outputs: Sequence[str], references: Sequence[Sequence[str]], **how: Any) -> Score:
    """Corpus BLEU as computed by sacrebleu's command line. references: the first reference of every text, the second,
    ...

    >>> bleu(["a cat sat on the mat"], [["a cat sat on the mat"]]).value  # doctest: +SKIP
    100.0
    """
    # force: no warning on stderr about texts that look tokenized; it does not change the value
    return _scored("BLEU", _sacrebleu().BLEU(force=True), outputs, references, **how)


def chrf(outputs: Sequence[str], references: Sequence[Sequence[str]], **how: Any) -> Score:
    """Corpus chrF2 (Popović 2015) as computed by sacrebleu's command line; references: as in `bleu`.

    >>> chrf(["a cat"], [["a cat"]]).value  # doctest: +SKIP
    100.0
    """
    return _scored("chrF", _sacrebleu().CHRF(), outputs, references, **how)


def _scored(name: str, metric: Any, outputs: Sequence[str], references: Sequence[Sequence[str]], **how: Any) -> Score:
    seed = how.pop("seed", 0)
    value = float(metric.corpus_score(list(outputs), [list(one) for one in references]).score)
    # The counts per text from which a corpus score is computed; a test compares their sums with the score.
    stats_NK = np.array(metric._extract_corpus_statistics(list(outputs), [list(one) for one in references]))

    def number(total_K: NDArray[np.float64]) -> float:
        return float(metric._compute_score_from_stats(total_K.astype(int).tolist()).score)

    sums, signature = Sums.of(stats_NK, number), str(metric.get_signature())
    return Score(
        name=name, value=value, ci95=sums.ci95(seed=seed), n=len(outputs), signature=signature, sums=sums, **how
    )


def _sacrebleu() -> Any:
    try:
        return importlib.import_module("sacrebleu.metrics")
    except ImportError:
        raise MissingExtraError("sacrebleu", "eval", "BLEU and chrF") from None
