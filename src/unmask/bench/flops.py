"""The arithmetic of training and sampling, counted as multiplications and additions of matrix products."""

from __future__ import annotations

TRAIN = "6·N·tokens + 12·blocks·L·D·tokens + 6·D·V·masked, N = 12·blocks·D² (masked: half of the tokens)"
DENOISE = "(2·N·L + 4·blocks·L²·D) for each row of each network call + 2·D·V for each token, N = 12·blocks·D²"
DECODE = "(2·N + 4·blocks·D·position + 2·D·V) for each token, N = 12·blocks·D²"


def train(*, tokens: float, masked: float, length: int, hidden: int, blocks: int, vocab: int) -> float:
    """One step, forward and backward.

    >>> round(train(tokens=1024, masked=512, length=1024, hidden=768, blocks=12, vocab=50257) / 1e9)
    756
    """
    weights = 12 * blocks * hidden**2
    return 6.0 * weights * tokens + 12.0 * blocks * length * hidden * tokens + 6.0 * hidden * vocab * masked


def denoise(*, row_calls: int, tokens: int, length: int, hidden: int, blocks: int, vocab: int) -> float:
    """A diffusion sample: `row_calls` is the number of rows the network saw, summed over its calls."""
    row = 24.0 * blocks * hidden**2 * length + 4.0 * blocks * length**2 * hidden
    return row * row_calls + 2.0 * hidden * vocab * tokens


def decode(*, rows: int, length: int, hidden: int, blocks: int, vocab: int) -> float:
    """An autoregressive sample with a cache."""
    token = 24.0 * blocks * hidden**2 + 2.0 * hidden * vocab
    return rows * (token * length + 2.0 * blocks * hidden * length**2)
