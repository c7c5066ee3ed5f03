"""Tiles of rows of channels, [B, L, E], for kernels that go through them step by step.

The values of a step are a vector of channels, and those of a tile's TIME steps are a tuple of such vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_line(tile, L, row, REVERSE: tl.constexpr, TIME: tl.constexpr):
    """The line, of B x L, of a tile's first step; the others follow or, with REVERSE, go before."""
    return row * L + (L - 1 - tile * TIME if REVERSE else tile * TIME)


@triton.jit
def line_of(first, k, REVERSE: tl.constexpr):
    return first - k if REVERSE else first + k


@triton.jit
def read_tile(ptr, tile, first, L, E, lanes, REVERSE: tl.constexpr, TIME: tl.constexpr):
    """A tile's values in float32; 0 outside of the row."""
    values = ()
    for k in tl.static_range(TIME):
        own = (tile * TIME + k < L) & (lanes < E)
        values += (tl.load(ptr + line_of(first, k, REVERSE) * E + lanes, mask=own, other=0.0).to(tl.float32),)
    return values


@triton.jit
def write_tile(ptr, values, tile, first, L, E, lanes, REVERSE: tl.constexpr, TIME: tl.constexpr):
    for k in tl.static_range(TIME):
        own = (tile * TIME + k < L) & (lanes < E)
        tl.store(ptr + line_of(first, k, REVERSE) * E + lanes, values[k].to(ptr.dtype.element_ty), mask=own)


@triton.jit
def read_numbers(ptr, n, tile, first, L, N: tl.constexpr, REVERSE: tl.constexpr, TIME: tl.constexpr):
    """One of the N numbers that belong to each step, [B, L, N]; 0 outside of the row."""
    values = ()
    for k in tl.static_range(TIME):
        values += (tl.load(ptr + line_of(first, k, REVERSE) * N + n, mask=tile * TIME + k < L, other=0.0),)
    return values


@triton.jit
def times(a, b, TIME: tl.constexpr):
    values = ()
    for k in tl.static_range(TIME):
        values += (a[k] * b[k],)
    return values


@triton.jit
def add_to(ptr, more, own, i):
    """Add to the sum of the previous tiles; the first tile (i = 0) stores instead."""
    tl.store(ptr, tl.load(ptr, mask=own & (i > 0), other=0.0) + more, mask=own)
