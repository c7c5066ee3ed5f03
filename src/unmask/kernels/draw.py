"""An exact categorical draw over a large vocabulary in two short kernels, sums in float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024


@triton.jit
def _sums(logits_ptr, stride, block_ptr, inv_temp_ptr, top_ptr, sum_ptr, I, C, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each chunk's largest value and its sum of exponentials relative to that."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = c * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits_ptr + row * stride + at, mask=at < I, other=-float("inf")).to(tl.float32)
    value += tl.load(block_ptr + at, mask=at < I, other=-float("inf"))
    value = value.to(tl.float64) * tl.load(inv_temp_ptr)
    top = tl.maximum(tl.max(value, 0), -1e300)
    tl.store(top_ptr + row * C + c, top)
    tl.store(sum_ptr + row * C + c, tl.sum(tl.exp(value - top), 0))


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    logits_ptr,
    stride,
    block_ptr,
    inv_temp_ptr,
    top_ptr,
    sum_ptr,
    u_ptr,
    token_ptr,
    log_prob_ptr,
    I,
    C,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The chunk in which u falls, then the token inside it."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    tops = tl.load(top_ptr + row * C + chunks, mask=chunks < C, other=-1e300)
    highest = tl.max(tops, 0)
    mass = tl.load(sum_ptr + row * C + chunks, mask=chunks < C, other=0.0) * tl.exp(tops - highest)
    upto = tl.cumsum(mass, 0)
    total = tl.sum(mass, 0)
    point = tl.load(u_ptr + row) * total
    # Of the chunks with any mass, the first whose running sum passes the point; rounding can leave none: then the last.
    last = tl.max(tl.where(mass > 0, chunks, 0), 0)
    c = tl.minimum(tl.sum(tl.where(upto <= point, 1, 0), 0), last)
    before = tl.sum(tl.where(chunks < c, mass, 0.0), 0)
    lanes = tl.arange(0, CHUNK)
    at = c * CHUNK + lanes
    value = tl.load(logits_ptr + row * stride + at, mask=at < I, other=-float("inf")).to(tl.float32)
    value += tl.load(block_ptr + at, mask=at < I, other=-float("inf"))
    value = value.to(tl.float64) * tl.load(inv_temp_ptr)
    p = tl.exp(value - highest)
    inside = before + tl.cumsum(p, 0)
    last_lane = tl.max(tl.where(p > 0, lanes, 0), 0)
    lane = tl.minimum(tl.sum(tl.where(inside <= point, 1, 0), 0), last_lane)
    drawn = tl.sum(tl.where(lanes == lane, value, 0.0), 0)
    tl.store(token_ptr + row, (c * CHUNK + lane).to(tl.int64))
    tl.store(log_prob_ptr + row, (drawn - highest - tl.log(total)).to(tl.float32))


def draw(logits_NI: Tensor, block_I: Tensor, u_N: Tensor, inv_temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens from softmax((logits + block) x inv_temperature) by inverse CDF with u, and their log-probabilities.

    block_I is 0, or -inf for an id that must not be drawn; inv_temperature is one float64 on the device.
    """
    N, I = logits_NI.shape
    C = triton.cdiv(I, CHUNK)
    top_NC = torch.empty(N, C, dtype=torch.float64, device=logits_NI.device)
    sum_NC = torch.empty_like(top_NC)
    token_N = torch.empty(N, dtype=torch.int64, device=logits_NI.device)
    log_prob_N = torch.empty(N, dtype=torch.float32, device=logits_NI.device)
    given = (logits_NI, logits_NI.stride(0), block_I, inv_temperature, top_NC, sum_NC)
    _sums[(N, C)](*given, I, C, CHUNK=CHUNK, num_warps=4)
    _pick[(N,)](
        *given, u_N, token_N, log_prob_N, I, C, CHUNKS=max(16, triton.next_power_of_2(C)), CHUNK=CHUNK, num_warps=4
    )
    return token_N, log_prob_N
