"""An exact categorical draw over a large vocabulary: sums by chunk in float64, then the chunk and token that u hits.

For a few positions the first kernel also computes the head's product, so the head's weights are read only once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from unmask.sampling.captured import Lines

CHUNK = 1024  # ids a program sums up
HEAD_CHUNK = 128  # the same if it also computes their logits
HEAD_ROWS = 64  # for more positions than this, the matrix library computes the product


@triton.jit
def _exp(x):
    """exp in float32, the precision of the logits; sums and the comparison with u are in float64."""
    return tl.exp(x.to(tl.float32)).to(tl.float64)


@triton.jit
def _sums(logits_ptr, block_ptr, inv_temp_ptr, top_ptr, sum_ptr, width, C, CHUNK: tl.constexpr):
    """Each chunk's largest value and its sum of exponentials relative to that."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = c * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits_ptr + row * width + at, mask=at < width, other=-float("inf")).to(tl.float32)
    value += tl.load(block_ptr + at, mask=at < width, other=-float("inf"))
    value = value.to(tl.float64) * tl.load(inv_temp_ptr)
    top = tl.maximum(tl.max(value, 0), -1e300)
    tl.store(top_ptr + row * C + c, top)
    tl.store(sum_ptr + row * C + c, tl.sum(_exp(value - top), 0))


@triton.jit
def _head_sums(
    h_ptr,
    w_ptr,
    block_ptr,
    inv_temp_ptr,
    logits_ptr,
    top_ptr,
    sum_ptr,
    N,
    width,
    C,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The same, with logits = h @ w.T computed here."""
    c = tl.program_id(0)
    v = c * CHUNK + tl.arange(0, CHUNK)
    n, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    acc = tl.zeros([CHUNK, ROWS], tl.float32)
    for start in range(0, D, BLOCK_D):
        w = tl.load(w_ptr + v[:, None] * D + (start + d)[None, :], mask=(v < width)[:, None], other=0.0)
        h = tl.load(h_ptr + n[None, :] * D + (start + d)[:, None], mask=(n < N)[None, :], other=0.0)
        acc = tl.dot(w, h, acc)
    tl.store(logits_ptr + n[None, :] * width + v[:, None], acc, mask=(v < width)[:, None] & (n < N)[None, :])
    value = acc + tl.load(block_ptr + v, mask=v < width, other=-float("inf"))[:, None]
    value = value.to(tl.float64) * tl.load(inv_temp_ptr)
    top = tl.maximum(tl.max(value, 0), -1e300)
    tl.store(top_ptr + n * C + c, top, mask=n < N)
    tl.store(sum_ptr + n * C + c, tl.sum(_exp(value - top[None, :]), 0), mask=n < N)


@triton.jit
def _pick(
    logits_ptr,
    block_ptr,
    inv_temp_ptr,
    top_ptr,
    sum_ptr,
    line_ptr,
    target_ptr,
    u_ptr,
    text_ptr,
    token_ptr,
    log_prob_ptr,
    N,
    width,
    C,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The chunk in which u falls, then the token inside it, written where the plan's line says."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(line_ptr) * N + row
    target = tl.load(target_ptr + entry)
    chunks = tl.arange(0, CHUNKS)
    tops = tl.load(top_ptr + row * C + chunks, mask=chunks < C, other=-1e300)
    highest = tl.max(tops, 0)
    mass = tl.load(sum_ptr + row * C + chunks, mask=chunks < C, other=0.0) * tl.exp(tops - highest)
    upto = tl.cumsum(mass, 0)
    total = tl.sum(mass, 0)
    point = tl.load(u_ptr + target) * total
    # The first chunk with nonzero mass whose running sum exceeds the point; if rounding leaves none, the last one.
    last = tl.max(tl.where(mass > 0, chunks, 0), 0)
    c = tl.minimum(tl.sum(tl.where(upto <= point, 1, 0), 0), last)
    before = tl.sum(tl.where(chunks < c, mass, 0.0), 0)
    lanes = tl.arange(0, CHUNK)
    at = c * CHUNK + lanes
    value = tl.load(logits_ptr + row * width + at, mask=at < width, other=-float("inf")).to(tl.float32)
    value += tl.load(block_ptr + at, mask=at < width, other=-float("inf"))
    value = value.to(tl.float64) * tl.load(inv_temp_ptr)
    top = tl.load(top_ptr + row * C + c)
    p = _exp(value - top) * tl.exp(top - highest)  # computed exactly as in the sum
    inside = before + tl.cumsum(p, 0)
    last_lane = tl.max(tl.where(p > 0, lanes, 0), 0)
    lane = tl.minimum(tl.sum(tl.where(inside <= point, 1, 0), 0), last_lane)
    drawn = tl.sum(tl.where(lanes == lane, value, 0.0), 0)
    token = (c * CHUNK + lane).to(tl.int64)
    tl.store(text_ptr + target, token)
    tl.store(token_ptr + entry, token)
    tl.store(log_prob_ptr + entry, (drawn - highest - tl.log(total)).to(tl.float32))


def draw(h_ND: Tensor, weight_ID: Tensor | None, block_I: Tensor, inv_temperature: Tensor, lines: Lines) -> None:
    """Draw from softmax((h @ weight.T + block) x inv_temperature) by inverse CDF, and write.

    Without a weight, h_ND are the logits themselves. block_I is the bias, or -inf for an id that must not be drawn;
    inv_temperature is one float64 on the device.
    """
    N, width = len(h_ND), len(block_I)
    device = h_ND.device
    fused = weight_ID is not None and N <= HEAD_ROWS and h_ND.element_size() == 2 and h_ND.shape[1] % 64 == 0
    chunk = HEAD_CHUNK if fused else CHUNK
    C = triton.cdiv(width, chunk)
    top_NC = torch.empty(N, C, dtype=torch.float64, device=device)
    sum_NC = torch.empty_like(top_NC)
    if fused:
        assert weight_ID is not None
        logits_NI = torch.empty(N, width, device=device)
        _head_sums[(C,)](
            h_ND,
            weight_ID,
            block_I,
            inv_temperature,
            logits_NI,
            top_NC,
            sum_NC,
            N,
            width,
            C,
            D=h_ND.shape[1],
            ROWS=max(16, triton.next_power_of_2(N)),
            CHUNK=chunk,
            BLOCK_D=64,
            num_warps=4,
            num_stages=4,
        )
    else:
        logits_NI = h_ND if weight_ID is None else _product(h_ND, weight_ID)
        _sums[(N, C)](logits_NI, block_I, inv_temperature, top_NC, sum_NC, width, C, CHUNK=chunk, num_warps=4)
    _pick[(N,)](
        logits_NI,
        block_I,
        inv_temperature,
        top_NC,
        sum_NC,
        lines.line,
        lines.target,
        lines.u,
        lines.text,
        lines.token,
        lines.log_prob,
        N,
        width,
        C,
        CHUNKS=max(16, triton.next_power_of_2(C)),
        CHUNK=chunk,
        num_warps=4,
    )


def _product(h_ND: Tensor, weight_ID: Tensor) -> Tensor:
    """Logits in float32, whatever the operands are."""
    if h_ND.dtype == torch.float32 or not h_ND.is_cuda:
        return h_ND @ weight_ID.T
    return torch.mm(h_ND, weight_ID.T, out_dtype=torch.float32)
