"""For training: queries and keys of a joint projection, normed and rotated in place, and their backward pass.

A rotation preserves norms, so the backward pass needs only the output and one number per head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-6


@triton.jit(do_not_specialize=["listed"])
def _forward(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    listed,
    rstd_ptr,
    length,
    eps,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, k = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_K)[None, :]
    inside = (head < HEADS) & (k < HALF)
    position = tl.where(listed > 0, tl.load(position_ptr + row, mask=listed > 0, other=0), row % length)
    cos = tl.load(cos_ptr + position * HALF + k, mask=k < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + k, mask=k < HALF, other=0.0)
    D: tl.constexpr = HEADS * 2 * HALF
    for part in tl.static_range(2):
        at = qkv_ptr + row * 3 * D + part * D + head * (2 * HALF) + k
        a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)
            lane = tl.arange(0, BLOCK_H)
            tl.store(rstd_ptr + (row * 2 + part) * HEADS + lane, rstd, mask=lane < HEADS)
            a *= rstd[:, None]
            b *= rstd[:, None]
        tl.store(at, (a * cos - b * sin).to(qkv_ptr.dtype.element_ty), mask=inside)
        tl.store(at + HALF, (a * sin + b * cos).to(qkv_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["listed", "lines"])
def _backward(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    listed,
    rstd_ptr,
    out_ptr,
    length,
    q_row,
    q_head,
    q_line,
    k_row,
    k_head,
    k_line,
    v_row,
    v_head,
    v_line,
    lines,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, k = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_K)[None, :]
    inside = (head < HEADS) & (k < HALF)
    position = tl.where(listed > 0, tl.load(position_ptr + row, mask=listed > 0, other=0), row % length)
    cos = tl.load(cos_ptr + position * HALF + k, mask=k < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + k, mask=k < HALF, other=0.0)
    D: tl.constexpr = HEADS * 2 * HALF
    b_row, line = row // lines, row % lines
    for part in tl.static_range(3):
        if part == 0:
            source = dq_ptr + b_row * q_row + line * q_line + head * q_head + k
        elif part == 1:
            source = dk_ptr + b_row * k_row + line * k_line + head * k_head + k
        else:
            source = dv_ptr + b_row * v_row + line * v_line + head * v_head + k
        at = row * 3 * D + part * D + head * (2 * HALF) + k
        da = tl.load(source, mask=inside, other=0.0)
        db = tl.load(source + HALF, mask=inside, other=0.0)
        if part < 2:
            real, imag = da.to(tl.float32), db.to(tl.float32)
            if NORM:
                lane = tl.arange(0, BLOCK_H)
                rstd = tl.load(rstd_ptr + (row * 2 + part) * HEADS + lane, mask=lane < HEADS, other=0.0)[:, None]
                a = tl.load(qkv_ptr + at, mask=inside, other=0.0).to(tl.float32)
                b = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
                along = ((tl.sum(real * a, 1) + tl.sum(imag * b, 1)) / (2 * HALF))[:, None]
                real = rstd * (real - a * along)
                imag = rstd * (imag - b * along)
            da = (real * cos + imag * sin).to(out_ptr.dtype.element_ty)
            db = (imag * cos - real * sin).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, da, mask=inside)
        tl.store(out_ptr + at + HALF, db, mask=inside)


def rope_norm(
    qkv_MW: Tensor,
    cos_LK: Tensor,
    sin_LK: Tensor,
    *,
    heads: int,
    rows: int,
    norm: bool,
    position_M: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [rows, M / rows, heads, width of a head]: views of qkv_MW, which is changed in place and must not be
    used afterwards.

    Queries and keys are rotated and, with `norm`, scaled to root mean square 1. Line m has position position_M[m], or
    m % L. cos and sin are in float32.
    """
    parts: tuple[Tensor, Tensor, Tensor] = _RopeNorm.apply(qkv_MW, cos_LK, sin_LK, position_M, heads, rows, norm)
    return parts


class _RopeNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor | None, heads: int, rows: int, norm: bool
    ) -> tuple[Tensor, ...]:
        M, W = qkv.shape
        qkv = qkv.detach()  # the projection's result is not used elsewhere, not even in its backward pass
        rstd = torch.empty(M, 2, heads if norm else 0, dtype=torch.float32, device=qkv.device)
        ctx.shape = _shape(heads, W // 3 // heads // 2, norm)
        ctx.lines = M // rows
        if M:
            _forward[(M,)](qkv, cos, sin, *_listed(position, qkv), rstd, len(cos), EPS, **ctx.shape)
        ctx.save_for_backward(qkv, cos, sin, position, rstd)
        return tuple(qkv.view(rows, M // rows, 3, heads, -1).unbind(dim=2))

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
        qkv, cos, sin, position, rstd = ctx.saved_tensors
        out = torch.empty_like(qkv)
        grads = [t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv)]
        strides = [t.stride(i) for t in grads for i in (0, 2, 1)]
        if len(qkv):
            where = _listed(position, qkv)
            _backward[(len(qkv),)](*grads, qkv, cos, sin, *where, rstd, out, len(cos), *strides, ctx.lines, **ctx.shape)
        return out, None, None, None, None, None, None


def _listed(position_M: Tensor | None, like: Tensor) -> tuple[Tensor, int]:
    """Positions, and whether to read them: an argument, not a constant, so that both cases share one kernel."""
    return (like.new_empty(1, dtype=torch.int64), 0) if position_M is None else (position_M, 1)


def _shape(heads: int, half: int, norm: bool) -> dict[str, Any]:
    blocks = {"BLOCK_H": triton.next_power_of_2(heads), "BLOCK_K": triton.next_power_of_2(half)}
    return {"NORM": norm, "HEADS": heads, "HALF": half, **blocks, "num_warps": 2}
