"""Muon's updates before and after its matrix products, one pass each: every number is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _momentum(grad_ptr, momentum_ptr, ahead_ptr, scale_ptr, nonfinite_ptr, beta, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    fine = tl.load(nonfinite_ptr).to(tl.int32) == 0
    momentum = tl.load(momentum_ptr + at, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    grad = tl.where(fine, grad, momentum)
    momentum += (1 - beta) * (grad - momentum)
    tl.store(momentum_ptr + at, momentum, mask=inside & fine)
    tl.store(ahead_ptr + at, (grad + beta * (momentum - grad)).to(ahead_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _apply(
    p_ptr, update_ptr, ema_ptr, nonfinite_ptr, rate, decay, towards, size, EMA: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < size) & (tl.load(nonfinite_ptr).to(tl.int32) == 0)
    p = tl.load(p_ptr + at, mask=inside, other=0.0)
    p = p * (1 - decay) - rate * tl.load(update_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_ptr + at, p, mask=inside)
    if EMA:
        ema = tl.load(ema_ptr + at, mask=inside, other=0.0)
        tl.store(ema_ptr + at, ema + towards * (p - ema), mask=inside)


def momentum_(grad: Tensor, momentum: Tensor, ahead: Tensor, *, scale: Tensor, nonfinite: Tensor, beta: float) -> None:
    """Move momentum by the fraction 1 - beta to scale x grad; ahead, in its own dtype, gets the Nesterov step from it.

    All tensors are contiguous; scale and nonfinite are single numbers on the device. If nonfinite is not 0, momentum
    does not change.
    """
    size = grad.numel()
    _momentum[(triton.cdiv(size, BLOCK),)](
        grad, momentum, ahead, scale, nonfinite, beta, size, BLOCK=BLOCK, num_warps=8
    )


def apply_(
    p: Tensor,
    update: Tensor,
    ema: Tensor | None,
    *,
    nonfinite: Tensor,
    rate: float,
    decay: float,
    towards: float,
) -> None:
    """p = (1 - decay) p - rate x update, then ema += towards x (p - ema); nothing changes if nonfinite is not 0."""
    size, place = p.numel(), p if ema is None else ema
    _apply[(triton.cdiv(size, BLOCK),)](
        p, update, place, nonfinite, rate, decay, towards, size, EMA=ema is not None, BLOCK=BLOCK, num_warps=8
    )
