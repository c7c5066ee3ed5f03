"""The selective scan and its gradient: each input is read once, tile by tile; only states are kept between tiles.

A program processes the tiles of its channels in one segment of a row, TIME steps of LANES channels each; in a tile the
recurrence of each of the N states is an associative scan in registers. If there are too few rows and channels to fill
the device, rows are split into segments, whose final states are computed first (one more pass over the inputs of the
state).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TIME, LANES = 32, 32  # size of a tile
PROGRAMS = 1024  # fewer do not fill a device
LEAST_TILES = 4  # minimum per segment
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _join(a, b, a_next, b_next):
    return a * a_next, a_next * b + b_next


@triton.jit
def _run(decay, entered, start, REVERSE: tl.constexpr):
    """The recurrence along the first axis from `start`: each value is decay x the previous one + entered."""
    far, h = tl.associative_scan((decay, entered), 0, _join, reverse=REVERSE)
    return far * start[None, :] + h


@triton.jit
def _tile(tile, L, E, row, lanes, REVERSE: tl.constexpr, TIME: tl.constexpr):
    """The indices of a tile's lines: positions in the row, which are inside it, indices in [B, L, E]."""
    t = tile * TIME + tl.arange(0, TIME)
    inside_T = t < L
    if REVERSE:
        t = L - 1 - t
    line_T = row * L + t
    return line_T, inside_T, line_T[:, None] * E + lanes[None, :], inside_T[:, None] & (lanes < E)[None, :]


@triton.jit
def _weights(A_ptr, B_ptr, C_ptr, n, lanes, own, line_T, inside_T, N: tl.constexpr):
    """For state n: A of each channel, and B and C of each line."""
    A = tl.load(A_ptr + lanes * N + n, mask=own, other=0.0)
    B_T = tl.load(B_ptr + line_T * N + n, mask=inside_T, other=0.0).to(tl.float32)
    return A, B_T, tl.load(C_ptr + line_T * N + n, mask=inside_T, other=0.0).to(tl.float32)


@triton.jit
def _lanes(ptr, lanes, own):
    return tl.load(ptr + lanes, mask=own, other=0.0)[None, :]


@triton.jit
def _decay(step, A):
    return tl.exp2(step * (A * LOG2E)[None, :])


@triton.jit
def _add(ptr, more, own, i):
    """Add to the sum of the previous tiles; the first tile (i = 0) stores instead."""
    tl.store(ptr, tl.load(ptr, mask=own & (i > 0), other=0.0) + more, mask=own)


@triton.jit
def _ends(
    value_ptr,
    step_ptr,
    A_ptr,
    weight_ptr,
    end_ptr,
    total_ptr,
    L,
    E,
    tiles,
    segments,
    N: tl.constexpr,
    REVERSE: tl.constexpr,
    GRADIENT: tl.constexpr,
    TIME: tl.constexpr,
    LANES: tl.constexpr,
):
    """The result of a segment started from zero: its final state, or with GRADIENT the gradient at its beginning."""
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    row, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    own = lanes < E
    slot = (row * segments + segment) * N * E + lanes
    passed = tl.zeros([LANES], tl.float32)
    i = 0
    while i < tiles:
        tile = segment * tiles + (i if GRADIENT else tiles - 1 - i)
        line_T, inside_T, at, inside = _tile(tile, L, E, row, lanes, REVERSE, TIME)
        step = tl.load(step_ptr + at, mask=inside, other=0.0)
        value = tl.load(value_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GRADIENT:
            far = passed[None, :] + tl.cumsum(step, 0)
        else:
            far = passed[None, :] + tl.cumsum(step, 0, reverse=True) - step
            value = value * step
        passed += tl.sum(step, 0)
        for n in range(N):
            A = tl.load(A_ptr + lanes * N + n, mask=own, other=0.0)
            weight_T = tl.load(weight_ptr + line_T * N + n, mask=inside_T, other=0.0).to(tl.float32)
            _add(end_ptr + slot + n * E, tl.sum(_decay(far, A) * value * weight_T[:, None], 0), own, i)
        tl.debug_barrier()  # the next tile loads what this one has stored
        i += 1
    tl.store(total_ptr + (row * segments + segment) * E + lanes, passed, mask=own)


@triton.jit
def _forward(
    x_ptr,
    step_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    start_ptr,
    y_ptr,
    L,
    E,
    tiles,
    segments,
    N: tl.constexpr,
    REVERSE: tl.constexpr,
    TIME: tl.constexpr,
    LANES: tl.constexpr,
):
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    row, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    own = lanes < E
    last = tl.arange(0, TIME)[:, None] == TIME - 1
    i = 0
    while i < tiles:
        tile = segment * tiles + i
        line_T, inside_T, at, inside = _tile(tile, L, E, row, lanes, REVERSE, TIME)
        step = tl.load(step_ptr + at, mask=inside, other=0.0)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = _lanes(D_ptr, lanes, own) * x
        slot = (row * (segments * tiles + 1) + tile) * N * E + lanes
        for n in range(N):
            A, B_T, C_T = _weights(A_ptr, B_ptr, C_ptr, n, lanes, own, line_T, inside_T, N)
            before = tl.load(start_ptr + slot + n * E, mask=own, other=0.0)
            h = _run(_decay(step, A), step * x * B_T[:, None], before, False)
            y += h * C_T[:, None]
            if i + 1 < tiles or segment + 1 == segments:  # the starts of other segments exist already
                tl.store(start_ptr + slot + (N + n) * E, tl.sum(tl.where(last, h, 0.0), 0), mask=own)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()
        i += 1


@triton.jit
def _backward(
    dy_ptr,
    x_ptr,
    step_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    start_ptr,
    after_ptr,
    dx_ptr,
    dstep_ptr,
    dA_ptr,
    dB_ptr,
    dC_ptr,
    dD_ptr,
    L,
    E,
    tiles,
    segments,
    N: tl.constexpr,
    REVERSE: tl.constexpr,
    TIME: tl.constexpr,
    LANES: tl.constexpr,
):
    """after: the gradient of the state after each segment, then of the state before it. dB, dC: one part per LANES."""
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    part = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // segments * L)
    row, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    own, place = lanes < E, (row * segments + segment) * N * E + lanes
    time = tl.arange(0, TIME)[:, None]
    i = 0
    while i < tiles:
        tile = segment * tiles + tiles - 1 - i
        line_T, inside_T, at, inside = _tile(tile, L, E, row, lanes, REVERSE, TIME)
        step = tl.load(step_ptr + at, mask=inside, other=0.0)
        inside_next = inside & (time < TIME - 1) & ((tile * TIME + time) < L - 1)
        step_next = tl.load(step_ptr + at + (-E if REVERSE else E), mask=inside_next, other=0.0)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        u, du, dstep = step * x, tl.zeros([TIME, LANES], tl.float32), tl.zeros([TIME, LANES], tl.float32)
        for n in range(N):
            A, B_T, C_T = _weights(A_ptr, B_ptr, C_ptr, n, lanes, own, line_T, inside_T, N)
            start_at = start_ptr + ((row * (segments * tiles + 1) + tile) * N + n) * E + lanes
            after = tl.load(after_ptr + place + n * E, mask=own, other=0.0)
            decay, entered = _decay(step, A), u * B_T[:, None]
            h = _run(decay, entered, tl.load(start_at, mask=own, other=0.0), False)
            g = _run(_decay(step_next, A), dy * C_T[:, None], after, True)
            du += g * B_T[:, None]
            left = g * (h - entered)  # the part from the previous state
            dstep += left * A[None, :]
            tl.store(dB_ptr + (part + line_T) * N + n, tl.sum(g * u, 1), mask=inside_T)
            tl.store(dC_ptr + (part + line_T) * N + n, tl.sum(h * dy, 1), mask=inside_T)
            _add(dA_ptr + place + n * E, tl.sum(left * step, 0), own, i)
            tl.store(after_ptr + place + n * E, tl.sum(tl.where(time == 0, decay * g, 0.0), 0), mask=own)
        _add(dD_ptr + (row * segments + segment) * E + lanes, tl.sum(dy * x, 0), own, i)
        tl.store(dx_ptr + at, (du * step + _lanes(D_ptr, lanes, own) * dy).to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dstep_ptr + at, dstep + du * x, mask=inside)
        tl.debug_barrier()
        i += 1


def cut(B: int, L: int, E: int, *, time: int = TIME, lanes: int = LANES, programs: int = PROGRAMS) -> tuple[int, int]:
    """The number of segments of a row, and the number of tiles per segment.

    >>> cut(256, 1024, 256), cut(1, 131072, 256)
    ((1, 32), (128, 32))
    """
    tiles = triton.cdiv(L, time)
    wanted = min(triton.cdiv(programs, B * triton.cdiv(E, lanes)), tiles // LEAST_TILES)
    per_segment = triton.cdiv(tiles, max(1, wanted))
    return triton.cdiv(tiles, per_segment), per_segment


def scan(
    x_BLE: Tensor,
    step_BLE: Tensor,
    A_EN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_E: Tensor,
    state_BNE: Tensor,
    *,
    reverse: bool,
    **shape: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the states before each tile, [B, tiles + 1, N, E]. step, A, D and state are float32."""
    x, step, A, B, C = (t.contiguous() for t in (x_BLE, step_BLE, A_EN, B_BLN, C_BLN))
    how = _Shape(x, A, reverse, shape)
    starts, y = step.new_empty(len(x), how.tiles * how.segments + 1, *state_BNE.shape[1:]), torch.empty_like(x)
    starts[:, 0] = state_BNE
    if how.segments > 1:
        ends, total = how.ends(x, step, A, B, gradient=False)
        for k in range(1, how.segments):
            decay_BNE = torch.exp(total[:, k - 1].unsqueeze(1) * A.T)
            before = starts[:, (k - 1) * how.tiles]
            torch.addcmul(ends[:, k - 1], decay_BNE, before, out=starts[:, k * how.tiles])
    _forward[how.grid](x, step, A, B, C, D_E.contiguous(), starts, y, *how.sizes, **how.constants)
    return y, starts[:, -1].clone(), starts


def scan_grad(
    dy_BLE: Tensor,
    dstate_BNE: Tensor,
    x_BLE: Tensor,
    step_BLE: Tensor,
    A_EN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_E: Tensor,
    starts: Tensor,
    *,
    reverse: bool,
    **shape: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients with respect to x, step, A, B, C, D and the first state."""
    dy, x, step, A, B, C = (t.contiguous() for t in (dy_BLE, x_BLE, step_BLE, A_EN, B_BLN, C_BLN))
    how = _Shape(x, A, reverse, shape)
    after = step.new_empty(len(x), how.segments, *dstate_BNE.shape[1:])
    after[:, -1] = dstate_BNE
    if how.segments > 1:
        ends, total = how.ends(dy, step, A, C, gradient=True)
        for k in reversed(range(1, how.segments)):
            decay_BNE = torch.exp(total[:, k].unsqueeze(1) * A.T)
            torch.addcmul(ends[:, k], decay_BNE, after[:, k], out=after[:, k - 1])
    dx, dstep, dA = torch.empty_like(x), torch.empty_like(step), torch.empty_like(after)
    dB, dC = (step.new_empty(how.grid[1], *B.shape) for _ in range(2))
    dD = step.new_empty(len(x), how.segments, x.shape[2])
    made = (dx, dstep, dA, dB, dC, dD)
    inputs = (dy, x, step, A, B, C, D_E.contiguous(), starts, after)
    _backward[how.grid](*inputs, *made, *how.sizes, **how.constants)
    dA_EN = dA.sum(dim=(0, 1)).T.contiguous()
    return dx, dstep, dA_EN, dB.sum(0).to(B.dtype), dC.sum(0).to(C.dtype), dD.sum(dim=(0, 1)), after[:, 0].contiguous()


class _Shape:
    """The grid of a call's programs."""

    def __init__(self, x: Tensor, A: Tensor, reverse: bool, shape: dict[str, int]) -> None:
        B, L, E = x.shape
        time, lanes = shape.get("time", TIME), shape.get("lanes", LANES)
        self.segments, self.tiles = cut(B, L, E, **shape)
        self.grid = (B * self.segments, triton.cdiv(E, lanes))
        self.sizes = (L, E, self.tiles, self.segments)
        self.constants: dict[str, Any] = {"N": A.shape[1], "REVERSE": reverse, "TIME": time, "LANES": lanes}
        self.constants["num_warps"] = 4

    def ends(self, value: Tensor, step: Tensor, A: Tensor, weight: Tensor, *, gradient: bool) -> tuple[Tensor, Tensor]:
        """The result of each segment from zero, [B, segments, N, E], and its total step, [B, segments, E]."""
        B, E = len(value), value.shape[2]
        ends, total = step.new_empty(B, self.segments, A.shape[1], E), step.new_empty(B, self.segments, E)
        _ends[self.grid](value, step, A, weight, ends, total, *self.sizes, GRADIENT=gradient, **self.constants)
        return ends, total
