"""The bound token by token: the same draws as `Objective.bound`, with the mean taken position by position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.data.batch import Batch
from unmask.denoisers.network import Network, evaluating
from unmask.errors import UsageError
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
    """[B, L] the nats of each position, on the CPU; each row adds up to what `Objective.bound` gives for it.

    >>> mean_position_nats(model.objective, model.denoiser, x_BL, None, scored_BL=scored_BL, **how)  # doctest: +SKIP
    """
    form: Any = objective
    if hasattr(objective, "with_estimator"):
        form = objective.with_estimator(estimator or objective.estimator(network))
    key_B = row_keys(seed, torch.arange(first_row, first_row + len(x_BL), device=x_BL.device))
    total_BL = torch.zeros(x_BL.shape, dtype=torch.float64)
    groups = list(_draws(form, network, key_B, num_samples))
    for group in groups:
        for key_j_B, time_B in group:
            batch = Batch(x_BL, valid_BL, scored_BL, key_j_B, time_B, label_B)
            with evaluating(network):
                nats_BL = _position_nats(form, network, batch).to(total_BL)
            total_BL += nats_BL / (len(group) * len(groups))
    return total_BL


def _draws(form: Any, network: Network, key_B: Tensor, num_samples: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    from unmask.objectives.mdlm import bound_draws

    if form.estimator(network) == "exact":
        return iter([[(key_B, torch.ones(key_B.shape, dtype=torch.float64))]])
    return bound_draws(key_B, num_samples)


def _position_nats(form: Any, network: Network, batch: Batch) -> Tensor:
    from unmask.denoisers.ragged import vectors_at
    from unmask.objectives.ar import AR
    from unmask.objectives.chunked_loss import cross_entropy, token_nats
    from unmask.objectives.mdlm import MDLM

    if isinstance(form, AR):
        where_BL, z_BL, level_B, weight_B = batch.scored_BL, batch.x_BL, None, torch.ones_like(batch.time_B)
    elif isinstance(form, MDLM) and form.zero_masking and form.carry_over:
        noised = form.noised(batch, network.mask_id)
        where_BL, z_BL, level_B, weight_B = noised.masked_BL, noised.z_BL, noised.level_B, noised.weight_B
    else:
        raise UsageError(f"{type(form).__name__} does not say which token its bound comes from")
    flat_N = where_BL.flatten().nonzero().squeeze(1)
    h_ND = vectors_at(network, z_BL, level_B, flat_N, valid_BL=batch.valid_BL, label_B=batch.label_B)
    nats_N = token_nats(network, h_ND, cross_entropy(batch.x_BL.flatten()[flat_N], network.mask_id)).double()
    nats_BL = torch.zeros(where_BL.shape, dtype=torch.float64, device=nats_N.device).masked_scatter(where_BL, nats_N)
    return nats_BL * weight_B[:, None]
