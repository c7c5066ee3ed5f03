"""Autoregression: exact next-token likelihood with the same backbone and a causal mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.data.batch import Batch
from unmask.denoisers import Denoiser
from unmask.denoisers.network import Network, evaluating
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.objectives import Objective
from unmask.objectives.chunked_loss import LossSum, cross_entropy, sum_rows, token_nats, weighted_cross_entropy

if TYPE_CHECKING:
    from unmask.samplers import Sampler
    from unmask.sampling.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class AR(Objective):
    """-log p(x) = sum over l of -log p(x_l | x_<l): exact, the opponent every diffusion figure is held against."""

    def check(self, denoiser: Denoiser | Network) -> None:
        if not denoiser.causal:
            raise UsageError("autoregression needs a causal denoiser: set denoiser.causal = true")

    def loss(self, denoiser: Network, batch: Batch) -> LossSum:
        self.check(denoiser)
        h_ND, x_N = self._positions(denoiser, batch)
        ones_N = torch.ones_like(x_N, dtype=torch.float32)
        return LossSum(weighted_cross_entropy(denoiser, h_ND, x_N, ones_N), batch.num_tokens)

    def _positions(self, denoiser: Network, batch: Batch) -> tuple[Tensor, Tensor]:
        """The trunk's vectors at the scored positions, and the tokens there."""
        flat_N = batch.scored_BL.flatten().nonzero().squeeze(1)
        h_ND = vectors_at(denoiser, batch.x_BL, None, flat_N, valid_BL=batch.valid_BL, label_B=batch.label_B)
        return h_ND, put(batch.x_BL.flatten()[flat_N], h_ND.device)

    def estimator(self, denoiser: Network | Denoiser) -> str:
        return "exact"

    @torch.no_grad()
    def bound(
        self,
        denoiser: Network,
        x_BL: Tensor,
        valid_BL: Tensor | None = None,
        *,
        scored_BL: Tensor | None = None,
        seed: int = 0,
        first_row: int = 0,
        num_samples: int = 1,
        estimator: str | None = None,
        label_B: Tensor | None = None,
    ) -> Bound:
        self.check(denoiser)
        if estimator not in (None, "exact"):
            raise UsageError(f"an autoregressive likelihood is exact: estimator {estimator!r} does not apply")
        if scored_BL is None:
            scored_BL = torch.ones_like(x_BL, dtype=torch.bool) if valid_BL is None else valid_BL
        batch = Batch(x_BL, valid_BL, scored_BL, x_BL[:, 0], x_BL[:, 0], label_B)  # nothing here is random
        with evaluating(denoiser):
            h_ND, x_N = self._positions(denoiser, batch)
            nats_B = sum_rows(scored_BL, token_nats(denoiser, h_ND, cross_entropy(x_N, denoiser.mask_id)))
        return Bound(draws_BS=nats_B[:, None].cpu(), tokens_B=scored_BL.sum(dim=1).cpu(), exact=True)

    def predictor(self, denoiser: Network) -> Predictor:
        from unmask.sampling.predictor import NextToken

        self.check(denoiser)
        return NextToken(denoiser)

    def sampler(self) -> Sampler:
        from unmask.samplers.left_to_right import LeftToRight

        return LeftToRight()
