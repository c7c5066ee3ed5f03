"""A row's score as a series of network queries, for callers that batch network calls, such as the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from unmask.sampling.predictor import Query


@dataclass(frozen=True)
class ScoreQuery:
    """One query of a row's score, and how its answer enters the score.

    group: which independent estimate of the row it belongs to; share: its weight in that estimate.
    position_N: the positions of the answer's lines. nats: maps these lines to the nats of each, in float64.
    """

    query: Query
    group: int
    share: float
    position_N: Tensor
    nats: Callable[[Tensor], Tensor]


def token_nats_of(x_N: Tensor, weight: Tensor | float = 1.0) -> Callable[[Tensor], Tensor]:
    """The usual `nats`: weight x -log p[x], from lines of log-probabilities.

    >>> import torch
    >>> token_nats_of(torch.tensor([1]), 2.0)(torch.tensor([[0.5, 0.5]]).log())
    tensor([1.3863], dtype=torch.float64)
    """
    return lambda log_p_NI: -weight * log_p_NI.gather(1, x_N[:, None].to(log_p_NI.device)).squeeze(1).cpu().double()


def defined_for(objective: object, name: str, *values: str) -> bool:
    """Whether the method `name` still matches the methods `values` of the objective.

    It does if it is defined in the class that defines them, or in a subclass of it. If a subclass overrides only the
    estimate, the method inherited from its parent no longer matches.

    >>> class Parent:
    ...     def row_nats(self): ...
    ...     def score_queries(self): ...
    >>> class Child(Parent):
    ...     def row_nats(self): ...
    >>> defined_for(Parent(), "score_queries", "row_nats"), defined_for(Child(), "score_queries", "row_nats")
    (True, False)
    """
    order = [next((i for i, cls in enumerate(type(objective).__mro__) if n in vars(cls)), -1) for n in (name, *values)]
    return all(order[0] <= other for other in order[1:] if other >= 0)
