"""Score entropy (SEDD, Lou, Meng, Ermon 2023, arXiv 2310.16834): the network learns ratios of marginals, not tokens.

Its raw logits l mean e^{l_v} / V, an x_theta that need not sum to 1; the concrete score follows from it.
Absorbing: s_v = e^{l_v} / (V (e^sigma - 1)); the bound is w Σ_masked [Z - l_x + log V - 1] with Z = Σ_v e^{l_v} / V. So
SEDD(l) = MDLM(softmax l) + E Σ_masked w (Z - 1 - log Z): the price of not normalising, never negative (`price`).
Uniform: s_j = y_j / y_i with y = alpha e^l + (1 - alpha), and the bound of `_uniform.py`.

What differs from the published system: the schedule's ends are exact (there alpha(1) is about e^-20, and the cost of
the ends is left out). With masks the network need not see sigma, since its optimal e^l / V does not depend on it. And
for uniform states the published network gives log s itself, whose bound is infinite with exact ends unless s is exactly
1 at t = 1; defining s through y ensures this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

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
from unmask.objectives._uniform import reverse_weight, score_entropy
from unmask.objectives.chunked_loss import LossSum, Term, at_positions, summed_nats, token_nats
from unmask.objectives.draws import bound_draws
from unmask.objectives.score_queries import ScoreQuery
from unmask.processes.absorbing import Absorbing
from unmask.processes.uniform import Uniform, log_marginal
from unmask.registry import check_fields
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Gives, Query
from unmask.sampling.query import ask_about

if TYPE_CHECKING:
    from unmask.samplers import Sampler
    from unmask.sampling.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class SEDD(Objective):
    """-log p(x) <= E Σ of the score entropy (its equations 9, 10), over masked tokens (absorbing) or all (uniform)."""

    state: Literal["absorbing", "uniform"] = "absorbing"
    noise: Noise = LogLinear()

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, denoiser: Denoiser | Network) -> None:
        if denoiser.causal:
            raise UsageError(
                f"score entropy needs a denoiser that sees both sides: {other_way(denoiser, causal=False)}"
            )

    def process(self, network: Network) -> Absorbing | Uniform:
        noise = getattr(network.objective, "noise", None) or self.noise
        cls = Absorbing if self.state == "absorbing" else Uniform
        return cls(noise, num_ids=network.num_ids, mask_id=network.mask_id)

    # --- training and evaluation ---

    def loss(self, network: Network, batch: Batch) -> LossSum:
        self.check(network)
        batch = batch.drop_labels(network.label_dropout)
        h_ND, term, _ = self._positions(network, batch, self._nats)
        return LossSum(summed_nats(network, h_ND, term), batch.num_tokens)

    def position_nats(self, network: Network, batch: Batch) -> Tensor:
        h_ND, term, where_BL = self._positions(network, batch, self._nats)
        return at_positions(where_BL, token_nats(network, h_ND, term))

    def estimator(self, network: Network | Denoiser) -> str:
        return "time"

    def with_estimator(self, name: str) -> Self:
        """This objective; its bound has a single form, in continuous time."""
        if name != "time":
            raise UsageError(f"unknown estimator {name!r}; score entropy has one: time")
        return self

    def price(self, network: Network, batch: Batch) -> Tensor:
        """[B] the part of an estimate that is due to not normalising: E Σ_masked w (Z - 1 - log Z)."""
        if self.state != "absorbing":
            raise UsageError("the price of not normalising is known of the absorbing state alone")

        def nats(process: Absorbing | Uniform, logits_NI: Tensor, z_N: Tensor, x_N: Tensor, t_N: Tensor) -> Tensor:
            log_Z_N = log_z(logits_NI, process.mask_id)
            return process.noise.weight(t_N).to(log_Z_N) * (torch.expm1(log_Z_N) - log_Z_N)

        h_ND, term, where_BL = self._positions(network, batch, nats)
        return at_positions(where_BL, token_nats(network, h_ND, term)).sum(dim=1)

    def _nats(self, process: Absorbing | Uniform, logits_NI: Tensor, z_N: Tensor, x_N: Tensor, t_N: Tensor) -> Tensor:
        """[N] the score entropy of a position at time t: the equations above."""
        noise = process.noise
        if isinstance(process, Absorbing):
            l_x_N = logits_NI.gather(1, x_N[:, None]).squeeze(1)
            bracket_N = log_z(logits_NI, process.mask_id).exp() - l_x_N + math.log(process.num_tokens) - 1
            return noise.weight(t_N).to(bracket_N) * bracket_N
        level_N = noise.level(t_N)
        log_y_NI = log_marginal(logits_NI - math.log(process.num_tokens), level_N)
        entropy_N = score_entropy(log_y_NI, z_N, x_N, level_N, process.mask_id)
        return reverse_weight(noise, t_N).to(entropy_N) * entropy_N

    def _where(self, process: Absorbing | Uniform, z_BL: Tensor, scored_BL: Tensor) -> Tensor:
        """[B, L] the scored positions: masked tokens, or all of them for uniform states, where noise is not visible."""
        return scored_BL & (z_BL == process.mask_id) if self.state == "absorbing" else scored_BL

    def _positions(self, network: Network, batch: Batch, nats: Callable[..., Tensor]) -> tuple[Tensor, Term, Tensor]:
        """The trunk's vectors at the scored positions of z_t, the loss of each, and the positions."""
        process, device, t_B = self.process(network), network.device_for(batch.x_BL), batch.time_B
        z_BL = process.corrupt(batch.x_BL, t_B, batch.key_B, batch.scored_BL)
        where_BL = self._where(process, z_BL, batch.scored_BL)
        flat_N = where_BL.flatten().nonzero().squeeze(1)
        how: dict[str, Any] = {"valid_BL": batch.valid_BL, "label_B": batch.label_B}
        h_ND = vectors_at(network, z_BL, process.level(t_B), flat_N, **how)
        row_N = flat_N // batch.x_BL.shape[1]
        t_N, x_N, z_N = (put(line, device) for line in (t_B[row_N], *(y.flatten()[flat_N] for y in (batch.x_BL, z_BL))))

        def term(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
            logits_CI = logits_CI.to(torch.promote_types(logits_CI.dtype, torch.float32))
            return nats(process, logits_CI, z_N[lo:hi], x_N[lo:hi], t_N[lo:hi])

        return h_ND, term, where_BL

    def score_queries(self, network: Network, batch: Batch, *, num_samples: int) -> Iterator[ScoreQuery]:
        process = self.process(network)
        for g, group in enumerate(bound_draws(batch.key_B, num_samples)):
            for key_1, t_1 in group:
                z_1L = process.corrupt(batch.x_BL, t_1, key_1, batch.scored_BL)
                where_1L = self._where(process, z_1L, batch.scored_BL)
                canvas = Canvas(batch.x_BL, process.mask_id, key_1, label_B=batch.label_B)
                query = ask_about(canvas, z_1L, where_1L, process.level(t_1))
                if query is not None:  # at an early time nothing may be masked
                    position_N = where_1L[0].nonzero().squeeze(1)
                    nats = partial(self._score, process, z_1L[0, position_N], batch.x_BL[0, position_N], t_1)
                    yield ScoreQuery(query, g, 1 / len(group), position_N, nats)

    def _score(self, process: Absorbing | Uniform, z_N: Tensor, x_N: Tensor, t_1: Tensor, prediction: Tensor) -> Tensor:
        logits_NI = prediction.cpu().double() + math.log(process.num_tokens)
        return self._nats(process, logits_NI, z_N, x_N, t_1.expand(len(z_N)))

    # --- sampling ---

    def predictor(self, network: Network) -> Predictor:
        self.check(network)
        return Score(network, self.process(network))

    def sampler(self) -> Sampler:
        from unmask.samplers.tweedie import Tweedie

        return Tweedie()


def log_z(logits_NI: Tensor, mask_id: int) -> Tensor:
    """[N] log Z, Z = Σ_{v≠m} e^{l_v} / V: 0 if the network is normalised."""
    mask = torch.tensor([mask_id], device=logits_NI.device)
    return torch.logsumexp(logits_NI.index_fill(1, mask, -torch.inf), dim=1) - math.log(logits_NI.shape[1] - 1)


class Score:
    """log(e^{l_v} / V) at each queried position, -inf for the mask: the score, up to factors of the process.

    Absorbing: s_v is e^this times alpha / (1 - alpha). Uniform: s_j = y_j / y_i, y = V alpha e^this + (1 - alpha).
    """

    gives: Gives = "score"
    left_to_right = False

    def __init__(self, network: Network, process: Absorbing | Uniform) -> None:
        self.network, self.process = network, process

    @torch.no_grad()
    def __call__(self, query: Query) -> Tensor:
        h_RKD = self.network.trunk(
            query.z_RL, query.level_R, valid_BL=query.valid_RL, cond=query.label_R, at_BK=query.at_RK
        )
        logits_NI = self.network.head(h_RKD[query.wanted_RK])
        logits_NI = logits_NI.to(torch.promote_types(logits_NI.dtype, torch.float32))
        mask = torch.tensor([self.network.mask_id], device=logits_NI.device)
        return logits_NI.index_fill(1, mask, -torch.inf) - math.log(self.process.num_tokens)
