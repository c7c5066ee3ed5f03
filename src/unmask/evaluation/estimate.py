"""The bound of rows as the mean of an objective's estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.data.batch import Batch
from unmask.denoisers.network import Network, evaluating
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.objectives.draws import Draws, draws_of
from unmask.rng import row_keys

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
    num_samples: int | Draws = 8,
    estimator: str | None = None,
    label_B: Tensor | None = None,
    key_B: Tensor | None = None,
) -> Bound:
    """`Objective.bound`: `num_samples` estimates per row, in groups whose times are spread evenly.

    key_B: the key of each row; by default the keys follow from seed and row number.

    >>> estimate_bound(model.objective, model.denoiser, x_BL).ppl  # doctest: +SKIP
    """
    form = objective.with_estimator(estimator or objective.estimator(network))
    form.check(network)
    if isinstance(num_samples, int) and num_samples < 1:
        raise UsageError(f"num_samples must be at least 1, got {num_samples}")
    if scored_BL is None:
        scored_BL = torch.ones_like(x_BL, dtype=torch.bool) if valid_BL is None else valid_BL
    if key_B is None:
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
