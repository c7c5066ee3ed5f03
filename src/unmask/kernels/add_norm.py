"""For training: x + dropout(y) and its LayerNorm in one pass; and back, for the gradients of all of them.

Sums over lines are made by programs of so many lines each and added up in a fixed order: a step is the same every time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-5
TILES = 16  # of the backward pass: tiles that one program sums over


@triton.jit
def _kept(at, seed, least):
    """Is the number at this place kept? By a hash of seed and place (C. Wellons' lowbias32), as in dit/dropout.py."""
    h = at.to(tl.uint32) ^ seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    return (h & 0xFFFFFF) >= least


@triton.jit
def _forward(
    x_ptr,
    y_ptr,
    weight_ptr,
    shift_ptr,
    seed_ptr,
    sum_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    D,
    eps,
    least,
    scale,
    ADD: tl.constexpr,
    DROP: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64)[:, None] * D + lane
    inside = (row[:, None] < M) & (lane < D)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if DROP:
            y = tl.where(_kept(at, tl.load(seed_ptr), least), y * scale, 0.0)
        rounded = (x + y).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, 1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)
    h = centred * rstd[:, None] * tl.load(weight_ptr + lane, mask=lane < D, other=0.0).to(tl.float32)
    if SHIFT:
        h += tl.load(shift_ptr + lane, mask=lane < D, other=0.0).to(tl.float32)
    tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + row, mean, mask=row < M)
    tl.store(rstd_ptr + row, rstd, mask=row < M)


@triton.jit
def _backward(
    dsum_ptr,
    dh_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    dx_ptr,
    dy_ptr,
    dweight_ptr,
    dshift_ptr,
    M,
    D,
    least,
    scale,
    ADD: tl.constexpr,
    DROP: tl.constexpr,
    SHIFT: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + lane, mask=lane < D, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dshift = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(TILES):
        row = (program * TILES + tile) * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * D + lane
        inside = (row[:, None] < M) & (lane < D)
        mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dh = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.where(inside, (x - mean) * rstd, 0.0)
        dweight += dh * normed
        if SHIFT:
            dshift += dh
        dn = dh * weight
        along = tl.sum(dn * normed, 1)[:, None] / D
        dx = rstd * (dn - tl.sum(dn, 1)[:, None] / D - normed * along)
        if ADD:
            dx += tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if DROP:
            dy = tl.where(_kept(at, tl.load(seed_ptr), least), dx * scale, 0.0)
            tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty), mask=inside)
    column = tl.arange(0, BLOCK)
    tl.store(dweight_ptr + program * D + column, tl.sum(dweight, 0), mask=column < D)
    if SHIFT:
        tl.store(dshift_ptr + program * D + column, tl.sum(dshift, 0), mask=column < D)


def add_norm(
    x_MD: Tensor, y_MD: Tensor | None, weight_D: Tensor, shift_D: Tensor | None = None, *, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum x + dropout(y), and its LayerNorm x weight (+ shift), both in x's type. y None: nothing is added.

    The dropout's seed is the generator's next number.
    """
    if y_MD is None:
        return x_MD, _Norm.apply(x_MD, weight_D, shift_D)
    seed = None
    if dropout:
        seed = torch.randint(-(1 << 31), 1 << 31, (1,), device=x_MD.device, dtype=torch.int64).to(torch.int32)
    both: tuple[Tensor, Tensor] = _AddNorm.apply(x_MD, y_MD, weight_D, shift_D, seed, dropout)
    return both


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor, shift: Tensor | None, seed: Tensor | None, p: float
    ) -> tuple[Tensor, Tensor]:
        total, h, mean, rstd = _run_forward(x.contiguous(), y.contiguous(), weight, shift, seed, p)
        ctx.save_for_backward(total, weight, mean, rstd, seed)
        ctx.shifted, ctx.p = shift is not None, p
        return total, h

    @staticmethod
    def backward(ctx: Any, dsum: Tensor, dh: Tensor) -> Any:
        total, weight, mean, rstd, seed = ctx.saved_tensors
        dx, dy, dweight, dshift = _run_backward(
            dsum.contiguous(), dh.contiguous(), total, weight, mean, rstd, seed, ctx.p, ctx.shifted
        )
        return dx, dy, dweight, dshift, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
        x, h, mean, rstd = _run_forward(x.contiguous(), None, weight, shift, None, 0.0)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.shifted = shift is not None
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, _, dweight, dshift = _run_backward(None, dh.contiguous(), x, weight, mean, rstd, None, 0.0, ctx.shifted)
        return dx, dweight, dshift


def _tile(D: int) -> dict[str, int]:
    """Lines in a tile of about 2,048 numbers, a width that the kernels' sums need as a power of two, warps."""
    block = triton.next_power_of_2(D)
    return {"BLOCK": block, "ROWS": max(1, 2048 // block), "num_warps": 4 if block <= 2048 else 8}


def _dropping(p: float) -> tuple[int, float]:
    return int(p * (1 << 24)), 1 / (1 - p)


def _run_forward(
    x: Tensor, y: Tensor | None, weight: Tensor, shift: Tensor | None, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, D = x.shape
    total = x if y is None else torch.empty_like(x)
    h = torch.empty_like(x)
    mean, rstd = (torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2))
    tile = _tile(D)
    if M:
        _forward[(triton.cdiv(M, tile["ROWS"]),)](
            x,
            x if y is None else y,
            weight,
            weight if shift is None else shift,
            mean if seed is None else seed,
            total,
            h,
            mean,
            rstd,
            M,
            D,
            EPS,
            *_dropping(p),
            ADD=y is not None,
            DROP=seed is not None,
            SHIFT=shift is not None,
            **tile,
        )
    return total, h, mean, rstd


def _run_backward(
    dsum: Tensor | None,
    dh: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    p: float,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, y, weight and shift."""
    M, D = x.shape
    dx = torch.empty_like(x)
    dy = dx if seed is None else torch.empty_like(x)
    tile = _tile(D)
    programs = max(1, triton.cdiv(M, TILES * tile["ROWS"]))
    dweight, dshift = (torch.empty(programs, D, dtype=torch.float32, device=x.device) for _ in range(2))
    _backward[(programs,)](
        dh if dsum is None else dsum,
        dh,
        x,
        weight,
        mean,
        rstd,
        mean if seed is None else seed,
        dx,
        dy,
        dweight,
        dshift,
        M,
        D,
        *_dropping(p),
        ADD=dsum is not None,
        DROP=seed is not None,
        SHIFT=shifted,
        TILES=TILES,
        **tile,
    )
    return dx, dy, dweight.sum(dim=0).to(weight.dtype), dshift.sum(dim=0).to(weight.dtype) if shifted else None
