"""Autoregression: exact next-token likelihood with the same backbone and a causal mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.batch import Batch
from unmask.bound import Bound
from unmask.denoisers import Denoiser
from unmask.denoisers._network import Network, evaluating
from unmask.errors import UsageError
from unmask.objectives import Objective
from unmask.objectives._loss import LossSum, Term, cross_entropy, sum_rows, summed_nats, token_nats

if TYPE_CHECKING:
    from unmask.predictor import Predictor
    from unmask.samplers import Sampler


@dataclass(frozen=True, kw_only=True)
class AR(Objective):
    """-log p(x) = sum over l of -log p(x_l | x_<l): exact, the opponent every diffusion figure is held against."""

    def check(self, denoiser: Denoiser | Network) -> None:
        if not denoiser.causal:
            raise UsageError("autoregression needs a causal denoiser: set denoiser.causal = true")

    def loss(self, denoiser: Network, batch: Batch) -> LossSum:
        self.check(denoiser)
        return LossSum(summed_nats(denoiser, *self._positions(denoiser, batch)), batch.num_tokens)

    def _positions(self, denoiser: Network, batch: Batch) -> tuple[Tensor, Term]:
        h_BLD = denoiser.trunk(batch.x_BL, valid_BL=batch.valid_BL)
        return h_BLD[batch.scored_BL], cross_entropy(batch.x_BL[batch.scored_BL], denoiser.mask_id)

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
    ) -> Bound:
        self.check(denoiser)
        if estimator not in (None, "exact"):
            raise UsageError(f"an autoregressive likelihood is exact: estimator {estimator!r} does not apply")
        if scored_BL is None:
            scored_BL = torch.ones_like(x_BL, dtype=torch.bool) if valid_BL is None else valid_BL
        batch = Batch(x_BL, valid_BL, scored_BL, x_BL[:, 0], x_BL[:, 0])  # nothing here is random
        with evaluating(denoiser):
            nats_B = sum_rows(scored_BL, token_nats(denoiser, *self._positions(denoiser, batch)))
        return Bound(draws_BS=nats_B[:, None].cpu(), tokens_B=scored_BL.sum(dim=1).cpu(), exact=True)

    def predictor(self, denoiser: Network) -> Predictor:
        from unmask.predictor import NextToken

        self.check(denoiser)
        return NextToken(denoiser)

    def sampler(self) -> Sampler:
        from unmask.samplers.left_to_right import LeftToRight

        return LeftToRight()
