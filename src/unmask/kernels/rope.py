"""Rotary positions in place, on the queries and keys of one joint projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rope(
    x_ptr,
    stride,
    cos_ptr,
    sin_ptr,
    position_ptr,
    length,
    HEADS,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if GIVEN:
        position = tl.load(position_ptr + row)
    else:
        position = row % length
    lanes = tl.arange(0, BLOCK)
    head, k = lanes // HALF, lanes % HALF
    inside = head < HEADS
    cos = tl.load(cos_ptr + position * HALF + k).to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + k).to(tl.float32)
    real_at = x_ptr + row * stride + head * (2 * HALF) + k
    real = tl.load(real_at, mask=inside, other=0.0).to(tl.float32)
    imag = tl.load(real_at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(real_at, (real * cos - imag * sin).to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(real_at + HALF, (real * sin + imag * cos).to(x_ptr.dtype.element_ty), mask=inside)


def rope_(
    x_MW: Tensor, cos_LK: Tensor, sin_LK: Tensor, heads: int, *, length: int, position_M: Tensor | None = None
) -> None:
    """Rotate the first `heads` heads of every row of x_MW in place; row m has position m % length or position_M[m]."""
    M, half = len(x_MW), cos_LK.shape[1]
    block = triton.next_power_of_2(heads * half)
    _rope[(M,)](
        x_MW,
        x_MW.stride(0),
        cos_LK,
        sin_LK,
        cos_LK if position_M is None else position_M,
        length,
        heads,
        HALF=half,
        BLOCK=block,
        GIVEN=position_M is not None,
        num_warps=4,
    )
