"""The bound token by token: the draws of `Objective.bound`, averaged position by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.data.batch import Batch
from unmask.denoisers.network import Network, evaluating
from unmask.devices import put_like
from unmask.errors import UsageError
from unmask.objectives.draws import draws_of
from unmask.objectives.score_queries import defined_for
from unmask.rng import row_keys

if TYPE_CHECKING:
    from unmask.objectives import Objective


@torch.no_grad()
def mean_position_nats(
    objective: Objective,
    network: Network,
    x_BL: Tensor,
    valid_BL: Tensor | None,
    *,
    scored_BL: Tensor,
    seed: int,
    first_row: int,
    num_samples: int,
    estimator: str | None,
    label_B: Tensor | None = None,
) -> Tensor:
    """[B, L] the nats of each position, on the CPU; each row adds up to its value from `Objective.bound`.

    >>> mean_position_nats(model.objective, model.denoiser, x_BL, None, scored_BL=scored_BL, **how)  # doctest: +SKIP
    """
    if not defined_for(objective, "position_nats", "row_nats"):
        name = type(objective).__name__
        raise UsageError(f"{name} changes row_nats and does not say which token a row's nats come from")
    form = objective.with_estimator(estimator or objective.estimator(network))
    key_B = row_keys(seed, torch.arange(first_row, first_row + len(x_BL), device=x_BL.device))
    total_BL = torch.zeros(x_BL.shape, dtype=torch.float64)
    groups = list(draws_of(form, key_B, num_samples))
    for group in groups:
        for key_j_B, time_B in group:
            batch = Batch(x_BL, valid_BL, scored_BL, key_j_B, time_B, label_B)
            with evaluating(network):
                nats_BL = form.position_nats(network, batch)
                total_BL += put_like(nats_BL, total_BL) / (len(group) * len(groups))
    return total_BL
