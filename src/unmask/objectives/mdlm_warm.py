"""Masked diffusion that starts as autoregression: at first some rows train next-token prediction, in one network."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unmask.data.batch import Batch
from unmask.denoisers.network import Attend, Network
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put
from unmask.errors import UsageError
from unmask.objectives.chunked_loss import LossSum, weighted_nats
from unmask.objectives.mdlm import MDLM

EIGHTHS = 8  # granularity of the number of rows: a GPU searches for kernels at each new shape


@dataclass(frozen=True, kw_only=True)
class MDLMWarm(MDLM):
    """MDLM, where `share` of a batch's rows are trained for the next token until `flat` of the run, fewer and fewer
    after that, and none from `until` on.

    until_epoch: the share also falls evenly from the run's beginning to 0 at the end of this epoch, and the smaller of
    the two shares is taken: next-token prediction soon overfits a text that is read repeatedly.

    Every token of such a row gives a loss of low variance, so the network soon learns to read a text; the other rows
    train the prediction of masks. power: in training the weight of a masked token is raised to this power; 1 is the
    bound's weight, 0 weights all tokens equally, and values in between reduce the variance. The bound, the process and
    the samplers are MDLM's.
    """

    share: float = 0.5
    flat: float = 0.0
    until: float = 0.7
    until_epoch: float | None = None
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1 or not 0 <= self.flat <= self.until <= 1:
            raise UsageError(
                f"share must lie in [0, 1] and 0 <= flat <= until <= 1, got {self.share}, {self.flat} and {self.until}"
            )
        if self.until_epoch is not None and not 0 < self.until_epoch < math.inf:
            raise UsageError(f"until_epoch must be above 0, or none for no limit; got {self.until_epoch}")
        if not 0 <= self.power <= 1:
            raise UsageError(f"power must lie in [0, 1], got {self.power}")
        if not self.carry_over or not self.zero_masking:
            raise UsageError("mdlm_warm has both halves of SUBS: use mdlm where carry_over or zero_masking is off")

    def build(self, *, num_ids: int, width: int) -> nn.Module | None:
        built = super().build(num_ids=num_ids, width=width)
        if built is not None and self.power < 1:
            raise UsageError("a schedule with parameters is learned by the bound's own weights: set power = 1")
        return built

    def check_whole(self, network: Network) -> None:
        super().check_whole(network)
        if not network.looks_back:
            raise UsageError(
                f"{type(network).__name__} cannot be told to look back alone (Attend.causal): use the objective mdlm"
            )

    def training_weight(self, weight_B: Tensor) -> Tensor:
        return weight_B**self.power

    def share_at(self, done: float, epoch: float = 0.0) -> float:
        """The share of rows at this fraction of the run, which has read the data `epoch` times.

        >>> [MDLMWarm(share=0.5, flat=0.25, until=0.75).share_at(done) for done in (0.0, 0.25, 0.5, 0.75)]
        [0.5, 0.5, 0.25, 0.0]
        >>> [MDLMWarm(share=0.5, until_epoch=4).share_at(0.1, epoch) for epoch in (1.0, 3.0, 4.0)]
        [0.375, 0.125, 0.0]
        """
        if done >= self.until:
            return 0.0
        left = min(1.0, (self.until - done) / max(self.until - self.flat, 1e-9))
        if self.until_epoch is not None:
            left = min(left, max(0.0, 1 - epoch / self.until_epoch))
        return self.share * left

    def looks_back_B(self, batch: Batch) -> Tensor:
        """Which rows are trained for the next token.

        By the rank of their times each group of eight gives the same number, so that the times of the remaining rows
        stay evenly spread.
        """
        count = round(self.share_at(batch.done, batch.epoch) * EIGHTHS)
        if batch.place_B is None or not count:
            return torch.zeros(len(batch.x_BL), dtype=torch.bool, device=batch.x_BL.device)
        return batch.place_B * count // EIGHTHS != (batch.place_B + 1) * count // EIGHTHS

    def loss(self, denoiser: Network, batch: Batch) -> LossSum:
        """The loss of both kinds of rows, in one pass; the causal rows come first."""
        back_B = self.looks_back_B(batch)
        if not back_B.any():
            return super().loss(denoiser, batch)
        self.check(denoiser)
        back, rest = (batch.where(rows_B).drop_labels(denoiser.label_dropout) for rows_B in (back_B, ~back_B))
        process = self.process(denoiser)
        noised = self.noised(rest, process)
        L, (scored_N, told_N) = batch.x_BL.shape[1], next_tokens(back, shifted=denoiser.shifted)
        masked_N = noised.masked_BL.flatten().nonzero().squeeze(1)
        weight_N = self.training_weight(noised.weight_B)[masked_N // L]
        x_N = torch.cat([back.x_BL.flatten()[scored_N], rest.x_BL.flatten()[masked_N]])
        weight_N = torch.cat([torch.ones_like(scored_N, dtype=weight_N.dtype), weight_N])
        level_B = torch.cat([torch.zeros_like(back.time_B), noised.level_B.to(back.time_B)])
        h_ND = vectors_at(
            denoiser,
            torch.cat([back.x_BL, noised.z_BL]),
            level_B if denoiser.uses_level else None,
            torch.cat([told_N, masked_N + back.x_BL.numel()]),
            attend=self._attend_both(back, rest),
            label_B=_joined(back.label_B, rest.label_B),
        )
        x_N, weight_N = (put(t, h_ND.device) for t in (x_N, weight_N))
        nats, nats_N = weighted_nats(denoiser, h_ND, x_N, weight_N)
        nats = nats + self.schedule_loss(process, rest, noised, nats_N[len(scored_N) :])
        return LossSum(nats, batch.num_tokens)

    def _attend_both(self, back: Batch, rest: Batch) -> Attend:
        """The attention pattern of the causal rows followed by that of the others."""
        told = self.attend(rest)
        mask = told.mask
        if mask is not None:
            mask = torch.cat([mask.new_ones(len(back.x_BL), *mask.shape[1:]), mask])
        return Attend(_joined(back.valid_BL, rest.valid_BL), mask, causal=told.causal, back=len(back.x_BL))


def next_tokens(batch: Batch, *, shifted: bool = False) -> tuple[Tensor, Tensor]:
    """Flat indices of the tokens predicted from their prefix, and of the vectors that predict them.

    A token is predicted by the vector at the position before it in its row, so a row's first token is not predicted.
    A shifted network already predicts every position from the preceding ones.
    """
    L = batch.x_BL.shape[1]
    flat_N = batch.scored_BL.flatten().nonzero().squeeze(1)
    if shifted:
        return flat_N, flat_N
    flat_N = flat_N[flat_N % L > 0]
    return flat_N, flat_N - 1


def _joined(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else torch.cat([a, b])
