"""For training: one joint projection → rotated queries, rotated keys, values, in one pass, and its backward pass.

Under a compiler they are custom operators, which a graph includes unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library


@triton.jit
def _split_rope(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    length,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = HEADS * 2 * HALF
    lanes = tl.arange(0, BLOCK)
    head, k = lanes // HALF, lanes % HALF
    inside = head < HEADS
    at = head * (2 * HALF) + k
    cos = tl.load(cos_ptr + (row % length) * HALF + k)
    sin = tl.load(sin_ptr + (row % length) * HALF + k)
    if BACK:  # the gradient is rotated back by the same angle
        sin = -sin
    joint = qkv_ptr + row * 3 * D + at
    for part in tl.static_range(3):
        alone = (q_ptr if part == 0 else (k_ptr if part == 1 else v_ptr)) + row * D + at
        source = alone if BACK else joint + part * D
        target = joint + part * D if BACK else alone
        real = tl.load(source, mask=inside, other=0.0)
        imag = tl.load(source + HALF, mask=inside, other=0.0)
        if part < 2:
            a, b = real.to(tl.float32), imag.to(tl.float32)
            real = (a * cos - b * sin).to(qkv_ptr.dtype.element_ty)
            imag = (a * sin + b * cos).to(qkv_ptr.dtype.element_ty)
        tl.store(target, real, mask=inside)
        tl.store(target + HALF, imag, mask=inside)


def _launch(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, length: int, back: bool) -> None:
    half = cos.shape[1]
    heads = q.shape[1] // (2 * half)
    shape = {"HEADS": heads, "HALF": half, "BLOCK": triton.next_power_of_2(heads * half), "BACK": back}
    _split_rope[(len(qkv),)](qkv, q, k, v, cos, sin, length, **shape, num_warps=4)


def split_rope(qkv_MW: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q_MD, k_MD (both rotated) and v_MD of qkv_MW; row m has position m % L. cos and sin are float32."""
    way: Any = _split_op if torch.compiler.is_compiling() else _SplitRope.apply
    parts: tuple[Tensor, Tensor, Tensor] = way(qkv_MW, cos_LK, sin_LK)
    return parts


def join_rope(q_MD: Tensor, k_MD: Tensor, v_MD: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """The gradient of split_rope."""
    return _join(q_MD, k_MD, v_MD, cos_LK, sin_LK)


def _split(qkv_MW: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    M, W = qkv_MW.shape
    q, k, v = (qkv_MW.new_empty(M, W // 3) for _ in range(3))
    _launch(qkv_MW.contiguous(), q, k, v, cos_LK, sin_LK, len(cos_LK), back=False)
    return q, k, v


def _join(q_MD: Tensor, k_MD: Tensor, v_MD: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    qkv = q_MD.new_empty(len(q_MD), 3 * q_MD.shape[1])
    _launch(qkv, q_MD.contiguous(), k_MD.contiguous(), v_MD.contiguous(), cos_LK, sin_LK, len(cos_LK), back=True)
    return qkv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None]:
    return join_rope(dq, dk, dv, *ctx.saved_tensors), None, None


def _op_backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None]:
    # traced with fake tensors, when the compiler no longer reports that it is compiling
    return _join_op(dq, dk, dv, *ctx.saved_tensors), None, None


class _SplitRope(torch.autograd.Function):
    forward, setup_context, backward = staticmethod(_split), staticmethod(_setup), staticmethod(_backward)


_split_op = library.custom_op("unmask::split_rope", _split, mutates_args=())
_join_op = library.custom_op("unmask::join_rope", _join, mutates_args=())
_split_op.register_autograd(_op_backward, setup_context=_setup)


@_split_op.register_fake
def _(qkv_MW: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    M, W = qkv_MW.shape
    return qkv_MW.new_empty(M, W // 3), qkv_MW.new_empty(M, W // 3), qkv_MW.new_empty(M, W // 3)


@_join_op.register_fake
def _(q_MD: Tensor, k_MD: Tensor, v_MD: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    return q_MD.new_empty(q_MD.shape[0], 3 * q_MD.shape[1])
