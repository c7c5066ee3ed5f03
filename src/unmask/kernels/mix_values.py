"""For training: the first block's values mixed into a later block's, with the gradients of both and of the share.

The share's gradient is computed in parts by separate programs and added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 4096  # values per program


@triton.jit(do_not_specialize=["M"])
def _forward(v_ptr, first_ptr, share_ptr, out_ptr, v_line, first_line, M, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    inside = (row < M) & (lane < D)
    v = tl.load(v_ptr + row * v_line + lane, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(first_ptr + row * first_line + lane, mask=inside, other=0.0).to(tl.float32)
    mixed = v + tl.load(share_ptr) * (first - v)
    tl.store(out_ptr + row * D + lane, mixed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _backward(
    dmixed_ptr,
    dnext_ptr,
    v_ptr,
    first_ptr,
    share_ptr,
    dv_ptr,
    dfirst_ptr,
    dshare_ptr,
    v_line,
    first_line,
    M,
    D,
    NEXT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    at, inside, share = row * D + lane, (row < M) & (lane < D), tl.load(share_ptr)
    dmixed = tl.load(dmixed_ptr + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + row * v_line + lane, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(first_ptr + row * first_line + lane, mask=inside, other=0.0).to(tl.float32)
    dfirst = share * dmixed
    if NEXT:
        dfirst += tl.load(dnext_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dv_ptr + at, ((1 - share) * dmixed).to(dv_ptr.dtype.element_ty), mask=inside)
    tl.store(dfirst_ptr + at, dfirst.to(dfirst_ptr.dtype.element_ty), mask=inside)
    tl.store(dshare_ptr + tl.program_id(0), tl.sum(tl.sum(dmixed * (first - v), 1), 0))


def mix_values(v_MD: Tensor, first_MD: Tensor, share_1: Tensor) -> tuple[Tensor, Tensor]:
    """v + share x (first - v), and `first` for the next block that mixes.

    The gradients of all later blocks arrive through the returned `first` and are added on the way. Lines need not be
    contiguous, as in a joint projection.
    """
    both: tuple[Tensor, Tensor] = _MixValues.apply(v_MD, first_MD, share_1)
    return both


class _MixValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, first: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        v, kept = (t if t.stride(1) == 1 else t.contiguous() for t in (v, first))
        out, (grid, shape) = torch.empty_like(v, memory_format=torch.contiguous_format), _shape(v)
        if len(v):
            _forward[grid](v, kept, share, out, v.stride(0), kept.stride(0), *v.shape, **shape)
        ctx.save_for_backward(v, kept, share)
        return out, first.view_as(first)

    @staticmethod
    def backward(ctx: Any, dmixed: Tensor | None, dnext: Tensor | None) -> Any:
        v, first, share = ctx.saved_tensors
        if dmixed is None:
            return None, dnext, None
        dmixed, dnext = dmixed.contiguous(), None if dnext is None else dnext.contiguous()
        dv, dfirst = torch.empty_like(dmixed), torch.empty_like(dmixed)
        grid, shape = _shape(v)
        dshare = torch.zeros(max(1, grid[0]), dtype=torch.float32, device=v.device)
        if len(v):
            given = (dmixed, dmixed if dnext is None else dnext, v, first, share, dv, dfirst, dshare)
            _backward[grid](*given, v.stride(0), first.stride(0), *v.shape, NEXT=dnext is not None, **shape)
        return dv, dfirst, dshare.sum(dim=0, keepdim=True).to(share.dtype)


def _shape(v_MD: Tensor) -> tuple[tuple[int], dict[str, int]]:
    block = triton.next_power_of_2(v_MD.shape[1])
    rows = max(1, NUMBERS // block)
    return (triton.cdiv(len(v_MD), rows),), {"ROWS": rows, "BLOCK": block, "num_warps": 4}
