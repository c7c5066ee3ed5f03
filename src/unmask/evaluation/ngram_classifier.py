"""A classifier of short texts: logistic regression on a text's words and pairs of words."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from unmask.errors import DataError
from unmask.evaluation.overlap import Score, share
from unmask.rng import row_keys, uniform

BINS = 1 << 18  # hash buckets for n-grams
HELD_OUT = 0.05
EPOCHS, BATCH, RATE, DECAY = 3, 512, 0.02, 1e-6
_PIECES = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, kw_only=True)
class NgramClassifier:
    """Predicts which of two classes a text belongs to. held_out: the accuracy on texts that it was not trained on."""

    weight_V1: Tensor
    bias: Tensor
    held_out: Score

    def probabilities(self, texts: Sequence[str]) -> Tensor:
        """[N] the probability of class 1 for each text.

        >>> classifier.probabilities(["great food"])  # doctest: +SKIP
        tensor([0.99])
        """
        return torch.sigmoid(_logits([_bins(text) for text in texts], self.weight_V1, self.bias))

    def sentence(self) -> str:
        """A description with the held-out accuracy, for a protocol."""
        low, high = self.held_out.ci95 or (float("nan"), float("nan"))
        return (
            f"Style is told by a logistic regression over words and pairs of words, {self.held_out.value:.2f}% right "
            f"({low:.2f} – {high:.2f}) of {self.held_out.n:,} sentences that it did not learn from"
        )


def train_classifier(texts: Sequence[str], classes: Sequence[int], *, seed: int = 0) -> NgramClassifier:
    """Train by Adam on all texts except a twentieth, which measures the accuracy.

    Copies of a text are either all used for training or all held out.

    >>> train_classifier(["good"] * 50 + ["bad"] * 50, [1] * 50 + [0] * 50)  # doctest: +SKIP
    """
    rows = [_bins(text) for text in texts]
    class_N = torch.tensor(classes, dtype=torch.float32)
    content_N = torch.tensor([zlib.crc32(text.encode()) for text in texts])
    held_N = uniform(row_keys(seed, content_N)) < HELD_OUT
    learned, held = (which.nonzero().squeeze(1).tolist() for which in (~held_N, held_N))
    if not held or len({classes[i] for i in learned}) < 2:
        raise DataError(f"{len(texts):,} texts are too few to train a classifier of two classes and to test it")
    weight_V1, bias = (torch.zeros(size, requires_grad=True) for size in ((BINS, 1), (1,)))
    optimizer = torch.optim.Adam([weight_V1, bias], lr=RATE)
    for epoch in range(EPOCHS):
        order = torch.argsort(uniform(row_keys(seed + 1, torch.tensor(epoch)), torch.arange(len(learned)))).tolist()
        for lo in range(0, len(order), BATCH):
            some = [learned[i] for i in order[lo : lo + BATCH]]
            logit_B = _logits([rows[i] for i in some], weight_V1, bias)
            loss = functional.binary_cross_entropy_with_logits(logit_B, class_N[some])
            gradients = torch.autograd.grad(loss + DECAY * weight_V1.square().sum(), (weight_V1, bias))
            weight_V1.grad, bias.grad = gradients
            optimizer.step()
    weight_V1, bias = weight_V1.detach(), bias.detach()
    right = (_logits([rows[i] for i in held], weight_V1, bias) > 0).float() == class_N[held]
    score = share("held-out accuracy", right.int().tolist(), seed=seed)
    return NgramClassifier(weight_V1=weight_V1, bias=bias, held_out=score)


def _logits(rows: Sequence[list[int]], weight_V1: Tensor, bias: Tensor) -> Tensor:
    """[B] the sum of the weights of each text's features."""
    starts = torch.tensor([0, *(len(row) for row in rows[:-1])]).cumsum(dim=0)
    ids = torch.tensor([id for row in rows for id in row], dtype=torch.long)
    return functional.embedding_bag(ids, weight_V1, starts, mode="sum").squeeze(1) + bias


def _bins(text: str) -> list[int]:
    """The buckets of a text's words and pairs of words, each once."""
    words = _PIECES.findall(text.lower())
    grams = {*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))}
    return sorted({zlib.crc32(gram.encode()) % BINS for gram in grams})
