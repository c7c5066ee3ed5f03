"""How many tokens are masked and what each counts; and the next token through the same weights.

A way of drawing counts is a law over n = 1..L and a weight for each n. The weight 1 / (n p(n)) keeps the expected loss
the bound whatever the law. The others give another loss, for training alone, with the same total weight in the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from unmask.data.batch import Batch
from unmask.denoisers.network import Network
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put
from unmask.errors import UsageError
from unmask.objectives.ar import AR
from unmask.objectives.chunked_loss import LossSum, weighted_cross_entropy
from unmask.objectives.mdlm import MDLM, Noised
from unmask.processes.absorbing import Absorbing


@dataclass(frozen=True)
class NoisedBatch(Batch):
    """A batch whose noise is drawn already: by another thread, or once for many measurements."""

    noised: Noised | None = None


@dataclass(frozen=True, kw_only=True)
class Counts(MDLM):
    """The count form: n uniform in 1..L, weight L / n. The baseline, and the measure of all ways."""

    form: Literal["time", "count"] = "count"

    def law(self, length: int) -> Tensor:
        """p(n) for n = 1..L."""
        return torch.full((length,), 1 / length, dtype=torch.float64)

    def weight(self, length: int) -> Tensor:
        """What a masked token counts where n are masked; 0 where none ever are."""
        p_L = self.law(length)
        return torch.where(p_L > 0, 1 / (numbers(length) * p_L), 0.0)

    def ahead(self, batch: Batch, process: Absorbing) -> NoisedBatch:
        """The same batch with its noise."""
        held = {field.name: getattr(batch, field.name) for field in fields(Batch)}
        return NoisedBatch(**held, noised=self.noised(batch, process))

    def noised(self, batch: Batch, process: Absorbing) -> Noised:
        if isinstance(batch, NoisedBatch) and batch.noised is not None:
            return batch.noised
        if not bool(batch.scored_BL.all()):
            raise UsageError("these ways count whole rows: use the packing wrap")
        length = batch.x_BL.shape[1]
        # times are spread evenly over a batch, and so are counts that follow their order
        n_B = torch.searchsorted(self.law(length).cumsum(0), batch.time_B).clamp(max=length - 1) + 1
        noised = super().noised(replace(batch, time_B=(n_B - 0.5) / length), process)
        return replace(noised, weight_B=self.weight(length)[n_B - 1])


def numbers(length: int) -> Tensor:
    """n = 1..L"""
    return torch.arange(1, length + 1, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Bell(Counts):
    """n / L from a normal law cut off at the ends: fewer rows that are almost clean or almost blank."""

    centre: float = 0.5
    width: float = 0.25

    def law(self, length: int) -> Tensor:
        share_L = (numbers(length) - 0.5) / length
        p_L = torch.exp(-0.5 * ((share_L - self.centre) / self.width) ** 2)
        return p_L / p_L.sum()


@dataclass(frozen=True, kw_only=True)
class Power(Counts):
    """p(n) proportional to n to a power; -1/2 draws few masks, whose gradient varies most, more often."""

    power: float = -0.5

    def law(self, length: int) -> Tensor:
        p_L = numbers(length) ** self.power
        return p_L / p_L.sum()


@dataclass(frozen=True, kw_only=True)
class Weighted(Counts):
    """The weight L / n to a power: 0 counts every masked token alike, 1 is the bound. least: the share of a row below
    which counts are not drawn. For training alone: the expected loss is not the bound."""

    power: float = 1.0
    least: float = 0.0

    def law(self, length: int) -> Tensor:
        p_L = (numbers(length) >= self.least * length).double()
        return p_L / p_L.sum()

    def weight(self, length: int) -> Tensor:
        n_L = numbers(length)
        r_L = (length / n_L) ** self.power
        return r_L * length / (self.law(length) * n_L * r_L).sum()  # a row's total is L in the mean, as the bound's


@dataclass(frozen=True, kw_only=True)
class Complement(Counts):
    """The second half of a batch has the texts of the first, with the other tokens masked.

    n is uniform in 0..L, and so is L - n: with the weight (L + 1) / n both halves are the bound in expectation.
    """

    def noised(self, batch: Batch, process: Absorbing) -> Noised:
        if isinstance(batch, NoisedBatch) and batch.noised is not None:
            return batch.noised
        half, length = len(batch.x_BL) // 2, batch.x_BL.shape[1]
        if not batch.x_BL[:half].equal(batch.x_BL[half:]):
            raise UsageError("the second half of the batch must be the texts of the first")
        n_B = torch.ceil(batch.time_B[:half] * (length + 1)).long().clamp(min=1) - 1
        first = super().noised(replace(batch.rows(0, half), time_B=(n_B.clamp(min=1) - 0.5) / length), process)
        first_BL = first.masked_BL & (n_B > 0)[:, None]
        masked_BL = torch.cat([first_BL, ~first_BL])
        count_B = masked_BL.sum(dim=1)
        weight_B = (length + 1) / count_B.clamp(min=1).double()
        return Noised(batch.x_BL.masked_fill(masked_BL, process.mask_id), masked_BL, count_B / length, weight_B)


@dataclass(frozen=True, kw_only=True)
class NextToken(AR):
    """-log p(x_l | x_<l) through the weights of a network that sees both sides, which looks back for the moment.

    A token enters at its own position, as under masks; position l then answers for l + 1, the first token for nobody.
    """

    def loss(self, network: Network, batch: Batch) -> LossSum:
        flat_BL = torch.arange(batch.x_BL.numel()).view_as(batch.x_BL)
        with looking_back(network):
            h_ND = vectors_at(network, batch.x_BL, None, flat_BL[:, :-1].flatten())
        x_N = put(batch.x_BL[:, 1:].flatten(), h_ND.device)
        ones_N = torch.ones_like(x_N, dtype=torch.float32)
        return LossSum(weighted_cross_entropy(network, h_ND, x_N, ones_N), batch.num_tokens)


@contextmanager
def looking_back(network: Network) -> Iterator[None]:
    """No position sees a later one inside the block; for networks that do not shift their input then."""
    if not getattr(network, "unshifted", False):
        raise UsageError("this network shifts its input where it is causal: use ways.networks.Unshifted")
    network.causal = True
    try:
        yield
    finally:
        network.causal = False
