"""Gaussian diffusion of learned embeddings, trained on its bound (Plaid, Gulrajani and Hashimoto 2023, 2305.18619).

Continuous time. The embeddings (of length 1), gamma's ends and the network minimise the bound; gamma's curve between
the ends minimises the variance of its estimate, as published (E[loss²]). The network's logits are added to
log N(z_t; alpha_t e_v, sigma_t²), so that it only has to learn what the context contributes (the output prior),
and p(x|z_0) = x_theta(z_0).

Self-conditioning is off by default; published is self_conditioning = 0.25 (`_entry.py`).

What differs from the published system: gamma's curve is piecewise linear, not a monotone
network; each row has both z_t and z_0, instead of each row having one of them; the output prior is used from the first
step; the network is conditioned on gamma's level between its ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.data.batch import Batch
from unmask.denoisers.network import Network
from unmask.devices import put
from unmask.errors import UsageError
from unmask.objectives._entry import beside, enter, entry_of, in_their_places
from unmask.objectives._gaussian import GaussianObjective, Times
from unmask.objectives.chunked_loss import LossSum, at_positions, summed_nats
from unmask.objectives.terms import subs_log_probs
from unmask.processes.gamma import Gamma, LearnedGamma
from unmask.processes.gaussian import Gaussian

if TYPE_CHECKING:
    from unmask.samplers import Sampler

STEER = 1e-3  # scale of the curve's gradient: AdamW is invariant to it, but it must not dominate the clipped norm


@dataclass(frozen=True, kw_only=True)
class Plaid(GaussianObjective):
    """-log p(x) <= prior KL + E[-log x_theta(z_0)[x]] + ½ ∫ -SNR' ‖e_x - x_hat‖² dt; the loss is the bound.

    dim: numbers in an embedding. gamma_0, gamma_1: where gamma's ends begin. self_conditioning: the share of the
    training rows for which the network reads its own estimate, which otherwise costs two passes a call. steps=None is
    continuous time.
    """

    dim: int = 16
    gamma_0: float = -3.0
    gamma_1: float = 6.0
    self_conditioning: float = 0.0
    steps: int | None = None

    def __post_init__(self) -> None:
        self.check_options(dim=self.dim)
        if not -30 <= self.gamma_0 < self.gamma_1 <= 30:
            raise UsageError(f"gamma rises from gamma_0 to gamma_1 in -30..30, got {self.gamma_0} and {self.gamma_1}")

    def build(self, *, num_ids: int, width: int) -> nn.Module:
        modules: dict[str, nn.Module] = {
            "embedding": nn.Embedding(num_ids, self.dim),
            "gamma": LearnedGamma(self.gamma_0, self.gamma_1),
        }
        entry = entry_of(self.dim, width, bias=False, self_conditioning=self.self_conditioning)
        return nn.ModuleDict(modules | entry)

    def process(self, network: Network) -> Gaussian:
        self.attach(network)
        made = cast(nn.ModuleDict, network.objective)
        weight_IE = cast(nn.Embedding, made.embedding).weight
        e_IE = F.normalize(weight_IE.to(torch.promote_types(weight_IE.dtype, torch.float32)), dim=1)
        gamma = cast(LearnedGamma, made.gamma)
        return Gaussian(gamma, e_IE, num_ids=network.num_ids, mask_id=network.mask_id, reads_z0=True)

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
        """The network's input, scaled to variance 1 per coordinate; the embeddings have variance 1/E."""
        process, made = self.process(network), cast(nn.ModuleDict, network.objective)
        std_N1 = (torch.sigmoid(-gamma_N) / self.dim + torch.sigmoid(gamma_N)).sqrt()[:, None]
        clean_BLE = process.points(tokens_BL) * self.dim**0.5
        z_NE = z_NE / std_N1.to(z_NE)
        if self.self_conditioning:
            clean_BLE, z_NE = beside(clean_BLE, z_NE, None if x_hat_NE is None else x_hat_NE * self.dim**0.5)
        return enter(made, in_their_places(clean_BLE, row_N, position_N, z_NE))

    def log_probs(self, process: Gaussian, logits_NI: Tensor, z_NE: Tensor, gamma_N: Tensor) -> Tensor:
        """log x_theta[v] ∝ logits[v] + log N(z_t; alpha_t e_v, sigma_t²)."""
        wide = torch.promote_types(logits_NI.dtype, torch.float32)
        return subs_log_probs(logits_NI.to(wide) + process.log_likelihood(z_NE, gamma_N).to(wide), process.mask_id)

    def bound_times(self, gamma: Gamma, time_B: Tensor) -> Times:
        """The times of training: the learned curve already reduces the variance."""
        return self.times(gamma, time_B)

    # --- training ---

    def loss(self, network: Network, batch: Batch) -> LossSum:
        self.check(network)
        batch = batch.drop_labels(network.label_dropout)
        process, lines = self.process(network), self.lines(network, batch)
        time_B = put(batch.time_B, process.like.device)
        scale_B = torch.ones_like(time_B)  # scales the curve's gradient row by row; set before the backward pass
        steered = self.steps is None and torch.is_grad_enabled()
        times = self._steered(process, time_B, scale_B) if steered else self.times(process.gamma, time_B)
        h_ND, term, used = self.diffusion(network, batch, process, lines, times)
        parts: list[Tensor] = []  # the loss of each position, besides the sum

        def kept(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
            nats_C = term(logits_CI, lo, hi)
            parts.append(nats_C.detach())
            return nats_C

        nats = summed_nats(network, h_ND, kept, tensors=used)
        if steered and parts:
            row_nats_B = at_positions(lines.where_BL, torch.cat(parts)).sum(dim=1)
            scale_B.copy_(2 * STEER * row_nats_B / put(lines.where_BL.sum(dim=1).clamp(min=1), row_nats_B.device))
        h_ND, term, used = self.reconstruction(network, batch, process, lines)
        nats = nats + summed_nats(network, h_ND, term, tensors=used)
        return LossSum(nats + process.prior_nats(lines.x_N).sum().to(nats), batch.num_tokens)

    def _steered(self, process: Gaussian, time_B: Tensor, scale_B: Tensor) -> Times:
        """`times`, with the gradient of each row's squared loss per token, 2 F ∇F, for gamma's curve.

        The gradient of the loss itself with respect to the curve is zero in expectation. gamma's ends get the gradient
        of the loss.
        """
        gamma = cast(LearnedGamma, process.gamma)
        level_B, slope_B = gamma.curve(time_B)
        for part in (level_B, slope_B):
            if part.requires_grad:
                part.register_hook(lambda grad_B: grad_B * scale_B)  # type: ignore[no-untyped-call]
        first, width = gamma.ends(time_B)
        gamma_B = first + width * level_B
        return Times(gamma_B, width * slope_B * torch.exp(-gamma_B) / 2, level_B.detach())

    # --- sampling ---

    def sampler(self) -> Sampler:
        from unmask.samplers.gaussian import Gaussian as Chain

        return Chain()
