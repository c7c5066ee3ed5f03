"""The selective scan and its gradient: each thread takes its own channels through a row, step by step.

A program is one warp: LANES channels of a segment of a row, TIME steps at a time. What these steps read is kept
in registers, and for each of the N states the recurrence runs through them; only the states between tiles go through
memory. So there is nothing for threads to wait for, and a step costs one exponential and four multiplications a state.
If there are too few rows and channels to fill the device, rows are split into segments, whose final states are computed
first (one more pass over the inputs of the state).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unmask.kernels.tiles import add_to, first_line, line_of, read_numbers, read_tile, times, write_tile

TIME, LANES = 8, 64  # size of a tile: longer ones do not fit into registers, wider ones leave too few programs
PROGRAMS = 1024  # fewer do not fill a device
LEAST_TILES = 16  # minimum per segment
CHAIN = 8  # segments that are read at a time where they are joined
LOG2E = tl.constexpr(1.4426950408889634)


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
    own, slot = lanes < E, (row * segments + segment) * N * E + lanes
    passed = tl.zeros([LANES], tl.float32)
    i = 0
    while i < tiles:
        tile = segment * tiles + (tiles - 1 - i if GRADIENT else i)
        first = first_line(tile, L, row, REVERSE, TIME)
        step = read_tile(step_ptr, tile, first, L, E, lanes, REVERSE, TIME)
        value = read_tile(value_ptr, tile, first, L, E, lanes, REVERSE, TIME)
        if not GRADIENT:
            value = times(value, step, TIME)
        for k in tl.static_range(TIME):
            passed += step[k]
        for n in range(N):
            A = tl.load(A_ptr + n * E + lanes, mask=own, other=0.0) * LOG2E
            weight = read_numbers(weight_ptr, n, tile, first, L, N, REVERSE, TIME)
            h = tl.load(end_ptr + slot + n * E, mask=own & (i > 0), other=0.0)
            if GRADIENT:
                for k in tl.static_range(TIME - 1, -1, -1):
                    h = tl.exp2(step[k] * A) * (h + value[k] * weight[k])
            else:
                for k in tl.static_range(TIME):
                    h = tl.exp2(step[k] * A) * h + value[k] * weight[k]
            tl.store(end_ptr + slot + n * E, h, mask=own)
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
    D = tl.load(D_ptr + lanes, mask=own, other=0.0)
    i = 0
    while i < tiles:
        tile = segment * tiles + i
        first = first_line(tile, L, row, REVERSE, TIME)
        step = read_tile(step_ptr, tile, first, L, E, lanes, REVERSE, TIME)
        x = read_tile(x_ptr, tile, first, L, E, lanes, REVERSE, TIME)
        u = times(step, x, TIME)
        y = ()
        for k in tl.static_range(TIME):
            y += (D * x[k],)
        slot = (row * (segments * tiles + 1) + tile) * N * E + lanes
        for n in range(N):
            A = tl.load(A_ptr + n * E + lanes, mask=own, other=0.0) * LOG2E
            B = read_numbers(B_ptr, n, tile, first, L, N, REVERSE, TIME)
            C = read_numbers(C_ptr, n, tile, first, L, N, REVERSE, TIME)
            h = tl.load(start_ptr + slot + n * E, mask=own, other=0.0)
            more = ()
            for k in tl.static_range(TIME):
                h = tl.exp2(step[k] * A) * h + u[k] * B[k]
                more += (y[k] + h * C[k],)
            y = more
            if i + 1 < tiles or segment + 1 == segments:  # the starts of other segments exist already
                tl.store(start_ptr + slot + (N + n) * E, h, mask=own)
        write_tile(y_ptr, y, tile, first, L, E, lanes, REVERSE, TIME)
        tl.debug_barrier()
        i += 1


@triton.jit
def _back(
    read,
    sums,
    weights,
    A,
    h,
    q,
    dB_ptr,
    dC_ptr,
    at,
    tile,
    L,
    N: tl.constexpr,
    REVERSE: tl.constexpr,
    TIME: tl.constexpr,
):
    """Take one state through a tile: forward from h, then backward from q, the gradient by the state after the tile.

    Returns the gradients by the state before the tile and by A, and `sums` (du and dstep) with this state's share.
    """
    step, u, dy = read
    B, C = weights
    before, decay = (), ()
    for k in tl.static_range(TIME):
        before += (h,)
        decay += (tl.exp2(step[k] * (A * LOG2E)),)
        h = decay[k] * h + u[k] * B[k]
    du, dstep, dA = (), (), tl.zeros_like(A)
    for k in tl.static_range(TIME - 1, -1, -1):
        g = q + dy[k] * C[k]  # by the state after the step
        inside = tile * TIME + k < L
        tl.store(dC_ptr + line_of(at, k * N, REVERSE), tl.sum(h * dy[k], 0), mask=inside)
        tl.store(dB_ptr + line_of(at, k * N, REVERSE), tl.sum(g * u[k], 0), mask=inside)
        q, h = decay[k] * g, before[k]
        du = (sums[0][k] + g * B[k],) + du  # noqa: RUF005 (Triton knows no stars)
        dstep = (sums[1][k] + q * h * A,) + dstep  # noqa: RUF005
        dA += q * h * step[k]
    return q, dA, (du, dstep)


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
    D, zero = tl.load(D_ptr + lanes, mask=own, other=0.0), tl.zeros([LANES], tl.float32)
    i = 0
    while i < tiles:
        tile = segment * tiles + tiles - 1 - i
        first = first_line(tile, L, row, REVERSE, TIME)
        step = read_tile(step_ptr, tile, first, L, E, lanes, REVERSE, TIME)
        x = read_tile(x_ptr, tile, first, L, E, lanes, REVERSE, TIME)
        dy = read_tile(dy_ptr, tile, first, L, E, lanes, REVERSE, TIME)
        u, slot = times(step, x, TIME), (row * (segments * tiles + 1) + tile) * N * E + lanes
        sums = ((zero,) * TIME, (zero,) * TIME)  # du and dstep
        for n in range(N):
            A = tl.load(A_ptr + n * E + lanes, mask=own, other=0.0)
            B = read_numbers(B_ptr, n, tile, first, L, N, REVERSE, TIME)
            C = read_numbers(C_ptr, n, tile, first, L, N, REVERSE, TIME)
            h = tl.load(start_ptr + slot + n * E, mask=own, other=0.0)
            q, at = tl.load(after_ptr + place + n * E, mask=own, other=0.0), (part + first) * N + n
            q, dA, sums = _back((step, u, dy), sums, (B, C), A, h, q, dB_ptr, dC_ptr, at, tile, L, N, REVERSE, TIME)
            add_to(dA_ptr + place + n * E, dA, own, i)
            tl.store(after_ptr + place + n * E, q, mask=own)
        dD, dx, dstep = zero, (), ()
        for k in tl.static_range(TIME):
            dD += dy[k] * x[k]
            dx += (sums[0][k] * step[k] + D * dy[k],)
            dstep += (sums[1][k] + sums[0][k] * x[k],)
        add_to(dD_ptr + (row * segments + segment) * E + lanes, dD, own, i)
        write_tile(dx_ptr, dx, tile, first, L, E, lanes, REVERSE, TIME)
        write_tile(dstep_ptr, dstep, tile, first, L, E, lanes, REVERSE, TIME)
        tl.debug_barrier()
        i += 1


@triton.jit
def _chain(
    end_ptr,
    total_ptr,
    A_ptr,
    out_ptr,
    E,
    segments,
    row_stride,
    stride,
    N: tl.constexpr,
    GRADIENT: tl.constexpr,
    LANES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Joins segments: from the state before the first, that before each; with GRADIENT from that after the last.

    AHEAD are read before the first of them is needed, so that a read is not waited for in each step.
    """
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    row, n, own = (tl.program_id(0) // N).to(tl.int64), tl.program_id(0) % N, lanes < E
    A = tl.load(A_ptr + n * E + lanes, mask=own, other=0.0) * LOG2E
    out_ptr += row * row_stride + n * E + lanes
    last = segments - 1
    h = tl.load(out_ptr + (last.to(tl.int64) * stride if GRADIENT else 0), mask=own, other=0.0)
    i = 0
    while i < last:
        end, decay = (), ()
        for j in tl.static_range(AHEAD):
            at, there = row * segments + (last - i - j if GRADIENT else i + j), own & (i + j < last)
            end += (tl.load(end_ptr + (at * N + n) * E + lanes, mask=there, other=0.0),)
            decay += (tl.exp2(tl.load(total_ptr + at * E + lanes, mask=there, other=0.0) * A),)
        for j in tl.static_range(AHEAD):
            h = decay[j] * h + end[j]
            k = last - i - j - 1 if GRADIENT else i + j + 1
            tl.store(out_ptr + k.to(tl.int64) * stride, h, mask=own & (i + j < last))
        i += AHEAD


def cut(
    B: int,
    L: int,
    E: int,
    *,
    time: int = TIME,
    lanes: int = LANES,
    programs: int = PROGRAMS,
    least: int = LEAST_TILES,
) -> tuple[int, int]:
    """The number of segments of a row, and the number of tiles per segment.

    >>> cut(256, 1024, 256), cut(1, 131072, 256)
    ((1, 128), (256, 64))
    """
    tiles = triton.cdiv(L, time)
    wanted = min(triton.cdiv(programs, B * triton.cdiv(E, lanes)), tiles // least)
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
    x, step, A_NE, B, C = _inputs(x_BLE, step_BLE, A_EN, B_BLN, C_BLN)
    how = _Shape(x, A_NE, reverse, shape)
    starts, y = step.new_empty(len(x), how.tiles * how.segments + 1, *state_BNE.shape[1:]), torch.empty_like(x)
    starts[:, 0] = state_BNE
    how.join(starts, how.tiles, x, step, A_NE, B, gradient=False)
    _forward[how.grid](x, step, A_NE, B, C, D_E.contiguous(), starts, y, *how.sizes, **how.constants)
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
    dy = dy_BLE.contiguous()
    x, step, A_NE, B, C = _inputs(x_BLE, step_BLE, A_EN, B_BLN, C_BLN)
    how = _Shape(x, A_NE, reverse, shape)
    after = step.new_empty(len(x), how.segments, *dstate_BNE.shape[1:])
    after[:, -1] = dstate_BNE
    how.join(after, 1, dy, step, A_NE, C, gradient=True)
    dx, dstep, dA = torch.empty_like(x), torch.empty_like(step), torch.empty_like(after)
    dB, dC = (step.new_empty(how.grid[1], *B.shape) for _ in range(2))
    dD = step.new_empty(len(x), how.segments, x.shape[2])
    made = (dx, dstep, dA, dB, dC, dD)
    inputs = (dy, x, step, A_NE, B, C, D_E.contiguous(), starts, after)
    _backward[how.grid](*inputs, *made, *how.sizes, **how.constants)
    dA_EN, dD_E = dA.sum(dim=(0, 1)).T.contiguous(), dD.sum(dim=(0, 1))
    return dx, dstep, dA_EN, dB.sum(0).to(B_BLN.dtype), dC.sum(0).to(C_BLN.dtype), dD_E, after[:, 0].contiguous()


def _inputs(x: Tensor, step: Tensor, A_EN: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
    """As the kernels read them. B and C, read once for each LANES, are small: they are made float32 before."""
    return x.contiguous(), step.contiguous(), A_EN.T.contiguous(), B.float().contiguous(), C.float().contiguous()


class _Shape:
    """The grid of a call's programs."""

    def __init__(self, x: Tensor, A_NE: Tensor, reverse: bool, shape: dict[str, int]) -> None:
        B, L, E = x.shape
        time, lanes = shape.get("time", TIME), shape.get("lanes", LANES)
        self.segments, self.tiles = cut(B, L, E, **shape)
        self.grid = (B * self.segments, triton.cdiv(E, lanes))
        self.sizes = (L, E, self.tiles, self.segments)
        self.one_warp: dict[str, Any] = {"N": len(A_NE), "LANES": lanes, "num_warps": 1}
        self.constants = {**self.one_warp, "REVERSE": reverse, "TIME": time}

    def join(
        self, out: Tensor, apart: int, value: Tensor, step: Tensor, A_NE: Tensor, weight: Tensor, *, gradient: bool
    ) -> None:
        """Write the state before each segment into `out`, in which segments are `apart`, from that before the first;
        or with `gradient` the gradient after each, from that after the last.
        """
        if self.segments == 1:
            return
        (N, E), B = A_NE.shape, len(value)
        ends, total = step.new_empty(B, self.segments, N, E), step.new_empty(B, self.segments, E)
        _ends[self.grid](value, step, A_NE, weight, ends, total, *self.sizes, GRADIENT=gradient, **self.constants)
        strides = (out.stride(0), apart * out.stride(1))
        _chain[B * N, self.grid[1]](
            ends, total, A_NE, out, E, self.segments, *strides, GRADIENT=gradient, AHEAD=CHAIN, **self.one_warp
        )
