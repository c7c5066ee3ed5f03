"""A masked language model (BERT, arXiv 1810.04805) that generates by Gibbs sampling (BERT-Mouth, arXiv 1902.04094).

Training is BERT's 3.1: 15% of the tokens are predicted, of which 80% are masked, 10% replaced and 10% left as they are.
Its bound is MDLM's count form of the same network, an upper bound of -log p of the random order, one token per call.
The pseudo-likelihood Σ_l -log x_theta(x_l | x without l) (estimator "pseudo"; Besag 1975) is not a bound, and is
reported as such.

What differs from the published systems: the draws are new in every epoch, whereas BERT's data was masked beforehand; a
replacement may be any id but the mask; there is no second task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, cast

import torch
from torch import Tensor

from unmask.data.batch import DRAW_CORRUPTION, Batch
from unmask.denoisers import Denoiser
from unmask.denoisers.base import other_way
from unmask.denoisers.network import Network
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put
from unmask.errors import UsageError
from unmask.objectives import Objective
from unmask.objectives.chunked_loss import LossSum, at_positions, cross_entropy, token_nats, weighted_cross_entropy
from unmask.objectives.mdlm import MDLM, uniform_subset
from unmask.objectives.score_queries import ScoreQuery
from unmask.objectives.terms import count_weight
from unmask.processes.absorbing import Absorbing
from unmask.processes.uniform import Uniform
from unmask.registry import check_fields
from unmask.rng import uniform

if TYPE_CHECKING:
    from unmask.samplers import Sampler
    from unmask.sampling.predictor import Predictor

COUNT = MDLM(form="count")  # the bound of any network that sees both sides and no level
AT_ONCE = 1 << 14  # tokens that the network reads in one call for a pseudo-likelihood


@dataclass(frozen=True, kw_only=True)
class MLM(Objective):
    """E Σ over `rate` of the tokens of -log x_theta[x], in a row where most of these are masked; its bound is MDLM's.

    Of the predicted tokens a share `mask` is masked, a share `random` is replaced by a random token, and the rest is
    left unchanged. They are weighted so that the loss is in nats per token of the row.

    >>> MLM().rate, MLM().with_estimator("pseudo").kind
    (0.15, 'pseudo')
    """

    form: ClassVar[str] = "count"

    rate: float = 0.15
    mask: float = 0.8
    random: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.rate <= 1:
            raise UsageError(f"rate is the share of the tokens that are predicted, in (0, 1]; got {self.rate}")
        if min(self.mask, self.random) < 0 or not self.mask + self.random <= 1:
            raise UsageError(
                "mask and random are shares of the predicted tokens, together at most 1; "
                f"got {self.mask} and {self.random}"
            )

    def check(self, denoiser: Denoiser | Network) -> None:
        if denoiser.causal:
            raise UsageError(
                f"a masked language model needs a denoiser that sees both sides: {other_way(denoiser, causal=False)}"
            )
        if denoiser.uses_level:
            raise UsageError("a masked language model has no noise level: use a denoiser without time conditioning")

    def process(self, network: Network) -> Absorbing:
        return COUNT.process(network)

    # --- training ---

    def loss(self, network: Network, batch: Batch) -> LossSum:
        self.check(network)
        batch = batch.drop_labels(network.label_dropout)
        z_BL, predicted_BL = self.corrupted(batch, network.num_ids, network.mask_id)
        flat_N = predicted_BL.flatten().nonzero().squeeze(1)
        h_ND = vectors_at(network, z_BL, None, flat_N, valid_BL=batch.valid_BL, label_B=batch.label_B)
        num_B = predicted_BL.sum(dim=1).clamp(min=1)
        weight_N = count_weight(batch.scored_BL.sum(dim=1).to(batch.time_B.dtype), num_B)[flat_N // z_BL.shape[1]]
        x_N, weight_N = (put(t, h_ND.device) for t in (batch.x_BL.flatten()[flat_N], weight_N))
        return LossSum(weighted_cross_entropy(network, h_ND, x_N, weight_N), batch.num_tokens)

    def corrupted(self, batch: Batch, num_ids: int, mask_id: int) -> tuple[Tensor, Tensor]:
        """[B, L] the network's input, and which tokens it predicts: a share `rate` of each row, at least one."""
        num_B = torch.round(self.rate * batch.scored_BL.sum(dim=1).double()).long().clamp(min=1)
        predicted_BL = uniform_subset(batch, num_B)
        position_L = torch.arange(batch.x_BL.shape[1], device=batch.x_BL.device)
        u_BL = uniform(batch.key_B[:, None], DRAW_CORRUPTION, position_L)
        z_BL = batch.x_BL.masked_fill(predicted_BL & (u_BL < self.mask), mask_id)
        random_BL = predicted_BL & (u_BL >= self.mask) & (u_BL < self.mask + self.random)
        return Uniform(COUNT.noise, num_ids=num_ids, mask_id=mask_id).prior(batch.key_B, random_BL, z_BL), predicted_BL

    # --- evaluation ---

    def position_nats(self, network: Network, batch: Batch) -> Tensor:
        return COUNT.position_nats(network, batch)

    def estimator(self, network: Network | Denoiser) -> str:
        return self.form

    def with_estimator(self, name: str) -> Self:
        """This objective evaluated by its bound ("count") or by the pseudo-likelihood ("pseudo"), which is no bound."""
        if name == self.form:
            return self
        if name != "pseudo":
            raise UsageError(f"unknown estimator {name!r}; known: count, pseudo")
        return cast(Self, PseudoLikelihood(rate=self.rate, mask=self.mask, random=self.random))

    def score_queries(self, network: Network, batch: Batch, *, num_samples: int) -> Iterator[ScoreQuery] | None:
        return COUNT.score_queries(network, batch, num_samples=num_samples)

    # --- sampling ---

    def predictor(self, network: Network) -> Predictor:
        self.check(network)
        return COUNT.predictor(network)

    def sampler(self) -> Sampler:
        from unmask.samplers.gibbs import Gibbs

        return Gibbs()


@dataclass(frozen=True, kw_only=True)
class PseudoLikelihood(MLM):
    """Σ_l -log x_theta(x_l | x without l): each token alone, given all others. Not a bound; one call per token."""

    kind = "pseudo"
    form = "pseudo"

    @property
    def one_reading(self) -> bool:
        return True

    def position_nats(self, network: Network, batch: Batch) -> Tensor:
        flat_N = batch.scored_BL.flatten().nonzero().squeeze(1)
        parts = torch.split(flat_N, max(1, AT_ONCE // batch.x_BL.shape[1]))
        return at_positions(batch.scored_BL, torch.cat([self._left_out(network, batch, flat_K) for flat_K in parts]))

    def _left_out(self, network: Network, batch: Batch, flat_K: Tensor) -> Tensor:
        """[K] the nats of these tokens, each masked in a copy of its row."""
        L = batch.x_BL.shape[1]
        row_K, position_K = flat_K // L, flat_K % L
        z_KL = batch.x_BL[row_K].scatter(1, position_K[:, None], network.mask_id)
        valid_KL, label_K = (None if t is None else t[row_K] for t in (batch.valid_BL, batch.label_B))
        at_K = torch.arange(len(flat_K), device=flat_K.device) * L + position_K
        h_KD = vectors_at(network, z_KL, None, at_K, valid_BL=valid_KL, label_B=label_K)
        x_K = put(batch.x_BL.flatten()[flat_K], h_KD.device)
        return token_nats(network, h_KD, cross_entropy(x_K, network.mask_id))

    def score_queries(self, network: Network, batch: Batch, *, num_samples: int) -> None:
        return None  # scored in one piece by `bound`
