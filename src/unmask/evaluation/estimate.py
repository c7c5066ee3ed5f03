"""The bound of rows as the mean of an objective's estimates: which keys and times are drawn, and how they add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.data.batch import DRAW_TIME, Batch
from unmask.denoisers.network import Network, evaluating
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.rng import fold, row_keys, uniform

if TYPE_CHECKING:
    from unmask.objectives import Objective


@torch.no_grad()
def estimate_bound(
    objective: Objective,
    network: Network,
    x_BL: Tensor,
    valid_BL: Tensor | None = None,
    *,
    scored_BL: Tensor | None = None,
    seed: int = 0,
    first_row: int = 0,
    num_samples: int = 8,
    estimator: str | None = None,
    label_B: Tensor | None = None,
) -> Bound:
    """`Objective.bound`: `num_samples` estimates of each row, in groups whose times are spread evenly.

    >>> estimate_bound(model.objective, model.denoiser, x_BL).ppl  # doctest: +SKIP
    """
    form = objective.with_estimator(estimator or objective.estimator(network))
    form.check(network)
    if num_samples < 1:
        raise UsageError(f"num_samples must be at least 1, got {num_samples}")
    if scored_BL is None:
        scored_BL = torch.ones_like(x_BL, dtype=torch.bool) if valid_BL is None else valid_BL
    key_B = row_keys(seed, torch.arange(first_row, first_row + len(x_BL), device=x_BL.device))
    groups = []
    for group in draws_of(form, key_B, num_samples):
        group_B = torch.zeros(len(x_BL), dtype=group[0][1].dtype)
        for key_j_B, time_B in group:
            batch = Batch(x_BL, valid_BL, scored_BL, key_j_B, time_B, label_B)
            with evaluating(network):
                group_B += form.row_nats(network, batch).to(group_B) / len(group)
        groups.append(group_B)
    return Bound(draws_BS=torch.stack(groups, dim=1), tokens_B=scored_BL.sum(dim=1).cpu(), kind=form.kind)


def draws_of(objective: Objective, key_B: Tensor, num_samples: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The keys and times of an objective's estimates; a likelihood is read once, since nothing of it is random."""
    if objective.kind == "exact":
        return iter([[(key_B, torch.ones(key_B.shape, dtype=torch.float64, device=key_B.device))]])
    return bound_draws(key_B, num_samples)


def bound_draws(key_B: Tensor, num_samples: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The draws of a bound, in groups: the rows' keys and times of each.

    Times are spread evenly inside a group of a row's draws; groups and rows are independent of each other.

    >>> [len(group) for group in bound_draws(torch.tensor([1]), 16)]
    [4, 4, 4, 4]
    """
    strata = 4 if num_samples % 4 == 0 and num_samples >= 8 else 1  # two groups at least: one has no spread
    for g in range(num_samples // strata):
        u_B = uniform(fold(key_B, g), DRAW_TIME)
        yield [(fold(key_B, g, j + 1), 1 - (u_B + j / strata) % 1) for j in range(strata)]
