"""Random draws as a pure function of (key, counters): stateless, vectorised, identical on every device and in any
batch.

A draw is a 64-bit hash in integer tensor arithmetic. There is no state to consume: a row of a batch, a shard of a
cluster and a request on a server get the numbers that belong to their key, whatever runs beside them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1


def _signed(x: int) -> int:
    """The int64 with the same 64 bits."""
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x


# The constants of the splitmix64 generator (Steele, Lea and Flood 2014).
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MUL_1 = _signed(0xBF58476D1CE4E5B9)
_MUL_2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift; torch's >> on int64 is arithmetic."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MUL_1
    x = (x ^ _shift(x, 27)) * _MUL_2
    return x ^ _shift(x, 31)


def fold(key: Tensor, *counters: Tensor | int) -> Tensor:
    """A new key for each value of the counters: 64 hashed bits, broadcast over all arguments.

    >>> import torch
    >>> fold(torch.tensor(7), 1).equal(fold(torch.tensor(7), 1))
    True
    """
    for counter in counters:
        if isinstance(counter, int):
            counter = torch.tensor(_signed(counter), device=key.device)
        key = _mix(key + (counter.to(key.dtype) + 1) * _GOLDEN)
    return key


def row_keys(seed: int, rows: Tensor) -> Tensor:
    """The keys of rows numbered by `rows`, for a seed of any size.

    >>> import torch
    >>> row_keys(0, torch.arange(3)).shape
    torch.Size([3])
    """
    return fold(fold(torch.tensor(_signed(seed), device=rows.device), seed >> 64), rows)


def uniform(key: Tensor, *counters: Tensor | int) -> Tensor:
    """Uniform numbers in [0, 1): 53 bits in float64, or 24 in float32 if the device has no float64.

    >>> import torch
    >>> bool(((u := uniform(torch.arange(1000), 0)) >= 0).all() and (u < 1).all())
    True
    """
    bits = fold(key, *counters)
    if bits.device.type == "mps":
        return _shift(bits, 40).to(torch.float32) * 2.0**-24
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def normal(key: Tensor, *counters: Tensor | int) -> Tensor:
    """Standard normal numbers, each from two uniforms of its own (Box and Muller 1958), in their precision.

    >>> import torch
    >>> normal(torch.tensor(7), torch.arange(3)).shape
    torch.Size([3])
    """
    key = fold(key, *counters)
    radius = torch.sqrt(-2 * torch.log1p(-uniform(key, 0)))  # of a number in (0, 1]
    return radius * torch.cos(2 * math.pi * uniform(key, 1))


def categorical(log_p: Tensor, u: Tensor) -> Tensor:
    """Draw from exp(log_p) over the last axis by inverse CDF with the uniform u (one per distribution).

    The sums run in float64: a float32 Gumbel draw over 50,000 tokens would cut off the tail, which acts like a lower
    temperature. One uniform a draw also makes the result reproducible across devices.

    >>> import torch
    >>> categorical(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([0.3]))
    tensor([1])
    """
    device = log_p.device
    if device.type == "mps":  # mps has no float64; the few rows that open are moved to the CPU
        return categorical(log_p.cpu(), u.cpu()).to(device)
    p = torch.softmax(log_p.to(torch.float64), dim=-1)
    cdf = torch.cumsum(p, dim=-1)
    # Scaled by the last sum, so that u close to 1 cannot fall off the end; right=True skips tokens of probability 0.
    point = (u.to(torch.float64) * cdf[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cdf, point, right=True).squeeze(-1).clamp_(max=log_p.shape[-1] - 1)
