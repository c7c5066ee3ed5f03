"""A row's score as questions for the network: what an objective hands to whoever batches calls, such as a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from unmask.sampling.predictor import Query


@dataclass(frozen=True)
class ScoreQuery:
    """One question of a row's score, and what its answer brings.

    group: which independent estimate of the row it belongs to; share: what it counts in that estimate.
    position_N: the positions of the answer's lines. nats: from these lines to the nats of each, in float64.
    """

    query: Query
    group: int
    share: float
    position_N: Tensor
    nats: Callable[[Tensor], Tensor]


def token_nats_of(x_N: Tensor, weight: Tensor | float = 1.0) -> Callable[[Tensor], Tensor]:
    """The usual answer: weight x -log p[x], from lines of log-probabilities.

    >>> import torch
    >>> token_nats_of(torch.tensor([1]), 2.0)(torch.tensor([[0.5, 0.5]]).log())
    tensor([1.3863], dtype=torch.float64)
    """
    return lambda log_p_NI: -weight * log_p_NI.gather(1, x_N[:, None].to(log_p_NI.device)).squeeze(1).double().cpu()
