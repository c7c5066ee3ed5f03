"""The numbers of generated texts: a judge's perplexity, and measures of repetition beside it.

A text that repeats itself is easy to predict, so a low perplexity alone means little. It is therefore reported with the
unigram entropy of a text (arXiv 2409.02908 shows why), distinct n-grams over all texts (Li et al., arXiv 1510.03055),
repeated n-grams within a text (Welleck et al., arXiv 1908.04319), the longest repeat, self-BLEU (Zhu et al., arXiv
1802.01886) and MAUVE. All of them are counted in the judge's tokens, and each has an interval.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unmask.errors import DataError
from unmask.evaluation.bootstrap import FEWEST
from unmask.evaluation.judging.judge import Judge, Reading
from unmask.evaluation.judging.mauve import mauve
from unmask.evaluation.measurement import Measurement, student_975
from unmask.rng import row_keys, uniform

Row = Sequence[int]
RESAMPLES = 1000
MAX_N = 4  # largest n of n-grams
# Numbers that indicate less variety if they are lower (-1) or higher (+1) than those of real texts.
LESS_VARIED = {
    "entropy": -1,
    **{f"distinct_{n}": -1 for n in range(1, MAX_N + 1)},
    **{f"repeated_{n}": 1 for n in range(1, MAX_N + 1)},
    "longest_repeat": 1,
    "self_bleu": 1,
}


@dataclass(frozen=True)
class Described:
    """The numbers of a set of texts, by name, with their common protocol.

    lost: sentences about texts that were left out. reading: the judge's reading from which they were computed.
    """

    numbers: dict[str, Measurement]
    protocol: dict[str, Any]
    lost: list[str]
    reading: Reading = field(repr=False, compare=False)

    def beyond(self, real: Described) -> list[str]:
        """The names of the numbers that show less variety than the real texts, with disjoint 95% intervals.

        >>> repeated.beyond(real)  # doctest: +SKIP
        ['entropy', 'distinct_4', 'repeated_4', 'self_bleu']
        """
        return less_varied(
            {name: one.ci95 for name, one in self.numbers.items()}, {n: one.ci95 for n, one in real.numbers.items()}
        )

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON; the protocol is stored once, not for each number."""
        plain = {name: one.summary() for name, one in self.numbers.items()}
        numbers = {name: {key: one[key] for key in ("value", "ci95", "n")} for name, one in plain.items()}
        return {"numbers": numbers, "lost": self.lost, "protocol": self.protocol}


def less_varied(some: Mapping[str, Any], real: Mapping[str, Any]) -> list[str]:
    """The names of the numbers whose intervals lie beyond the real ones, in the direction of less variety.

    >>> less_varied({"entropy": (2.0, 2.1)}, {"entropy": (4.0, 4.1)})
    ['entropy']
    """
    found = []
    for name, side in LESS_VARIED.items():
        mine, theirs = some.get(name), real.get(name)
        if mine and theirs and (mine[1] < theirs[0] if side < 0 else mine[0] > theirs[1]):
            found.append(name)
    return found


def describe(
    judge: Judge,
    texts: Sequence[str],
    real: Described | None = None,
    *,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Described:
    """All numbers of some texts under a judge. real: the result of `describe` for real texts, needed for MAUVE.

    Intervals are 95%: percentile bootstrap over texts for numbers made of sums over texts; a jackknife for distinct
    n-grams and MAUVE, because a text drawn twice would itself count as a repeat.

    >>> real = describe(judge, real_texts)  # doctest: +SKIP
    >>> print(describe(judge, model.generate(200), real).numbers["judge_ppl"])  # doctest: +SKIP
    judge_ppl = 13.3100 (95% interval 12.8700 – 13.7600, n = 33,412)
    """
    reading = judge.read(texts, progress=progress)
    if not reading.rows:
        first = reading.lost[0] if reading.lost else "all are empty" if texts else "there are none"
        raise DataError("no text can be judged: {first}", first=first)
    numbers = {
        **_sums(reading, seed),
        **{f"distinct_{n}": _distinct(reading.rows, n) for n in range(1, MAX_N + 1)},
    }
    protocol = {
        **judge.protocol(),
        "texts": len(reading.rows),
        "empty texts": reading.empty,
        "intervals": f"95%: bootstrap over texts ({FEWEST} at least), {RESAMPLES} resamples, seed {seed}; distinct and "
        "mauve: jackknife",
        "self_bleu": f"BLEU-{MAX_N} of each text against all others, zero counts smoothed by halves",
        **(about or {}),
    }
    if real is not None:
        value, interval = mauve(real.reading.features_ND, reading.features_ND, seed=seed)
        numbers["mauve"] = Measurement(value, interval, len(reading.rows), kind="estimate", name="mauve")
        protocol["mauve"] = f"against {len(real.reading.rows)} real texts, k-means of seed {seed}"
    named = {name: _with_protocol(name, one, protocol) for name, one in numbers.items()}
    return Described(named, protocol, reading.lost, reading)


def _with_protocol(name: str, one: Measurement, protocol: Mapping[str, Any]) -> Measurement:
    return Measurement(one.value, one.ci95, one.n, protocol, one.kind, name)


def _sums(reading: Reading, seed: int) -> dict[str, Measurement]:
    """The numbers that are ratios of sums over texts, with bootstrap intervals over the same resamples."""
    rows = reading.rows
    texts_N = np.ones(len(rows))
    tokens_N = reading.scored_N.astype(np.float64)
    num_bytes_N = np.array([len(text.encode("utf-8", errors="replace")) for text in reading.texts], dtype=np.float64)
    num_bytes_N = np.maximum(num_bytes_N, 1.0)
    each: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
        "judge_ppl": (reading.nats_N, tokens_N, lambda nats: np.exp(np.minimum(nats, 700.0))),  # JSON has no infinity
        "bits_per_byte": (reading.nats_N / math.log(2), num_bytes_N, np.asarray),
        "entropy": (np.array([entropy(row) for row in rows]), texts_N, np.asarray),
        "longest_repeat": (np.array([longest_repeat(row) for row in rows], dtype=np.float64), texts_N, np.asarray),
        "length": (np.array([len(row) for row in rows], dtype=np.float64), texts_N, np.asarray),
    }
    for n in range(1, MAX_N + 1):
        each[f"repeated_{n}"] = (np.array([repeated(row, n) for row in rows]), texts_N, np.asarray)
    if len(rows) > 1:
        each["self_bleu"] = (self_bleu(rows), texts_N, np.asarray)
    u_SN = uniform(row_keys(seed, torch.arange(RESAMPLES))[:, None], torch.arange(len(rows)))
    draws = (u_SN.double() * len(rows)).long().numpy()
    found = {}
    for name, (total_N, count_N, form) in each.items():
        value = float(form(total_N.sum() / count_N.sum()))
        ends = form(np.quantile(total_N[draws].sum(axis=1) / count_N[draws].sum(axis=1), (0.025, 0.975)))
        interval = (float(ends[0]), float(ends[1])) if len(rows) >= FEWEST else None
        exact = name in ("judge_ppl", "bits_per_byte")  # the judge's likelihood of these very tokens
        n_of = int(count_N.sum()) if exact else len(rows)
        found[name] = Measurement(value, interval, n_of, kind="exact" if exact else "estimate")
    return found


def _distinct(rows: Sequence[Row], n: int) -> Measurement:
    """`distinct` with a jackknife interval: leaving out a text removes the n-grams that no other text has."""
    owner: dict[tuple[int, ...], int] = {}
    for i, row in enumerate(rows):
        for gram in set(ngrams(row, n)):
            owner[gram] = i if gram not in owner else -1
    total_N = np.array([max(0, len(row) - n + 1) for row in rows], dtype=np.float64)
    own_N = np.zeros(len(rows))
    for i in owner.values():
        if i >= 0:
            own_N[i] += 1
    value = distinct(rows, n)
    left_N = total_N.sum() - total_N
    if len(rows) < 2 or not left_N.all():
        return Measurement(value, None, int(total_N.sum()))
    without_N = (len(owner) - own_N) / left_N
    spread = (len(rows) - 1) / len(rows) * ((without_N - without_N.mean()) ** 2).sum()
    half = student_975(len(rows) - 1) * math.sqrt(float(spread))
    return Measurement(value, (max(0.0, value - half), min(1.0, value + half)), int(total_N.sum()))


# --- single numbers, computed from tokens
# ------------------------------------------------------------------------------


def ngrams(row: Row, n: int) -> Iterator[tuple[int, ...]]:
    """All n-grams of a row, in order.

    >>> list(ngrams([1, 2, 3], 2))
    [(1, 2), (2, 3)]
    """
    return (tuple(row[i : i + n]) for i in range(len(row) - n + 1))


def entropy(row: Row) -> float:
    """Entropy of a text's unigram distribution, in nats.

    >>> round(entropy([1, 1, 2, 2]), 4)
    0.6931
    """
    return -sum(n / len(row) * math.log(n / len(row)) for n in Counter(row).values()) + 0.0


def distinct(rows: Sequence[Row], n: int) -> float:
    """Distinct n-grams as a share of all n-grams of all texts; only comparable for equally many and equally long texts.

    >>> distinct([[1, 2, 3], [1, 2, 4]], 2)
    0.75
    """
    total = sum(max(0, len(row) - n + 1) for row in rows)
    return len({gram for row in rows for gram in ngrams(row, n)}) / total if total else 0.0


def repeated(row: Row, n: int) -> float:
    """The share of a text's n-grams that occurred in it before.

    >>> repeated([1, 2, 1, 2, 1], 2)
    0.5
    """
    total = len(row) - n + 1
    return 1 - len(set(ngrams(row, n))) / total if total > 0 else 0.0


def longest_repeat(row: Row) -> int:
    """Length in tokens of the longest run that occurs twice in the text; the two occurrences may overlap.

    >>> longest_repeat([1, 2, 3, 9, 1, 2, 3]), longest_repeat([5, 5, 5, 5]), longest_repeat([1, 2])
    (3, 3, 0)
    """
    # Every part of a repeated run repeats too, so a binary search over lengths finds the longest.
    return bisect.bisect_left(range(1, len(row) + 1), True, key=lambda n: not repeated(row, n))


def self_bleu(rows: Sequence[Row]) -> NDArray[np.float64]:
    """[N] BLEU of each text with all other texts as references, between 0 and 1.

    BLEU-4 of a text (arXiv 1802.01886): clipped n-gram precisions, and the brevity penalty of the reference nearest in
    length. The k-th precision of 0 in a text is replaced by 1 / (2^k total), and n-grams longer than the text do not
    count, as in sacrebleu's sentence_bleu with effective order.

    >>> self_bleu([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]).tolist()
    [1.0, 1.0]
    """
    counts = [[Counter(ngrams(row, n)) for n in range(1, MAX_N + 1)] for row in rows]
    most: dict[tuple[int, ...], tuple[int, int, int]] = {}  # n-gram → (largest count, its text, next count)
    for i, of_row in enumerate(counts):
        for gram, count in (pair for of_n in of_row for pair in of_n.items()):
            first, owner, second = most.get(gram, (0, -1, 0))
            most[gram] = (count, i, first) if count > first else (first, owner, max(second, count))
    lengths = sorted(len(row) for row in rows)
    return np.array([_bleu(i, len(row), counts[i], most, lengths) for i, row in enumerate(rows)])


def _bleu(
    i: int,
    length: int,
    of_row: list[Counter[tuple[int, ...]]],
    most: Mapping[tuple[int, ...], tuple[int, int, int]],
    lengths: list[int],
) -> float:
    logs, halves, any_matched = [], 1.0, False
    for of_n in of_row:
        total = of_n.total()
        if not total:
            break
        matched = 0
        for gram, count in of_n.items():
            first, owner, second = most[gram]
            matched += min(count, second if owner == i else first)
        any_matched |= matched > 0
        halves *= 1 if matched else 2
        logs.append(math.log(matched / total if matched else 1 / (halves * total)))
    if not any_matched:
        return 0.0
    others = list(lengths)
    others.remove(length)
    nearest = min(others, key=lambda other: (abs(other - length), other))
    penalty = 1.0 if length >= nearest else math.exp(1 - nearest / length)
    return penalty * math.exp(sum(logs) / len(logs))
