"""Observing sampling steps: the network's other likely tokens, and the positions that were remasked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.samplers import RunnersUp, Step
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Predictor, Query
from unmask.sampling.query import lines_of

if TYPE_CHECKING:
    from unmask.data.tokenizers import Tokenizer


def without_frame(step: Step, frame: tuple[int, int]) -> Step:
    """The step as it is reported: positions count from the beginning of the text."""
    begin, end = frame
    if not begin and not end:
        return step
    return step.shifted(-begin, step.tokens_BL[:, begin : step.tokens_BL.shape[1] - end])


class Observer:
    """Base class of observers of a run of `unmask.sampling.loop.drive`, called for every network call."""

    def on_step(self, query: Query, prediction: Tensor, step: Step) -> Step:
        """Called after each step; returns the step to report, by default the same."""
        return step

    def on_state(self, state: Any) -> Any:
        """Called with the sampler's state after each step; returns the state to continue from, by default the same."""
        return state


class RunnersUpObserver(Observer):
    """Adds to each step its `num` runners-up and the positions that it remasked."""

    def __init__(self, canvas: Canvas, predictor: Predictor, num: int) -> None:
        self.before_BL, self.mask_id, self.predictor, self.num = canvas.tokens, canvas.mask_id, predictor, num

    def on_step(self, query: Query, prediction: Tensor, step: Step) -> Step:
        step = with_runners_up(step, query, prediction, self.predictor, self.before_BL, self.mask_id, self.num)
        self.before_BL = step.tokens_BL
        return step


def with_runners_up(
    step: Step,
    query: Query,
    prediction: Tensor,
    predictor: Predictor,
    before_BL: Tensor,
    mask_id: int,
    num: int,
) -> Step:
    """The step with its `num` runners-up and the positions that it remasked. before_BL: the canvas before the step.

    The sampler need not know about observers: the query determines which line of the prediction belongs to which opened
    position. If the process has masks, a position that was written before and opens now must have been remasked.
    """
    if step.remasked is None and getattr(predictor.process, "name", "absorbing") == "absorbing":
        open_BL = (step.tokens_BL == mask_id).index_put((step.row_N, step.position_N), torch.tensor(True))
        again_BL = (before_BL != mask_id) & open_BL
        row_M, position_M = again_BL.nonzero(as_tuple=True)
        step = replace(step, remasked=(row_M, position_M))
    if predictor.gives == "score":  # not normalised
        prediction = torch.log_softmax(prediction, dim=-1)
    line_N = _lines(step.row_N, step.position_N - query.lo, query)
    return step if line_N is None else replace(step, others=_runners_up(prediction[line_N], step.token_N, num))


def _lines(row_N: Tensor, at_N: Tensor, query: Query) -> Tensor | None:
    """The line of the prediction for each opened position; None if a written position was not queried."""
    row_W, at_W = lines_of(query)
    line_BL = torch.full_like(query.tokens_BL, -1)
    line_BL[row_W, at_W] = torch.arange(len(row_W), device=line_BL.device)
    inside_N = (at_N >= 0) & (at_N < line_BL.shape[1])
    line_N = line_BL[row_N, at_N.clamp(0, line_BL.shape[1] - 1)]
    return line_N if bool((inside_N & (line_N >= 0)).all()) else None


def _runners_up(log_p_NI: Tensor, token_N: Tensor, num: int) -> RunnersUp:
    p_NI = log_p_NI.float().exp()
    prob_N = p_NI.gather(1, token_N[:, None]).squeeze(1)
    rest_NI = p_NI.scatter(1, token_N[:, None], -1.0)
    prob_NK, token_NK = rest_NI.topk(min(num, p_NI.shape[1] - 1), dim=1)
    return RunnersUp(token_NK, prob_NK, prob_N)


def step_as_dict(step: Step, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """A step as plain data, for JSON. Entry i of each list belongs to the i-th written token.

    >>> import torch
    >>> from unmask.data.tokenizers import load_tokenizer
    >>> one, log_p = torch.tensor([0]), torch.tensor([-0.5])
    >>> step = Step(one, one, torch.tensor([104]), log_p, torch.tensor([[104]]))
    >>> step_as_dict(step, 1, load_tokenizer("bytes"))["text"]
    ['h']
    """
    tokens = step.token_N.tolist()
    line: dict[str, Any] = {
        "step": number,
        "row": step.row_N.tolist(),
        "position": step.position_N.tolist(),
        "token": tokens,
        "text": [tokenizer.token_text(token) for token in tokens],
        "log_prob": [round(x, 6) if math.isfinite(x) else None for x in step.log_prob_N.tolist()],
    }
    if step.others is not None:
        others = step.others
        line["model_prob"] = [round(x, 6) for x in others.prob_N.tolist()]
        line["others"] = [
            [
                {"token": token, "text": tokenizer.token_text(token), "model_prob": round(prob, 6)}
                for token, prob in zip(*pair, strict=True)
            ]
            for pair in zip(others.token_NK.tolist(), others.prob_NK.tolist(), strict=True)
        ]
    row_M, position_M = step.remasked if step.remasked is not None else ((), ())
    line["remasked"] = [[int(row), int(position)] for row, position in zip(row_M, position_M, strict=True)]
    return line
