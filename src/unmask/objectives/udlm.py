"""Uniform-state diffusion (UDLM, Schiff et al. 2024, arXiv 2412.10193): tokens become random tokens, not masks.

Continuous time: (-alpha'/(V alpha)) Σ_{j≠i} [s_j - r_j log s_j + K(r_j)] at every position, s being x_theta's ratios.
T steps: Σ KL(q(z_s|z_t,x) ‖ q(z_s|z_t,x_theta)), whose last term is the reconstruction. The schedule's ends are exact,
so the prior term is 0; the published code keeps away from both ends of time instead.
In T steps it is D3PM with a uniform transition (arXiv 2107.03006), whose auxiliary loss (its equation 5) may be added
in training: lambda E[-log x_theta(z_t)[x]] at every position, since none shows whether it was replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from unmask.data.batch import Batch
from unmask.denoisers import Denoiser
from unmask.denoisers.base import other_way
from unmask.denoisers.network import Network
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put
from unmask.errors import UsageError
from unmask.noise import Noise
from unmask.noise.log_linear import LogLinear
from unmask.objectives import Objective
from unmask.objectives._uniform import reverse_weight, score_entropy, step_divergence
from unmask.objectives.chunked_loss import LossSum, Term, at_positions, summed_nats, token_nats, with_auxiliary
from unmask.objectives.d3pm import check_auxiliary
from unmask.objectives.draws import bound_draws
from unmask.objectives.score_queries import ScoreQuery
from unmask.objectives.terms import subs_log_probs
from unmask.processes.uniform import Uniform, log_marginal
from unmask.registry import check_fields
from unmask.sampling.canvas import Canvas
from unmask.sampling.query import ask_about

if TYPE_CHECKING:
    from unmask.samplers import Sampler
    from unmask.sampling.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class UDLM(Objective):
    """-log p(x) <= E Σ over all scored tokens of the divergence between true and predicted reverse step.

    steps=None is continuous time. Every position is scored at every time, since none shows whether it was replaced.
    auxiliary: lambda, the weight of the cross-entropy of x_theta against x in training with T steps; not in the bound.
    """

    noise: Noise = LogLinear()
    steps: int | None = None
    auxiliary: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps must be at least 1, or none for continuous time; got {self.steps}")
        check_auxiliary(self.auxiliary)
        if self.auxiliary and self.steps is None:
            raise UsageError("the auxiliary loss is that of T steps: set steps, or leave auxiliary out")

    def check(self, denoiser: Denoiser | Network) -> None:
        if denoiser.causal:
            raise UsageError(
                f"uniform diffusion needs a denoiser that sees both sides: {other_way(denoiser, causal=False)}"
            )

    def process(self, network: Network) -> Uniform:
        learned = getattr(network.objective, "noise", None)
        return Uniform(learned or self.noise, num_ids=network.num_ids, mask_id=network.mask_id)

    # --- training and evaluation ---

    def loss(self, network: Network, batch: Batch) -> LossSum:
        self.check(network)
        batch = batch.drop_labels(network.label_dropout)
        h_ND, term = self._positions(network, batch)
        if self.auxiliary:
            x_N = put(batch.x_BL[batch.scored_BL], h_ND.device)
            term = with_auxiliary(term, x_N, self.auxiliary, network.mask_id)
        return LossSum(summed_nats(network, h_ND, term), batch.num_tokens)

    def position_nats(self, network: Network, batch: Batch) -> Tensor:
        return at_positions(batch.scored_BL, token_nats(network, *self._positions(network, batch)))

    def _positions(self, network: Network, batch: Batch) -> tuple[Tensor, Term]:
        """The trunk's vectors at the scored positions of z_t, and the loss of each."""
        process, device = self.process(network), network.device_for(batch.x_BL)
        t_B = self._times(batch.time_B)
        z_BL = process.corrupt(batch.x_BL, t_B, batch.key_B, batch.scored_BL)
        flat_N = batch.scored_BL.flatten().nonzero().squeeze(1)
        how: dict[str, Any] = {"valid_BL": batch.valid_BL, "label_B": batch.label_B}
        h_ND = vectors_at(network, z_BL, process.level(t_B), flat_N, **how)
        row_N = flat_N // batch.x_BL.shape[1]
        lines = (t_B[row_N], batch.x_BL.flatten()[flat_N], z_BL.flatten()[flat_N])
        t_N, x_N, z_N = (put(line, device) for line in lines)

        def term(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
            log_p_CI = subs_log_probs(logits_CI, network.mask_id)
            return self.nats(process, log_p_CI, z_N[lo:hi], x_N[lo:hi], t_N[lo:hi])

        return h_ND, term

    def _times(self, time_B: Tensor) -> Tensor:
        """The times of a batch, or the ends of the steps that contain them."""
        return time_B if self.steps is None else torch.ceil(time_B * self.steps).clamp(min=1) / self.steps

    def nats(self, process: Uniform, log_p_NI: Tensor, z_N: Tensor, x_N: Tensor, t_N: Tensor) -> Tensor:
        """[N] the loss of a position at time t, given log x_theta at that position: the equations above."""
        noise = process.noise
        if self.steps is None:
            weight_N = reverse_weight(noise, t_N).to(log_p_NI)
            level_N = noise.level(t_N)
            log_y_NI = log_marginal(log_p_NI, level_N)
            return weight_N * score_entropy(log_y_NI, z_N, x_N, level_N, process.mask_id)
        level_t_N, level_s_N = noise.level(t_N), noise.level((t_N - 1 / self.steps).clamp(min=0))
        return self.steps * step_divergence(log_p_NI, z_N, x_N, level_s_N, level_t_N, process.mask_id)

    def estimator(self, network: Network | Denoiser) -> str:
        return "time" if self.steps is None else f"T={self.steps}"

    def with_estimator(self, name: str) -> Self:
        """This objective with its bound in continuous time ("time") or in T steps ("T=1000")."""
        if name == "time":
            return replace(self, steps=None, auxiliary=0.0)
        match = re.fullmatch(r"T=([1-9]\d{0,8})", name)
        if not match:
            raise UsageError(f"unknown estimator {name!r}; known: time, T=<steps>")
        return replace(self, steps=int(match[1]))

    def score_queries(self, network: Network, batch: Batch, *, num_samples: int) -> Iterator[ScoreQuery]:
        process, position_N = self.process(network), batch.scored_BL[0].nonzero().squeeze(1)
        x_N = batch.x_BL[0, position_N]
        for g, group in enumerate(bound_draws(batch.key_B, num_samples)):
            for key_1, time_1 in group:
                t_1 = self._times(time_1)
                z_1L = process.corrupt(batch.x_BL, t_1, key_1, batch.scored_BL)
                canvas = Canvas(batch.x_BL, process.mask_id, key_1, label_B=batch.label_B)
                query = ask_about(canvas, z_1L, batch.scored_BL, process.level(t_1))
                if query is not None:
                    nats = partial(self._score, process, z_1L[0, position_N], x_N, t_1)
                    yield ScoreQuery(query, g, 1 / len(group), position_N, nats)

    def _score(self, process: Uniform, z_N: Tensor, x_N: Tensor, t_1: Tensor, log_p_NI: Tensor) -> Tensor:
        return self.nats(process, log_p_NI.cpu().double(), z_N, x_N, t_1.expand(len(z_N)))

    # --- sampling ---

    def predictor(self, network: Network) -> Predictor:
        from unmask.sampling.predictor import XTheta

        self.check(network)
        return XTheta(network, self.process(network))

    def sampler(self) -> Sampler:
        from unmask.samplers.uniform_posterior import UniformPosterior

        return UniformPosterior()
