"""Clipping, AdamW and the averaged weights in one pass: every number is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _adamw(
    p_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    ema_ptr,
    scale_ptr,
    nonfinite_ptr,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    correction1,
    root_correction2,
    towards,
    size,
    EMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < size) & (tl.load(nonfinite_ptr) == 0)
    grad = tl.load(grad_ptr + at, mask=inside) * tl.load(scale_ptr)
    exp_avg = tl.load(exp_avg_ptr + at, mask=inside)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=inside)
    p = tl.load(p_ptr + at, mask=inside)
    exp_avg += (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    p = p * (1 - lr * weight_decay)
    p -= (lr / correction1) * exp_avg / (tl.sqrt(exp_avg_sq) / root_correction2 + eps)
    tl.store(exp_avg_ptr + at, exp_avg, mask=inside)
    tl.store(exp_avg_sq_ptr + at, exp_avg_sq, mask=inside)
    tl.store(p_ptr + at, p, mask=inside)
    if EMA:
        ema = tl.load(ema_ptr + at, mask=inside)
        tl.store(ema_ptr + at, ema + towards * (p - ema), mask=inside)


def adamw_(
    p: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    ema: Tensor | None,
    *,
    scale: Tensor,
    nonfinite: Tensor,
    count: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    towards: float,
) -> None:
    """The `count`-th AdamW update of one parameter with scale x grad, then ema += towards x (p - ema).

    All tensors are float32 and contiguous; scale and nonfinite are single numbers on the device. Nothing changes if
    nonfinite is not 0.
    """
    size = p.numel()
    _adamw[(triton.cdiv(size, BLOCK),)](
        p,
        grad,
        exp_avg,
        exp_avg_sq,
        p if ema is None else ema,
        scale,
        nonfinite,
        lr,
        betas[0],
        betas[1],
        eps,
        weight_decay,
        1 - betas[0] ** count,
        (1 - betas[1] ** count) ** 0.5,
        towards,
        size,
        EMA=ema is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
