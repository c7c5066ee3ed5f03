"""Masking with a rate per token: DiffusionBERT's spindle from unigram counts, or GenMD4's learned powers.

Spindle: He et al. 2022, arXiv 2211.15029. Power: Shi et al. 2024, arXiv 2406.04329, section 6.
With w_v = -alpha'_v / (1 - alpha_v) and rho_v = (alpha_v(s) - alpha_v(t)) / (1 - alpha_v(t)), the loss at a mask is
in continuous time  -w_x log x_theta[x] - w_x + Σ_v x_theta[v] w_v,
in T steps          -rho_x log x_theta[x] + (1 - rho_x) log[(1 - rho_x) / Σ_v x_theta[v] (1 - rho_v)].
With equal rates both are MDLM's; the rest is the cost of the reverse process not knowing which token's rate applies.

If the forward process masks at a rate q that the reverse process, whose rates are p, does not know, the loss is
in continuous time  w^q log[w^q / (w^p_x x_theta[x])] - w^q + Σ_v x_theta[v] w^p_v,
in T steps          r^q log[r^q / (r^p_x x_theta[x])] + (1 - r^q) log[(1 - r^q) / Σ_v x_theta[v] (1 - r^p_v)], r = rho:
the KL of the two steps, which bounds -log p of the same reverse process; if q = p, it gives the equations above.

What differs from the published systems. DiffusionBERT compares a token with the mean of its own sentence, which the
reverse process cannot know. centre = "corpus" uses the mean over the training tokens, for both processes; centre =
"sentence" uses the mean of the row for the forward process only, with the bound for two rates. In the published code
the reverse step takes each position's rate from the text itself, also in evaluation, which gives no bound.
h_v = 1 - H / H(v) is the paper's; the code has (H(v) - H) / log(1 + the largest count), a narrower spindle.
strength = 0.3 is the code's `word_freq_lambda`. The code clips alpha to [0, 0.999], so alpha need not decrease and
tokens are masked at any t > 0; here h is clipped, so that alpha decreases, and the ends are exact, as with powers.
The training loss is the bound; the code adds 0.01 times -log x_theta[x]. DiffusionBERT's network starts from BERT's
weights and does not see the time, although its optimal prediction depends on it; that is left to the denoiser here.
GenMD4 trains in continuous time; its two draws of the masks are those of here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from unmask.data.batch import DRAW_TWIN, Batch
from unmask.data.rows import Ints
from unmask.denoisers import Denoiser
from unmask.denoisers.base import other_way
from unmask.denoisers.network import Network
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put
from unmask.errors import UsageError
from unmask.objectives import Objective
from unmask.objectives.chunked_loss import LossSum, Term, at_positions, kept_nats, summed_nats, token_nats
from unmask.objectives.draws import bound_draws
from unmask.objectives.score_queries import ScoreQuery
from unmask.objectives.terms import subs_log_probs
from unmask.processes.token_rates import Power, Rates, Spindle
from unmask.processes.token_rates import TokenRates as Process
from unmask.registry import check_fields
from unmask.rng import fold
from unmask.sampling.canvas import Canvas
from unmask.sampling.query import ask_about

if TYPE_CHECKING:
    from unmask.samplers import Sampler
    from unmask.sampling.predictor import Predictor


@dataclass(frozen=True, kw_only=True)
class TokenRates(Objective):
    """-log p(x) <= E Σ over masked tokens of the equations above.

    rates: spindle or power. strength: the spindle's lambda. centre: the mean with which the spindle compares a token,
    over all training tokens or over its sentence (the row). k: the initial value of all powers; 1 is MDLM with
    log-linear noise. Learning them takes two draws of each row's masks, and so two passes per row. In continuous time
    the estimate has a high variance for powers below 1 (weights k/t, masks with t^k); steps bound it. steps=None:
    continuous.
    """

    rates: Literal["spindle", "power"] = "spindle"
    strength: float = 0.3
    centre: Literal["corpus", "sentence"] = "corpus"
    k: float = 1.0
    steps: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps must be at least 1, or none for continuous time; got {self.steps}")
        if not (math.isfinite(self.strength) and self.strength > 0):
            raise UsageError(f"strength must be above 0, got {self.strength}; for equal rates use mdlm")
        if self.centre == "sentence" and self.rates != "spindle":
            raise UsageError(f"centre is the spindle's: leave it out with rates = {self.rates}")
        if not 0.05 <= self.k <= 20:
            raise UsageError(f"k must lie in 0.05..20, got {self.k}")

    def check(self, denoiser: Denoiser | Network) -> None:
        if denoiser.causal:
            raise UsageError(
                f"masked diffusion needs a denoiser that sees both sides: {other_way(denoiser, causal=False)}"
            )

    def build(self, *, num_ids: int, width: int) -> nn.Module:
        rates = Spindle(num_ids, self.strength) if self.rates == "spindle" else Power(num_ids, self.k)
        return nn.ModuleDict({"rates": rates})

    def prepare(self, network: Network, token_counts: Callable[[], Ints]) -> None:
        rates = self.process(network).rates
        if isinstance(rates, Spindle):
            rates.count(token_counts(), network.mask_id)

    def process(self, network: Network) -> Process:
        made = network.objective or self.build(num_ids=network.num_ids, width=network.width)
        ids = {"num_ids": network.num_ids, "mask_id": network.mask_id}
        return Process(cast(Rates, made.rates), **ids, by_row=self.centre == "sentence")

    # --- training ---

    def loss(self, network: Network, batch: Batch) -> LossSum:
        self.check(network)
        batch = batch.drop_labels(network.label_dropout)
        if self.rates == "power":
            return LossSum(self._twin_nats(network, batch), batch.num_tokens)
        h_ND, term, _, c_I = self._positions(network, batch)
        return LossSum(summed_nats(network, h_ND, term, tensors=[c_I]), batch.num_tokens)

    def _twin_nats(self, network: Network, batch: Batch) -> Tensor:
        """The loss with learned rates: the mean over two draws of each row's masks, whose gradient is the bound's.

        The masks depend on k. Besides the gradient of the loss F with the masks held fixed, there is therefore the term
        E[F ∇ log q(z)]; with each draw as the other's baseline (RLOO) it is
        E[(F_1 - F_2) ∇ (log q(z_1) - log q(z_2))] / 2.
        """
        twins = twins_of(batch)
        h_ND, term, masked_BL, c_I = self._positions(network, twins)
        total, nats_N = kept_nats(network, h_ND, term, tensors=[c_I])
        nats = total / 2
        if not torch.is_grad_enabled():
            return nats
        row_nats_B = at_positions(masked_BL, nats_N).sum(dim=1)
        first_B, second_B = row_nats_B.chunk(2)
        log_q_B = log_q(self.process(network), twins, self._times(twins.time_B), masked_BL).to(row_nats_B)
        first_log_q_B, second_log_q_B = log_q_B.chunk(2)
        score = ((first_B - second_B) * (first_log_q_B - second_log_q_B)).sum() / 2
        return nats + (score - score.detach()).to(nats)  # adds a gradient, but no value

    def _positions(self, network: Network, batch: Batch) -> tuple[Tensor, Term, Tensor, Tensor]:
        """The trunk's vectors at the masked positions of z_t, the loss of each, the positions, and the parameters of
        the rates (differentiable if they are learned)."""
        process, device, t_B = self.process(network), network.device_for(batch.x_BL), self._times(batch.time_B)
        z_BL = process.corrupt(batch.x_BL, t_B, batch.key_B, batch.scored_BL)
        masked_BL = batch.scored_BL & (z_BL == process.mask_id)
        flat_N = masked_BL.flatten().nonzero().squeeze(1)
        how: dict[str, Any] = {"valid_BL": batch.valid_BL, "label_B": batch.label_B}
        h_ND = vectors_at(network, z_BL, process.level(t_B), flat_N, **how)
        row_N = flat_N // batch.x_BL.shape[1]
        t_N, x_N = (put(line, device) for line in (t_B[row_N], batch.x_BL.flatten()[flat_N]))
        wide = torch.promote_types(h_ND.dtype, torch.float32)
        c_I = process.rates.numbers(torch.empty(0, dtype=wide, device=device))
        own_N = self._own(process, batch, t_B, flat_N)
        own_N = None if own_N is None else put(own_N, device)

        def term(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
            log_p_CI = subs_log_probs(logits_CI, network.mask_id)
            own_C = None if own_N is None else own_N[lo:hi]
            return self.nats(process.rates, log_p_CI, x_N[lo:hi], t_N[lo:hi], c_I, own_C)

        return h_ND, term, masked_BL, c_I

    def _own(self, process: Process, batch: Batch, t_B: Tensor, flat_N: Tensor) -> Tensor | None:
        """[N] the forward process's own rate parameters at the flat positions; None if they are those of the tokens."""
        if not process.by_row:
            return None
        return process.forward_numbers(batch.x_BL, batch.scored_BL, t_B).flatten()[flat_N]

    def _times(self, time_B: Tensor) -> Tensor:
        """The times of a batch, or the ends of the steps that contain them."""
        return time_B if self.steps is None else torch.ceil(time_B * self.steps).clamp(min=1) / self.steps

    def nats(
        self, rates: Rates, log_p_NI: Tensor, x_N: Tensor, t_N: Tensor, c_I: Tensor, own_N: Tensor | None = None
    ) -> Tensor:
        """[N] the loss of a masked position at time t, given log x_theta at that position: the equations above.

        c_I: the parameters of the reverse rates; own_N: those of the forward rates, None if they are the token's.
        """
        t_N1, c_I, x_N1 = t_N.to(log_p_NI)[:, None], c_I.to(log_p_NI), x_N[:, None]
        own_N1 = c_I[x_N1] if own_N is None else own_N.to(log_p_NI)[:, None]
        log_p_x_N = log_p_NI.gather(1, x_N1).squeeze(1)
        if self.steps is None:
            p_NI, q_N1 = rates.weight(t_N1, c_I), rates.weight(t_N1, own_N1)
            log_ratio_N = (q_N1 / p_NI.gather(1, x_N1)).log().squeeze(1)
            return (log_p_NI.exp() * p_NI).sum(dim=1) + q_N1.squeeze(1) * (log_ratio_N - 1 - log_p_x_N)
        step = torch.full_like(t_N1, 1 / self.steps)
        p_NI, q_N1 = rates.opens(t_N1, step, c_I), rates.opens(t_N1, step, own_N1)
        log_ratio_N = (q_N1 / p_NI.gather(1, x_N1)).log().squeeze(1)
        # log[(1 - q) / Σ x_theta (1 - p)] = -log(1 + Σ x_theta (q - p) / (1 - q)); all open at s = 0
        last_N1 = t_N1 <= step
        stays_N1 = torch.where(last_N1, 1.0, 1 - q_N1)
        excess_N = (log_p_NI.exp() * (q_N1 - p_NI) / stays_N1).sum(dim=1)
        staying_N = torch.where(last_N1, 0.0, stays_N1).squeeze(1) * torch.log1p(excess_N)
        return self.steps * (q_N1.squeeze(1) * (log_ratio_N - log_p_x_N) - staying_N)

    # --- evaluation ---

    def position_nats(self, network: Network, batch: Batch) -> Tensor:
        with torch.no_grad():
            h_ND, term, masked_BL, _ = self._positions(network, batch)
            return at_positions(masked_BL, token_nats(network, h_ND, term))

    def estimator(self, network: Network | Denoiser) -> str:
        return "time" if self.steps is None else f"T={self.steps}"

    def with_estimator(self, name: str) -> Self:
        """This objective with its bound in continuous time ("time") or in T steps ("T=1000")."""
        if name == "time":
            return replace(self, steps=None)
        match = re.fullmatch(r"T=([1-9]\d{0,8})", name)
        if not match:
            raise UsageError(f"unknown estimator {name!r}; known: time, T=<steps>")
        return replace(self, steps=int(match[1]))

    def score_queries(self, network: Network, batch: Batch, *, num_samples: int) -> Iterator[ScoreQuery]:
        process = self.process(network)
        for g, group in enumerate(bound_draws(batch.key_B, num_samples)):
            for key_1, time_1 in group:
                t_1 = self._times(time_1)
                z_1L = process.corrupt(batch.x_BL, t_1, key_1, batch.scored_BL)
                masked_1L = batch.scored_BL & (z_1L == process.mask_id)
                canvas = Canvas(batch.x_BL, process.mask_id, key_1, label_B=batch.label_B)
                query = ask_about(canvas, z_1L, masked_1L, process.level(t_1))
                if query is not None:  # at an early time nothing may be masked
                    position_N = masked_1L[0].nonzero().squeeze(1)
                    own_N = self._own(process, batch, t_1, position_N)
                    nats = partial(self._score, process.rates, batch.x_BL[0, position_N], t_1, own_N)
                    yield ScoreQuery(query, g, 1 / len(group), position_N, nats)

    @torch.no_grad()
    def _score(self, rates: Rates, x_N: Tensor, t_1: Tensor, own_N: Tensor | None, log_p_NI: Tensor) -> Tensor:
        log_p_NI = log_p_NI.cpu().double()
        return self.nats(rates, log_p_NI, x_N, t_1.expand(len(x_N)), rates.numbers(log_p_NI), own_N)

    # --- sampling ---

    def predictor(self, network: Network) -> Predictor:
        from unmask.sampling.predictor import XTheta

        self.check(network)
        return XTheta(network, self.process(network), gives="x0_by_rates")

    def sampler(self) -> Sampler:
        from unmask.samplers.token_posterior import TokenPosterior

        return TokenPosterior()


def twins_of(batch: Batch) -> Batch:
    """The batch followed by the same rows at the same times, with independently drawn masks.

    >>> from unmask.data.batch import make_batch
    >>> twins_of(make_batch(torch.zeros(2, 3, dtype=torch.long), seed=0, step=0)).x_BL.shape
    torch.Size([4, 3])
    """

    def twice(line: Tensor | None) -> Tensor | None:
        return None if line is None else torch.cat([line, line])

    again = {name: twice(getattr(batch, name)) for name in ("x_BL", "valid_BL", "scored_BL", "time_B", "label_B")}
    key_B = torch.cat([batch.key_B, fold(batch.key_B, DRAW_TWIN)])
    return replace(batch, key_B=key_B, place_B=twice(batch.place_B), **cast(Any, again))


def log_q(process: Process, batch: Batch, t_B: Tensor, masked_BL: Tensor) -> Tensor:
    """[B] log q(z_t | x) of each row's masks, differentiable in the learned parameters of the rates."""
    # At t = 1 nothing is visible; a time just before it keeps the gradient of the unused branch finite.
    x_BL, open_BL = batch.x_BL, batch.scored_BL
    seen_BL = 1 - process.levels(x_BL, t_B.clamp(max=1 - 2.0**-40), open_BL)
    log_BL = torch.where(masked_BL, process.levels(x_BL, t_B, open_BL).log(), seen_BL.log())
    return (log_BL * open_BL).sum(dim=1)
