"""For training: x + gate x dropout(y + bias) and its LayerNorm in one pass, and their backward pass.

Sums over lines are computed in parts by separate programs and added in a fixed order, so a step is deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-5
LINES = 32  # lines that one program sums over in the backward pass


@triton.jit
def _kept(at, seed, least):
    """Whether dropout keeps the number at this index: a hash of seed and index (C. Wellons' lowbias32), as in
    dit/dropout.py."""
    h = at.to(tl.uint32) ^ seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    return (h & 0xFFFFFF) >= least


@triton.jit(do_not_specialize=["M", "per"])
def _forward(
    x_ptr,
    y_ptr,
    bias_ptr,
    gate_ptr,
    weight_ptr,
    shift_ptr,
    seed_ptr,
    sum_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    D,
    per,
    eps,
    least,
    scale,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    DROP: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64)[:, None] * D + lane
    inside = (row[:, None] < M) & (lane < D)
    own = (row // per)[:, None] * D + lane  # of its condition
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + lane, mask=lane < D, other=0.0).to(tl.float32)
        if DROP:
            y = tl.where(_kept(at, tl.load(seed_ptr), least), y * scale, 0.0)
        if GATE:
            y *= tl.load(gate_ptr + own, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + y).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, 1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)
    h = centred * rstd[:, None] * tl.load(weight_ptr + own, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        h += tl.load(shift_ptr + own, mask=inside, other=0.0).to(tl.float32)
    tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + row, mean, mask=row < M)
    tl.store(rstd_ptr + row, rstd, mask=row < M)


@triton.jit
def _norm_gradient(dh, normed, weight, rstd, D):
    dn = dh * weight
    return rstd * (dn - tl.sum(dn, 0) / D - normed * (tl.sum(dn * normed, 0) / D))


@triton.jit
def _store_sums(
    sums_ptr, lane, D, dweight, dshift, dbranch, dbranch_y, SHIFT: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr
):
    at, every, inside = sums_ptr + tl.program_id(0) * D + lane, tl.num_programs(0) * D, lane < D
    tl.store(at, dweight, mask=inside)
    if SHIFT:
        tl.store(at + every, dshift, mask=inside)
    if BIAS:
        tl.store(at + 2 * every, dbranch, mask=inside)
    if GATE:
        tl.store(at + 3 * every, dbranch_y, mask=inside)


@triton.jit(do_not_specialize=["per"])
def _backward(
    dsum_ptr,
    dh_ptr,
    x_ptr,
    y_ptr,
    gate_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    dx_ptr,
    dy_ptr,
    sums_ptr,
    D,
    per,
    least,
    scale,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    DROP: tl.constexpr,
    SHIFT: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    condition = program // tl.cdiv(per, LINES)  # whose lines it sums over
    first, end = condition * per + program % tl.cdiv(per, LINES) * LINES, (condition + 1) * per
    weight = tl.load(weight_ptr + condition * D + lane, mask=lane < D, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dshift, dbranch, dbranch_y = dweight, dweight, dweight  # the latter of what is gated, and the same times y
    if GATE:
        gate = tl.load(gate_ptr + condition * D + lane, mask=lane < D, other=0.0).to(tl.float32)
    for line in range(LINES):
        row = first + line
        at = row.to(tl.int64) * D + lane
        inside = (row < end) & (lane < D)
        mean = tl.load(mean_ptr + row, mask=row < end, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < end, other=0.0)
        dh = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.where(inside, (tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) - mean) * rstd, 0.0)
        dweight += dh * normed
        if SHIFT:
            dshift += dh
        dx = _norm_gradient(dh, normed, weight, rstd, D)
        if ADD:
            dx += tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dy = tl.where(inside, dx, 0.0)
        if DROP:
            dy = tl.where(_kept(at, tl.load(seed_ptr), least), dy * scale, 0.0)
        if BIAS:
            dbranch += dy
        if GATE:
            dbranch_y += dy * tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
            dy *= gate
        if DROP or GATE:
            tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty), mask=inside)
    _store_sums(sums_ptr, lane, D, dweight, dshift, dbranch, dbranch_y, SHIFT, BIAS, GATE)


def add_norm(
    x_MD: Tensor,
    y_MD: Tensor | None,
    weight_D: Tensor,
    *,
    bias_D: Tensor | None = None,
    gate_D: Tensor | None = None,
    shift_D: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The sum x + gate x dropout(y + bias), and its LayerNorm x weight + shift, both in x's dtype.

    If y is None, nothing is added. weight, shift and gate may be [C, D]: the lines belong to C conditions in turn, the
    same number to each. The dropout's seed is the generator's next number.
    """
    apply: Any = _AddNorm.apply
    if y_MD is None:
        h_MD: Tensor = apply(x_MD, None, None, None, weight_D, shift_D, None, 0.0)
        return x_MD, h_MD
    seed = None
    if dropout:
        seed = torch.randint(-(1 << 31), 1 << 31, (1,), device=x_MD.device, dtype=torch.int64).to(torch.int32)
    both: tuple[Tensor, Tensor] = apply(x_MD, y_MD, bias_D, gate_D, weight_D, shift_D, seed, dropout)
    return both


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        weight: Tensor,
        shift: Tensor | None,
        seed: Tensor | None,
        p: float,
    ) -> Any:
        """The sum and its norm; only the norm if nothing is added."""
        M, D = x.shape
        x, y = x.contiguous(), None if y is None else y.contiguous()
        total = x if y is None else torch.empty_like(x)
        h = torch.empty_like(x)
        mean, rstd = (torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2))
        kinds = {"ADD": y, "BIAS": bias, "GATE": gate, "DROP": seed, "SHIFT": shift}
        given = {name: tensor is not None for name, tensor in kinds.items()}
        weight = weight.contiguous()
        shift, gate = (None if t is None else t.contiguous() for t in (shift, gate))
        block = triton.next_power_of_2(D)
        rows = max(1, 2048 // block)
        per = M // max(1, weight.numel() // D)  # without lines, weights for each of them are none, too
        if M:
            _forward[(triton.cdiv(M, rows),)](
                *(x, _or(y, x), _or(bias, weight), _or(gate, weight), weight, _or(shift, weight), _or(seed, mean)),
                *(total, h, mean, rstd, M, D, max(1, per), EPS, *_dropping(p)),
                **given,
                ROWS=rows,
                BLOCK=block,
                num_warps=4 if block <= 2048 else 8,
            )
        ctx.save_for_backward(total, y if gate is not None else None, bias, gate, weight, mean, rstd, seed)
        ctx.given, ctx.p, ctx.per = given, p, per
        return h if y is None else (total, h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y, bias, gate, weight, mean, rstd, seed = ctx.saved_tensors
        D = x.shape[1]
        dh = grads[-1].contiguous()
        dsum = grads[0].contiguous() if ctx.given["ADD"] else dh
        dx = torch.empty_like(x)
        dy = dx if seed is None and gate is None else torch.empty_like(x)
        conditions, programs = weight.numel() // D, triton.cdiv(max(1, ctx.per), LINES)
        new = torch.empty if len(x) else torch.zeros  # a program reads a line, so without lines none may run
        sums = new(4, conditions, programs, D, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(D)
        if len(x):
            _backward[(conditions * programs,)](
                *(dsum, dh, x, _or(y, x), _or(gate, weight), weight, mean, rstd, _or(seed, mean)),
                *(dx, dy, sums, D, max(1, ctx.per), *_dropping(ctx.p)),
                **ctx.given,
                LINES=LINES,
                BLOCK=block,
                num_warps=min(8, max(1, block // 512)),
            )
        asked = (True, ctx.given["SHIFT"], ctx.given["BIAS"], ctx.given["GATE"])
        made = [sums[i].sum(dim=1).view(weight.shape) if asked[i] else None for i in range(4)]
        dweight, dshift, dbias, dgate = made
        if dgate is not None and dbias is not None:  # of gate x (y + bias)
            dbias, dgate = gate * dbias, dgate + bias * dbias
        if dbias is not None and dbias.ndim > 1:
            dbias = dbias.sum(dim=0)
        return dx, dy if ctx.given["ADD"] else None, dbias, dgate, dweight, dshift, None, None


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _dropping(p: float) -> tuple[int, float]:
    return int(p * (1 << 24)), 1 / (1 - p)
