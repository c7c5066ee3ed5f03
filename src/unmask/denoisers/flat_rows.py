"""Vectors at chosen positions of a batch, with gradients that are copies."""

from __future__ import annotations

from typing import Any

from torch import Tensor, library


@library.custom_op("unmask::take_rows", mutates_args=())
def take_rows(h_MD: Tensor, flat_N: Tensor) -> Tensor:
    """h_ND at distinct rows. That they are distinct makes the backward pass a copy instead of a sum.

    >>> import torch
    >>> take_rows(torch.eye(3), torch.tensor([2]))
    tensor([[0., 0., 1.]])
    """
    return h_MD.index_select(0, flat_N)


@take_rows.register_fake
def _(h_MD: Tensor, flat_N: Tensor) -> Tensor:
    return h_MD.new_empty(flat_N.shape[0], h_MD.shape[1])  # len would fix the number in a compiled graph


@library.custom_op("unmask::put_rows", mutates_args=())
def put_rows(h_ND: Tensor, flat_N: Tensor, rows: int) -> Tensor:
    """Zeros, and h_ND at its distinct rows; take_rows and this are each other's gradient."""
    return h_ND.new_zeros(rows, h_ND.shape[1]).index_copy_(0, flat_N, h_ND)


@put_rows.register_fake
def _(h_ND: Tensor, flat_N: Tensor, rows: int) -> Tensor:
    return h_ND.new_empty(rows, h_ND.shape[1])


def _take_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


def _take_backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
    return put_rows(grad_ND, *ctx.saved_tensors, ctx.rows), None


take_rows.register_autograd(_take_backward, setup_context=_take_setup)


def _put_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _put_backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
    return take_rows(grad_MD, *ctx.saved_tensors), None, None


put_rows.register_autograd(_put_backward, setup_context=_put_setup)


def gather_positions(h_BLD: Tensor, at_BK: Tensor) -> Tensor:
    """h_BKD: the vectors at the asked positions."""
    return h_BLD.gather(1, at_BK.unsqueeze(-1).expand(-1, -1, h_BLD.shape[-1]))
