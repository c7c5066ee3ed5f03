"""Vectors at chosen positions of a batch, with gradients that are copies.

Both ways are custom operators where a compiler looks on, which takes them as they are; called as operators they would
import it, seconds of every start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library


def take_rows(h_MD: Tensor, flat_N: Tensor) -> Tensor:
    """h_ND at distinct rows. That they are distinct makes the backward pass a copy instead of a sum.

    >>> take_rows(torch.eye(3), torch.tensor([2]))
    tensor([[0., 0., 1.]])
    """
    way: Any = _take_op if torch.compiler.is_compiling() else _Take.apply
    h_ND: Tensor = way(h_MD, flat_N)
    return h_ND


def put_rows(h_ND: Tensor, flat_N: Tensor, rows: int) -> Tensor:
    """Zeros, and h_ND at its distinct rows; take_rows and this are each other's gradient."""
    way: Any = _put_op if torch.compiler.is_compiling() else _Put.apply
    h_MD: Tensor = way(h_ND, flat_N, rows)
    return h_MD


def _take(h_MD: Tensor, flat_N: Tensor) -> Tensor:
    return h_MD.index_select(0, flat_N)


def _put(h_ND: Tensor, flat_N: Tensor, rows: int) -> Tensor:
    return h_ND.new_zeros(rows, h_ND.shape[1]).index_copy_(0, flat_N, h_ND)


def _take_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


def _take_backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
    (flat_N,) = ctx.saved_tensors
    return put_rows(grad_ND, flat_N, ctx.rows), None


def _put_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _put_backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
    (flat_N,) = ctx.saved_tensors
    return take_rows(grad_MD, flat_N), None, None


class _Take(torch.autograd.Function):
    forward, setup_context, backward = staticmethod(_take), staticmethod(_take_setup), staticmethod(_take_backward)


class _Put(torch.autograd.Function):
    forward, setup_context, backward = staticmethod(_put), staticmethod(_put_setup), staticmethod(_put_backward)


_take_op = library.custom_op("unmask::take_rows", _take, mutates_args=())
_put_op = library.custom_op("unmask::put_rows", _put, mutates_args=())
_take_op.register_autograd(_take_backward, setup_context=_take_setup)
_put_op.register_autograd(_put_backward, setup_context=_put_setup)


@_take_op.register_fake
def _(h_MD: Tensor, flat_N: Tensor) -> Tensor:
    return h_MD.new_empty(flat_N.shape[0], h_MD.shape[1])  # len would fix the number in a compiled graph


@_put_op.register_fake
def _(h_ND: Tensor, flat_N: Tensor, rows: int) -> Tensor:
    return h_ND.new_empty(rows, h_ND.shape[1])


def gather_positions(h_BLD: Tensor, at_BK: Tensor) -> Tensor:
    """h_BKD: the vectors at the asked positions."""
    return h_BLD.gather(1, at_BK.unsqueeze(-1).expand(-1, -1, h_BLD.shape[-1]))
