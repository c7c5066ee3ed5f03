"""The steps between two products of a transformer block in one pass: residual, gate, norm, shift and scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _residual_norm(
    x_ptr,
    y_ptr,
    bias_ptr,
    gate_ptr,
    weight_ptr,
    scale_ptr,
    shift_ptr,
    h_ptr,
    D,
    rows_per_cond,
    gate_stride,
    cond_stride,
    eps,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    COND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < D
    cond = row // rows_per_cond
    x = tl.load(x_ptr + row * D + lanes, mask=inside, other=0.0).to(tl.float32)
    bias = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + row * D + lanes, mask=inside, other=0.0).to(tl.float32) + bias
        gate = tl.load(gate_ptr + cond * gate_stride + lanes, mask=inside, other=0.0).to(tl.float32)
        x = (x + gate * y).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * D + lanes, x, mask=inside)
        x = x.to(tl.float32)
    else:
        x = x + bias
    mean = tl.sum(x, 0) / D
    centred = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    h = centred * rstd * tl.load(weight_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    if COND:
        scale = tl.load(scale_ptr + cond * cond_stride + lanes, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + cond * cond_stride + lanes, mask=inside, other=0.0).to(tl.float32)
        h = h * (1 + scale) + shift
    tl.store(h_ptr + row * D + lanes, h.to(h_ptr.dtype.element_ty), mask=inside)


def residual_norm(
    x_MD: Tensor,
    weight_D: Tensor,
    *,
    bias_D: Tensor | None = None,
    y_MD: Tensor | None = None,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    rows_per_cond: int = 1,
) -> Tensor:
    """norm(x + bias) x weight, with optional scale and shift.

    With y and gate, x += gate x (y + bias) first, in place; without, only the norm sees the bias and x does not change.
    gate, scale and shift are [C, D]: row m uses line m // rows_per_cond (C = 1: all use line 0); scale and shift must
    have the same layout.
    """
    M, D = x_MD.shape
    h_MD = torch.empty_like(x_MD)
    block = triton.next_power_of_2(D)
    _residual_norm[(M,)](
        x_MD,
        x_MD if y_MD is None else y_MD,
        weight_D if bias_D is None else bias_D,
        weight_D if gate is None else gate,
        weight_D,
        weight_D if scale is None else scale,
        weight_D if shift is None else shift,
        h_MD,
        D,
        rows_per_cond,
        _stride(gate),
        _stride(scale),
        1e-5,
        ADD=y_MD is not None,
        BIAS=bias_D is not None,
        COND=scale is not None,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )
    return h_MD


def _stride(lines: Tensor | None) -> int:
    return 0 if lines is None or len(lines) == 1 else lines.stride(0)
