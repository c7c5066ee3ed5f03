"""How the states of Gaussian diffusion enter a network, beside its own estimate of the text under self-conditioning.

Self-conditioning (Chen, Zhang, Hinton 2022, arXiv 2208.04202): a first pass gives x_hat = Σ_v x_theta[v] e_v, and a
second reads it beside z_t. Both passes together are one function of z_t, so what they give is a bound like any other,
and the law of its chain. In training a share of the rows is read twice, and all others once, with 0 for the estimate;
no gradient flows through the first pass.
What differs from the published samplers: these take the estimate of the step before, which saves a pass and is the
chain of no bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.data.batch import DRAW_PASSES, Batch
from unmask.errors import UsageError
from unmask.rng import uniform


def check_share(self_conditioning: float) -> None:
    """Refuse a number that is no share.

    >>> check_share(2.0)
    Traceback (most recent call last):
    unmask.errors.UsageError: self_conditioning is the share of training rows that are read twice, in 0..1; got 2.0
    """
    if not 0 <= self_conditioning <= 1:
        raise UsageError(
            f"self_conditioning is the share of training rows that are read twice, in 0..1; got {self_conditioning}"
        )


def entry_of(dim: int, width: int, *, bias: bool, self_conditioning: float) -> dict[str, nn.Module]:
    """A learned map of states, and of estimates beside them, to the network's width; none if that is unknown (0)."""
    if not width:
        return {}
    return {"entry": nn.Linear(dim * 2 if self_conditioning else dim, width, bias=bias)}


def enter(made: nn.ModuleDict, z_BLE: Tensor) -> Tensor:
    """The network's input for the states: a learned map, or the states themselves if its width is unknown."""
    if "entry" not in made:
        return z_BLE
    entry = cast(nn.Linear, made["entry"])
    return cast(Tensor, entry(z_BLE.to(entry.weight.dtype)))


def beside(clean_BLE: Tensor, z_NE: Tensor, x_hat_NE: Tensor | None) -> tuple[Tensor, Tensor]:
    """Clean vectors and states with room for an estimate of the states: 0 where there is none.

    >>> [x.tolist() for x in beside(torch.ones(1, 1, 1), torch.full((1, 1), 2.0), torch.full((1, 1), 3.0))]
    [[[[1.0, 0.0]]], [[2.0, 3.0]]]
    """
    estimate_NE = torch.zeros_like(z_NE) if x_hat_NE is None else x_hat_NE.to(z_NE)
    return F.pad(clean_BLE, (0, z_NE.shape[1])), torch.cat([z_NE, estimate_NE], dim=1)


def in_their_places(clean_BLE: Tensor, row_N: Tensor, position_N: Tensor, z_NE: Tensor) -> Tensor:
    """[B, L, E] the states at their positions, the clean vectors everywhere else.

    >>> one = torch.tensor([0])
    >>> in_their_places(torch.zeros(1, 2, 1), one, one + 1, torch.ones(1, 1)).flatten().tolist()
    [0.0, 1.0]
    """
    return clean_BLE.index_put((row_N, position_N), z_NE.to(clean_BLE))


def read_twice(batch: Batch, self_conditioning: float) -> Tensor:
    """[B] the rows that the network reads twice: a share of them in training, all otherwise."""
    if not torch.is_grad_enabled():
        return torch.ones_like(batch.key_B, dtype=torch.bool)
    return uniform(batch.key_B, DRAW_PASSES) < self_conditioning


@contextmanager
def without_gradient(device: torch.device) -> Iterator[None]:
    """A pass whose result is a constant, inside of a loss.

    Weights that autocast converts here are not kept: older versions of torch would use them in the next pass, too,
    which would then give the weights no gradient.
    """
    kind = device.type
    how = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
    with torch.no_grad(), torch.autocast(kind, **how, cache_enabled=False):  # type: ignore[arg-type]
        yield
