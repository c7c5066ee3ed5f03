"""For training: gelu(linear(h)), with a backward pass that computes the bias's gradient together with gelu's.

Sums over lines are computed in parts by separate programs and added in a fixed order, so a step is deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # columns per program
LINES = 16  # lines that a program sums over


@triton.jit(do_not_specialize=["M"])
def _gelu_backward(dg_ptr, u_ptr, du_ptr, dbias_ptr, M, W, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """The derivative of u/2 (1 + tanh(c (u + a u^3)))."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dbias = tl.zeros([BLOCK], tl.float32)
    for line in range(LINES):
        row = tl.program_id(1) * LINES + line
        at = row.to(tl.int64) * W + column
        inside = (row < M) & (column < W)
        u = tl.load(u_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dg = tl.load(dg_ptr + at, mask=inside, other=0.0).to(tl.float32)
        square = u * u
        inner = 0.7978845608028654 * u * (1 + 0.044715 * square)
        small = tl.exp(-2 * tl.abs(inner))
        tanh = tl.where(inner < 0, small - 1, 1 - small) / (1 + small)
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * square)
        du = dg * (0.5 * (1 + tanh) + 0.5 * u * (1 - tanh * tanh) * slope)
        du = du.to(du_ptr.dtype.element_ty)
        tl.store(du_ptr + at, du, mask=inside)
        dbias += du.to(tl.float32)
    tl.store(dbias_ptr + tl.program_id(1) * W + column, dbias, mask=column < W)


def gelu_backward(dg_MW: Tensor, u_MW: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gelu (tanh) at u, and its sum over lines in float32."""
    M, W = u_MW.shape
    du = torch.empty_like(u_MW)
    programs = max(1, triton.cdiv(M, LINES))
    dbias = torch.empty(programs, W, dtype=torch.float32, device=u_MW.device)
    grid = (triton.cdiv(W, BLOCK), programs)
    _gelu_backward[grid](dg_MW, u_MW, du, dbias, M, W, LINES=LINES, BLOCK=BLOCK, num_warps=4)
    return du, dbias.sum(dim=0)


def linear_gelu(h_MD: Tensor, weight_WD: Tensor, bias_W: Tensor) -> Tensor:
    """gelu(h weight^T + bias), in h's dtype; the weights and their gradients may have a wider dtype."""
    out: Tensor = _LinearGelu.apply(h_MD, weight_WD, bias_W)
    return out


class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            narrow = weight.to(h.dtype)
            u = torch.addmm(bias.to(h.dtype), h, narrow.T)
            ctx.save_for_backward(h, narrow, u)
            ctx.dtypes = weight.dtype, bias.dtype
            return F.gelu(u, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, dg: Tensor) -> Any:
        h, weight, u = ctx.saved_tensors
        with torch.autocast(h.device.type, enabled=False):
            du, dbias = gelu_backward(dg.contiguous(), u)
            return du @ weight, (du.T @ h).to(ctx.dtypes[0]), dbias.to(ctx.dtypes[1])
