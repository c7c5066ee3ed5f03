"""Masked diffusion that begins as autoregression: at first some rows are read for the next token, by one network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.data.batch import Batch
from unmask.denoisers.network import Attend, Network
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put
from unmask.errors import UsageError
from unmask.objectives.chunked_loss import LossSum, weighted_cross_entropy
from unmask.objectives.mdlm import MDLM

EIGHTHS = 8  # rows are taken so many at a time: a GPU searches for kernels at each new shape


@dataclass(frozen=True, kw_only=True)
class MDLMWarm(MDLM):
    """MDLM, where `share` of a batch's rows are trained for the next token until `flat` of the run, fewer and fewer
    after that, and none from `until` on.

    Every token of such a row is learned from, with a loss that varies little: the weights that read a text are soon
    there, and what masks need besides is learned from the other rows. power: training counts a masked token with its
    weight to this power; 1 is the bound's, 0 counts all alike, and what lies between varies less. The bound, the
    process and the samplers are MDLM's.
    """

    share: float = 0.5
    flat: float = 0.0
    until: float = 0.7
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1 or not 0 <= self.flat <= self.until <= 1:
            raise UsageError(
                f"share must lie in [0, 1] and 0 <= flat <= until <= 1, got {self.share}, {self.flat} and {self.until}"
            )
        if not 0 <= self.power <= 1:
            raise UsageError(f"power must lie in [0, 1], got {self.power}")
        if self.power < 1 and not self.zero_masking:
            raise UsageError("power needs zero_masking: without it a masked token has no weight of its own")
        if self.power < 1 and self.noise.build() is not None:
            raise UsageError("a schedule with parameters is learned by the bound's own weights: set power = 1")

    def check_whole(self, network: Network) -> None:
        super().check_whole(network)
        if not network.looks_back:
            raise UsageError(
                f"{type(network).__name__} cannot be told to look back alone (Attend.causal): use the objective mdlm"
            )

    def training_weight(self, weight_B: Tensor) -> Tensor:
        return weight_B**self.power

    def share_at(self, done: float) -> float:
        """
        >>> [MDLMWarm(share=0.5, flat=0.25, until=0.75).share_at(done) for done in (0.0, 0.25, 0.5, 0.75)]
        [0.5, 0.5, 0.25, 0.0]
        """
        if done >= self.until:
            return 0.0
        return self.share * min(1.0, (self.until - done) / max(self.until - self.flat, 1e-9))

    def looks_back_B(self, batch: Batch) -> Tensor:
        """Which rows: as many of each eight that follow each other in time, so that the times of the others are spread
        evenly, too."""
        count = round(self.share_at(batch.done) * EIGHTHS)
        if batch.place_B is None or not count:
            return torch.zeros(len(batch.x_BL), dtype=torch.bool, device=batch.x_BL.device)
        return batch.place_B * count // EIGHTHS != (batch.place_B + 1) * count // EIGHTHS

    def loss(self, denoiser: Network, batch: Batch) -> LossSum:
        back_B = self.looks_back_B(batch)
        if not back_B.any():
            return super().loss(denoiser, batch)
        back = batch.where(back_B).drop_labels(denoiser.label_dropout)
        nats = next_token_nats(denoiser, back)
        if not back_B.all():
            nats = nats + super().loss(denoiser, batch.where(~back_B)).nats
        return LossSum(nats, batch.num_tokens)


def next_token_nats(denoiser: Network, batch: Batch) -> Tensor:
    """The sum of -log p(x_l | x_<l) over the scored tokens, of a network that sees both sides and looks back here.

    A token enters at its own position, as beside masks; position l - 1 answers for l, and a row's first token is
    nobody's.
    """
    L = batch.x_BL.shape[1]
    flat_N = batch.scored_BL[:, 1:].flatten().nonzero().squeeze(1)
    before_N = flat_N // (L - 1) * L + flat_N % (L - 1)
    clean_B = torch.zeros_like(batch.time_B) if denoiser.uses_level else None
    attend = Attend(batch.valid_BL, causal=True)
    h_ND = vectors_at(denoiser, batch.x_BL, clean_B, before_N, attend=attend, label_B=batch.label_B)
    x_N = put(batch.x_BL.flatten()[before_N + 1], h_ND.device)
    return weighted_cross_entropy(denoiser, h_ND, x_N, torch.ones_like(x_N, dtype=torch.float32))
