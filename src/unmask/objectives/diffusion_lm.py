"""Gaussian diffusion of learned embeddings with its own loss (Diffusion-LM, Li et al. 2022, arXiv 2205.14217).

2000 steps, alpha² = 1 - sqrt(t + s). The training loss is L_simple with embeddings and rounding, end to end:
E[‖e_x - x_hat(z_t)‖² / E + ‖alpha_1 e_x‖² / E - log p(x|z_0)], E the embeddings' width. It is not a bound;
evaluation uses the bound of the T-step chain, ½ Σ (SNR_s - SNR_t) ‖e_x - x_hat‖² plus the terms at both ends.

What differs from the published system: the network's head gives x_theta over tokens, and x_hat is its mean embedding,
where the published network gives x_hat itself; its target is e_x, not a z_0; p(x|z_0) ∝ N(z_0; alpha_0 e_v,
sigma_0²) instead of a softmax of z_0·e_v; alpha² ends at 2e-7 by a floor, not by clipping beta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from unmask.data.batch import Batch
from unmask.denoisers.network import Network
from unmask.devices import put
from unmask.objectives._entry import beside, enter, entry_of, in_their_places
from unmask.objectives._gaussian import GaussianObjective
from unmask.objectives.chunked_loss import LossSum, summed_nats
from unmask.processes.gamma import Sqrt
from unmask.processes.gaussian import Gaussian

if TYPE_CHECKING:
    from unmask.samplers import Sampler


@dataclass(frozen=True, kw_only=True)
class DiffusionLM(GaussianObjective):
    """The loss above; the bound in T = `steps`, or in continuous time for none.

    dim: numbers in an embedding. self_conditioning: the share of the training rows for which the network reads its own
    estimate (`_entry.py`), which the published network does not.
    """

    dim: int = 128
    self_conditioning: float = 0.0
    steps: int | None = 2000

    def __post_init__(self) -> None:
        self.check_options(dim=self.dim)

    def build(self, *, num_ids: int, width: int) -> nn.Module:
        embedding = nn.Embedding(num_ids, self.dim)
        entry = entry_of(self.dim, width, bias=True, self_conditioning=self.self_conditioning)
        return nn.ModuleDict({"embedding": embedding} | entry)

    def process(self, network: Network) -> Gaussian:
        self.attach(network)
        weight_IE = cast(nn.Embedding, cast(nn.ModuleDict, network.objective)["embedding"]).weight
        e_IE = weight_IE.to(torch.promote_types(weight_IE.dtype, torch.float32))
        return Gaussian(Sqrt(), e_IE, num_ids=network.num_ids, mask_id=network.mask_id)

    def vectors(
        self,
        network: Network,
        tokens_BL: Tensor,
        row_N: Tensor,
        position_N: Tensor,
        z_NE: Tensor,
        gamma_N: Tensor,
        x_hat_NE: Tensor | None = None,
    ) -> Tensor:
        clean_BLE = self.process(network).points(tokens_BL)
        if self.self_conditioning:
            clean_BLE, z_NE = beside(clean_BLE, z_NE, x_hat_NE)
        return enter(cast(nn.ModuleDict, network.objective), in_their_places(clean_BLE, row_N, position_N, z_NE))

    def loss(self, network: Network, batch: Batch) -> LossSum:
        self.check(network)
        batch = batch.drop_labels(network.label_dropout)
        process, lines = self.process(network), self.lines(network, batch)
        times = self.times(process.gamma, put(batch.time_B, process.like.device))
        flat = times._replace(weight_B=torch.full_like(times.weight_B, 1 / self.dim))
        h_ND, term, used = self.diffusion(network, batch, process, lines, flat)
        nats = summed_nats(network, h_ND, term, tensors=used)
        alpha2_1 = torch.sigmoid(-process.gamma.gamma(torch.ones_like(times.gamma_B[0])))
        last = alpha2_1.to(nats) / self.dim * process.points(lines.x_N).square().sum()
        return LossSum(nats + last + self.rounding_nats(process, lines).sum(), batch.num_tokens)

    def sampler(self) -> Sampler:
        from unmask.samplers.gaussian import Gaussian as Chain

        return Chain(steps=200, clamp=True)
