"""What there is to see in a step: what else the network found likely, and what was masked again."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unmask.samplers import RunnersUp, Step
from unmask.sampling.predictor import Gives, Query


def seen(
    step: Step,
    query: Query,
    prediction: Tensor,
    gives: Gives,
    before_BL: Tensor,
    mask_id: int,
    num: int,
) -> Step:
    """The step with its `num` runners-up and what it masked again. before_BL: the canvas before it.

    A sampler need not know that somebody watches: which line of the prediction belongs to which opened position is read
    off its question. What was written before and opens now has been masked again in between.
    """
    if step.remasked is None:
        open_BL = (step.tokens_BL == mask_id).index_put((step.row_N, step.position_N), torch.tensor(True))
        again_BL = (before_BL != mask_id) & open_BL
        row_M, position_M = again_BL.nonzero(as_tuple=True)
        step = replace(step, remasked=(row_M, position_M))
    if gives == "score":  # ratios, not probabilities
        return step
    line_N = _lines(step.row_N, step.position_N - query.lo, query)
    return step if line_N is None else replace(step, others=_runners_up(prediction[line_N], step.token_N, num))


def _lines(row_N: Tensor, at_N: Tensor, query: Query) -> Tensor | None:
    """For each opened position its line of the prediction; None where the sampler wrote what it did not ask about."""
    rows_R = torch.arange(len(query.at_RK), device=query.at_RK.device) if query.rows_R is None else query.rows_R
    row_W = rows_R[:, None].expand_as(query.at_RK)[query.wanted_RK]
    line_BL = torch.full_like(query.tokens_BL, -1)
    line_BL[row_W, query.at_RK[query.wanted_RK]] = torch.arange(len(row_W), device=line_BL.device)
    inside_N = (at_N >= 0) & (at_N < line_BL.shape[1])
    line_N = line_BL[row_N, at_N.clamp(0, line_BL.shape[1] - 1)]
    return line_N if bool((inside_N & (line_N >= 0)).all()) else None


def _runners_up(log_p_NI: Tensor, token_N: Tensor, num: int) -> RunnersUp:
    p_NI = log_p_NI.float().exp()
    prob_N = p_NI.gather(1, token_N[:, None]).squeeze(1)
    rest_NI = p_NI.scatter(1, token_N[:, None], -1.0)
    prob_NK, token_NK = rest_NI.topk(min(num, p_NI.shape[1] - 1), dim=1)
    return RunnersUp(token_NK, prob_NK, prob_N)
