"""The likelihood of a prompt's own tokens, from left to right: the result of `echo` with `logprobs`.

For an autoregressive model this is log p(x_l | x_<l), from one forward pass. A diffusion model defines a distribution
for every order; here it is that of the sampler `left_to_right`: token l given those before it, with all prompt tokens
from l on masked, and what follows the prompt (masks and suffix) unchanged. It takes one network call per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unmask.errors import Public, UsageError
from unmask.samplers.left_to_right import LeftToRight
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import check_pair
from unmask.sampling.predictor import Query
from unmask.sampling.query import ask_about, masked_share
from unmask.server.rows import Work, draws_at_once, row_of
from unmask.server.served_model import Served

Scored = tuple[float, list[tuple[int, float]]]  # a token's log-probability, and the most likely ids with theirs


def prompt_scores(
    served: Served, rows: Sequence[list[int]], heads: Sequence[int], num: int
) -> list[list[Scored | None]]:
    """For the first `heads` tokens of each row: their log-probabilities, and the `num` most likely ids at each.

    The begin token is left out. None: the first token of an autoregressive model, which nothing precedes.

    >>> prompt_scores(served, [[104, 105]], [2], num=1)[0][1][0]  # doctest: +SKIP
    -5.1
    """
    begin = len(served.begin)
    if 0 in (sizes := [head - begin for head in heads]):  # an empty prompt has no scores
        some = [i for i, tokens in enumerate(sizes) if tokens]
        scored = iter(prompt_scores(served, [rows[i] for i in some], [heads[i] for i in some], num) if some else ())
        return [next(scored) if tokens else [] for tokens in sizes]
    longest = max(map(len, rows))
    if longest > served.length:
        raise UsageError(
            "logprobs of a prompt are told within the model's window of {window} tokens, this takes "
            "{longest}: ask for less",
            window=Public(served.length),
            longest=Public(longest),
        )
    calls = 1 if served.engine.predictor.left_to_right else max(heads)
    served.limits.check(rows=len(rows), length=longest, calls=calls)
    if served.engine.predictor.left_to_right:
        read = [Reading(row[:head], num) for row, head in zip(rows, heads, strict=True)]
        served._finish(read)
        return [[*work.scores[begin:]] if begin else [None, *work.scores[1:]] for work in read]
    canvas = served.canvas([*rows], may_end=False).to("cpu")
    check_pair(served.engine.predictor, LeftToRight(), canvas)
    at_once = draws_at_once(longest, served.device)
    revealed = [Revealing(row_of(canvas, i), begin, head, num, at_once) for i, head in enumerate(heads)]
    served._finish(revealed)
    return [[*work.scores] for work in revealed]


def _scored(log_p_NI: Tensor, x_N: Tensor, num: int) -> list[Scored]:
    own_N = log_p_NI.gather(1, x_N[:, None]).squeeze(1)
    best = log_p_NI.topk(min(num, log_p_NI.shape[1]), dim=1)
    beside = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(own, list(zip(*pair, strict=True))) for own, pair in zip(own_N.tolist(), beside, strict=True)]


class Reading(Work):
    """A row that an autoregressive network reads once."""

    def __init__(self, ids: list[int], num: int) -> None:
        self.x_L, self.num = torch.tensor(ids), num
        self.scores: list[Scored] = []
        canvas = Canvas(self.x_L[None], -1, torch.zeros(1, dtype=torch.long))
        query = ask_about(canvas, canvas.tokens, torch.ones_like(canvas.tokens, dtype=torch.bool), torch.zeros(1))
        assert query is not None
        self.questions = [replace(query, writes=False)]

    def take(self, predictions: list[Tensor]) -> None:
        self.scores, self.questions, self.done = _scored(predictions[0].cpu(), self.x_L, self.num), [], True


class Revealing(Work):
    """A row whose tokens from `first` to `last` are scored one by one, as `left_to_right` would write them.

    Because they are known, several are scored at once.
    """

    def __init__(self, canvas: Canvas, first: int, last: int, num: int, at_once: int) -> None:
        self.canvas, self.num, self._at_once = canvas, num, at_once
        self.scores: list[Scored] = []
        self._left = iter(range(first, last))
        self._last = last
        self._ask()

    def _ask(self) -> None:
        self._asked = [*itertools.islice(self._left, self._at_once)]
        self.questions = [*self._queries()]
        self.done = not self.questions

    def _queries(self) -> Iterator[Query]:
        for position in self._asked:
            z_1L = self.canvas.tokens.clone()
            z_1L[:, position : self._last] = self.canvas.mask_id
            wanted_1L = torch.zeros_like(z_1L, dtype=torch.bool)
            wanted_1L[:, position] = True
            query = ask_about(self.canvas, z_1L, wanted_1L, masked_share(self.canvas, z_1L))
            assert query is not None
            yield query

    def take(self, predictions: list[Tensor]) -> None:
        for position, log_p_1I in zip(self._asked, predictions, strict=True):
            self.scores += _scored(log_p_1I, self.canvas.tokens[0, position : position + 1], self.num)
        self._ask()
