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


def defined_for(objective: object, name: str, *values: str) -> bool:
    """Whether a method describes what these other methods of the objective give: it stands in the class that defines
    them, or in one derived from it. A subclass that changes the estimate alone is not described by its parent's.

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
