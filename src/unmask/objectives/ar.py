"""Autoregression: exact next-token likelihood with the same backbone and a causal mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.data.batch import Batch
from unmask.denoisers import Denoiser
from unmask.denoisers.base import other_way
from unmask.denoisers.network import Network
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put
from unmask.errors import UsageError
from unmask.objectives import Objective
from unmask.objectives.chunked_loss import LossSum, at_positions, cross_entropy, token_nats, weighted_cross_entropy
from unmask.objectives.score_queries import ScoreQuery, token_nats_of
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import MAX_ANSWER
from unmask.sampling.query import ask_about

if TYPE_CHECKING:
    from unmask.samplers import Sampler
    from unmask.sampling.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class AR(Objective):
    """-log p(x) = sum over l of -log p(x_l | x_<l): exact, the baseline of every diffusion figure."""

    kind = "exact"

    def process(self, network: Network) -> None:
        return None

    def check(self, denoiser: Denoiser | Network) -> None:
        if not denoiser.causal:
            raise UsageError(f"autoregression needs a causal denoiser: {other_way(denoiser, causal=True)}")

    def loss(self, denoiser: Network, batch: Batch) -> LossSum:
        self.check(denoiser)
        h_ND, x_N = self._positions(denoiser, batch)
        ones_N = torch.ones_like(x_N, dtype=torch.float32)
        return LossSum(weighted_cross_entropy(denoiser, h_ND, x_N, ones_N), batch.num_tokens)

    def _positions(self, denoiser: Network, batch: Batch) -> tuple[Tensor, Tensor]:
        """The trunk's vectors at the scored positions, and the tokens at those positions."""
        flat_N = batch.scored_BL.flatten().nonzero().squeeze(1)
        h_ND = vectors_at(denoiser, batch.x_BL, None, flat_N, valid_BL=batch.valid_BL, label_B=batch.label_B)
        return h_ND, put(batch.x_BL.flatten()[flat_N], h_ND.device)

    def position_nats(self, denoiser: Network, batch: Batch) -> Tensor:
        h_ND, x_N = self._positions(denoiser, batch)
        return at_positions(batch.scored_BL, token_nats(denoiser, h_ND, cross_entropy(x_N, denoiser.mask_id)))

    def score_queries(self, denoiser: Network, batch: Batch, *, num_samples: int) -> Iterator[ScoreQuery]:
        canvas = Canvas(batch.x_BL, -1, batch.key_B, label_B=batch.label_B)
        # One network call answers all positions, or several calls if row and vocabulary are too large for memory.
        scored_N = batch.scored_BL[0].nonzero().squeeze(1)
        for position_N in torch.split(scored_N, max(8, MAX_ANSWER // denoiser.num_ids)):
            wanted_BL = torch.zeros_like(batch.scored_BL).index_fill(1, position_N, True)
            query = ask_about(canvas, batch.x_BL, wanted_BL, torch.zeros(1))
            assert query is not None
            yield ScoreQuery(replace(query, writes=False), 0, 1.0, position_N, token_nats_of(batch.x_BL[0, position_N]))

    def predictor(self, denoiser: Network) -> Predictor:
        from unmask.sampling.predictor import NextToken

        self.check(denoiser)
        return NextToken(denoiser)

    def sampler(self) -> Sampler:
        from unmask.samplers.left_to_right import LeftToRight

        return LeftToRight()
