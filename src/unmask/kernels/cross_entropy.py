"""Weighted cross entropy and its gradient in one pass over the logits, which the gradient overwrites."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _cross_entropy(logits_ptr, stride, x_ptr, weight_ptr, nats_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * stride
    x = tl.load(x_ptr + row)
    weight = tl.load(weight_ptr + row).to(tl.float32)
    logit_x = tl.load(base + x).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    # The largest logit so far and the sum of exponentials relative to it, per lane; combined after the loop.
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + lanes
        value = tl.load(base + at, mask=at < WIDTH, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, value)
        total = total * tl.exp(top - new) + tl.exp(value - new)
        top = new
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(nats_ptr + row, weight * (lse - logit_x))
    for start in range(0, WIDTH, BLOCK):  # the row is still in the cache
        at = start + lanes
        value = tl.load(base + at, mask=at < WIDTH, other=-float("inf")).to(tl.float32)
        grad = weight * (tl.exp(value - lse) - tl.where(at == x, 1.0, 0.0))
        tl.store(base + at, grad.to(logits_ptr.dtype.element_ty), mask=at < WIDTH)


def cross_entropy_grad_(logits_CI: Tensor, x_C: Tensor, weight_C: Tensor) -> Tensor:
    """Return nats_C = weight x -log softmax(logits)[x], and overwrite logits_CI with the gradient of their sum."""
    nats_C = torch.empty(len(x_C), dtype=torch.float32, device=logits_CI.device)
    if len(x_C):
        _cross_entropy[(len(x_C),)](
            logits_CI, logits_CI.stride(0), x_C, weight_C, nats_C, WIDTH=logits_CI.shape[1], BLOCK=BLOCK, num_warps=8
        )
    return nats_C
