"""Queries about any set of positions, built from tensors on the device, for samplers without a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query


def ask_about(canvas: Canvas, tokens_BL: Tensor, wanted_BL: Tensor, level_B: Tensor) -> Query | None:
    """A query about the wanted positions of a later state of the canvas, in the order of wanted_BL.nonzero().

    None if no position is wanted. Rows without wanted positions are left out.

    >>> canvas = Canvas.blank(num=2, length=3, mask_id=9)
    >>> query = ask_about(canvas, canvas.tokens, torch.tensor([[False] * 3, [True, False, True]]), torch.ones(2))
    >>> query.rows_R.tolist(), query.at_RK.tolist()
    ([1], [[0, 2]])
    """
    rows_R = wanted_BL.any(dim=1).nonzero().squeeze(1)
    if not len(rows_R):
        return None
    wanted_RL = wanted_BL[rows_R]
    count_R = wanted_RL.sum(dim=1)
    num = int(count_R.max())
    at_RK = torch.argsort(wanted_RL.int(), dim=1, descending=True, stable=True)[:, :num]
    return Query(
        tokens_BL=tokens_BL,
        level_R=level_B[rows_R].to(torch.float32),
        at_RK=at_RK,
        wanted_RK=torch.arange(num, device=at_RK.device) < count_R[:, None],
        reach=int(wanted_BL.any(dim=0).nonzero().max()) + 1,
        rows_R=None if len(rows_R) == len(tokens_BL) else rows_R,
        valid_BL=canvas.valid_BL,
        label_B=canvas.label_B,
    )


def lines_of(query: Query) -> tuple[Tensor, Tensor]:
    """Rows and positions of a query's lines, in the order of the answer.

    >>> canvas = Canvas.blank(num=2, length=3, mask_id=9)
    >>> query = ask_about(canvas, canvas.tokens, torch.tensor([[False] * 3, [True, False, True]]), torch.ones(2))
    >>> [x.tolist() for x in lines_of(query)]
    [[1, 1], [0, 2]]
    """
    at_RK, wanted_RK = query.at_RK, query.wanted_RK
    rows_R = torch.arange(len(at_RK), device=at_RK.device) if query.rows_R is None else query.rows_R
    return rows_R[:, None].expand_as(at_RK)[wanted_RK], at_RK[wanted_RK]


def masked_share(canvas: Canvas, tokens_BL: Tensor) -> Tensor:
    """[B] the masked share of each row: the noise level for a conditioned network if the sampler has no clock."""
    return (tokens_BL == canvas.mask_id).sum(dim=1) / canvas.length_B.clamp(min=1)


def written_share(canvas: Canvas, tokens_BL: Tensor) -> Tensor:
    """[B] the share of the canvas's open positions that is written."""
    left_B = (tokens_BL == canvas.mask_id).sum(dim=1)
    return 1 - left_B / canvas.open_BL.sum(dim=1).clamp(min=1)
