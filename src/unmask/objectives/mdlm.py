"""Masked diffusion: a weighted masked-LM loss, in continuous time, in T steps, or in count form (MDLM, 2406.07524).

T steps are its equation 8, continuous time 10 and 11. The count form, which has the value of continuous time with the
time integrated out, is not in the paper. What else differs from the published system: its schedule ends at alpha(1) =
1e-3, here at 0; its network gets a constant in place of the time, where a denoiser without conditioning has no such
input.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from unmask.data.batch import Batch
from unmask.denoisers import Denoiser
from unmask.denoisers.base import other_way
from unmask.denoisers.network import Attend, Network
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put
from unmask.errors import UsageError
from unmask.noise import Noise
from unmask.noise.learned import LearnedNoise
from unmask.noise.log_linear import LogLinear
from unmask.objectives import Objective
from unmask.objectives.chunked_loss import (
    LossSum,
    Term,
    at_positions,
    cross_entropy,
    summed_nats,
    token_nats,
    weighted_nats,
)
from unmask.objectives.draws import bound_draws
from unmask.objectives.score_queries import ScoreQuery, token_nats_of
from unmask.objectives.terms import (
    continuous_weight,
    count_weight,
    d3pm_nats,
    step_weight,
    subs_log_probs,
    variance_gradient,
)
from unmask.processes.absorbing import Absorbing, position_uniforms
from unmask.registry import check_fields
from unmask.sampling.canvas import Canvas
from unmask.sampling.query import ask_about

if TYPE_CHECKING:
    from unmask.samplers import Sampler
    from unmask.sampling.predictor import Predictor


@dataclass(frozen=True)
class Noised:
    """A noised batch: z_t, its mask, and the weight of each masked token's loss."""

    z_BL: Tensor
    masked_BL: Tensor
    level_B: Tensor
    weight_B: Tensor
    level_s_B: Tensor | None = None  # T-step forms only: the level one step earlier


@dataclass(frozen=True, kw_only=True)
class MDLM(Objective):
    """-log p(x) <= E sum over masked tokens of weight x -log x_theta[x].

    steps=None is continuous time; form="count" draws the number of masks instead of a time.
    carry_over and zero_masking are the two halves of SUBS; turning one off needs steps.
    A noise with parameters is learned so that the estimate varies less: the bound does not depend on it.
    """

    noise: Noise = LogLinear()
    steps: int | None = None
    form: Literal["time", "count"] = "time"
    carry_over: bool = True
    zero_masking: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps must be at least 1, or none for continuous time; got {self.steps}")
        if self.steps is None and not self.carry_over:
            raise UsageError(
                "continuous time needs carry_over: without it a reconstruction term is due at t=0; set steps"
            )
        if self.steps is None and not self.zero_masking:
            raise UsageError(
                "continuous time needs zero_masking: the loss of a predicted mask is a T-step form; set steps"
            )
        if self.form == "count" and self.steps is not None:
            raise UsageError(
                "the count form is the continuous-time bound with the time integrated out: leave steps unset"
            )

    def check(self, denoiser: Denoiser | Network) -> None:
        if denoiser.causal:
            raise UsageError(
                f"masked diffusion needs a denoiser that sees both sides: {other_way(denoiser, causal=False)}"
            )
        if self.form == "count" and denoiser.uses_level:
            raise UsageError(
                "the count form holds only for a denoiser that ignores the noise level: "
                "use form = time, or a denoiser without time conditioning"
            )

    def build(self, *, num_ids: int, width: int) -> nn.Module | None:
        learned = self.noise.build()
        if learned is not None and self.steps is not None:
            raise UsageError(
                "a schedule with parameters is learned in continuous time, where the bound does not depend on it: "
                "use mdlm without steps"
            )
        return None if learned is None else nn.ModuleDict({"noise": learned})

    def process(self, network: Network) -> Absorbing:
        learned = getattr(network.objective, "noise", None)
        return Absorbing(learned or self.noise, num_ids=network.num_ids, mask_id=network.mask_id)

    # --- training ---

    def loss(self, denoiser: Network, batch: Batch) -> LossSum:
        self.check(denoiser)
        batch = batch.drop_labels(denoiser.label_dropout)
        process = self.process(denoiser)
        noised = self.noised(batch, process)
        noised = dataclasses.replace(noised, weight_B=self.training_weight(noised.weight_B))
        if self.zero_masking:
            nats, nats_N = weighted_nats(denoiser, *self._masked_vectors(denoiser, batch, noised)[:3])
            nats = nats + self.schedule_loss(process, batch, noised, nats_N)
        else:
            nats = summed_nats(denoiser, *self._trained_positions(denoiser, batch, noised))
        if not self.carry_over:
            nats = nats + summed_nats(denoiser, *self._reconstruction(denoiser, batch))
        return LossSum(nats, batch.num_tokens)

    def training_weight(self, weight_B: Tensor) -> Tensor:
        """The weight of a masked token in training, given its weight in the bound."""
        return weight_B

    def attend(self, batch: Batch) -> Attend:
        """The attention pattern of noised rows in training; in evaluation every position is visible."""
        return Attend(batch.valid_BL)

    def schedule_loss(self, process: Absorbing, batch: Batch, noised: Noised, nats_N: Tensor) -> Tensor | float:
        """0, with the gradient of a learned schedule (`variance_gradient`), from the nats of the masked tokens.

        A row's nats are divided by the cost of a uniform guess, so that this gradient is not larger than the network's,
        with which it is clipped; and every token of the batch has the same weight.
        """
        if not isinstance(process.noise, LearnedNoise) or self.form == "count" or not torch.is_grad_enabled():
            return 0.0
        nats_B = at_positions(noised.masked_BL, nats_N).sum(dim=1)
        tokens_B = batch.scored_BL.sum(dim=1).clamp(min=1).to(nats_B)
        share_B = nats_B / (
            tokens_B.sqrt() * math.log(process.num_ids)
        )  # its square: tokens x (nats a token / log ids)²
        return variance_gradient(process.noise, batch.time_B, share_B).to(nats_N.dtype)

    def noised(self, batch: Batch, process: Absorbing) -> Noised:
        """Draw z_t ~ q(z_t | x) for each row at its own time; prompts and padding are not changed."""
        if self.form == "count":
            return self._noised_by_count(batch, process)
        t_B, noise = batch.time_B, process.schedule
        if self.steps is None:
            weight_B, level_s_B = continuous_weight(noise, t_B), None
        else:
            i_B = torch.ceil(t_B * self.steps).clamp(min=1)
            t_B, s_B = i_B / self.steps, (i_B - 1) / self.steps
            level_s_B = noise.level(s_B)
            weight_B = self.steps * step_weight(level_s_B, noise.level(t_B))
        masked_BL = process.masked(t_B, batch.key_B, batch.scored_BL)
        z_BL = batch.x_BL.masked_fill(masked_BL, process.mask_id)
        return Noised(z_BL, masked_BL, process.level(t_B), weight_B, level_s_B)

    def _noised_by_count(self, batch: Batch, process: Absorbing) -> Noised:
        """n uniform in 1..L, then a uniform subset of n tokens."""
        tokens_B = batch.scored_BL.sum(dim=1)
        n_B = torch.ceil(batch.time_B * tokens_B).long().clamp(min=1)
        masked_BL = uniform_subset(batch, n_B)
        level_B = n_B / tokens_B.clamp(min=1)
        weight_B = count_weight(tokens_B.to(batch.time_B.dtype), n_B)
        return Noised(batch.x_BL.masked_fill(masked_BL, process.mask_id), masked_BL, level_B, weight_B)

    def _masked_vectors(self, denoiser: Network, batch: Batch, noised: Noised) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """At the masked positions: the trunk's vector, the original token, its row's weight, its row."""
        flat_N = noised.masked_BL.flatten().nonzero().squeeze(1)  # counted on the batch's device: the host, in training
        row_N = flat_N // batch.x_BL.shape[1]
        device = denoiser.device_for(batch.x_BL)
        rows: dict[str, Any] = {"attend": self.attend(batch), "label_B": batch.label_B}
        h_ND = vectors_at(denoiser, noised.z_BL, noised.level_B, flat_N, **rows)
        x_N, weight_N, row_N = (put(t, device) for t in (batch.x_BL.flatten()[flat_N], noised.weight_B[row_N], row_N))
        return h_ND, x_N, weight_N, row_N

    def _masked_positions(self, denoiser: Network, batch: Batch, noised: Noised) -> tuple[Tensor, Term]:
        """The trunk's vectors at the masked positions, and the loss of each."""
        h_ND, x_N, weight_N, row_N = self._masked_vectors(denoiser, batch, noised)
        steps, level_s_B, level_t_B = self.steps, noised.level_s_B, noised.level_B

        def term(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
            log_p = subs_log_probs(logits_CI, denoiser.mask_id, self.zero_masking)
            log_p_x = log_p.gather(1, x_N[lo:hi, None]).squeeze(1)
            if self.zero_masking:
                return weight_N[lo:hi].to(log_p.dtype) * -log_p_x
            assert level_s_B is not None and steps is not None
            level_s, level_t = (put(level_B, log_p.device)[row_N[lo:hi]] for level_B in (level_s_B, level_t_B))
            return steps * d3pm_nats(log_p_x, log_p[:, denoiser.mask_id].exp(), level_s, level_t)

        return h_ND, term

    def _trained_positions(self, denoiser: Network, batch: Batch, noised: Noised) -> tuple[Tensor, Term]:
        """The same in training if the mask may be predicted; under zero masking `training_weight` covers it."""
        return self._masked_positions(denoiser, batch, noised)

    def _reconstruction(self, denoiser: Network, batch: Batch) -> tuple[Tensor, Term]:
        """Without carry-over: -log x_theta(x, t=0)[x] at every scored position of the clean row."""
        flat_N = batch.scored_BL.flatten().nonzero().squeeze(1)
        clean_B = torch.zeros_like(batch.time_B)
        rows: dict[str, Any] = {"valid_BL": batch.valid_BL, "label_B": batch.label_B}
        h_ND = vectors_at(denoiser, batch.x_BL, clean_B, flat_N, **rows)
        x_N = put(batch.x_BL.flatten()[flat_N], h_ND.device)
        return h_ND, cross_entropy(x_N, denoiser.mask_id, self.zero_masking)

    # --- evaluation ---

    def estimator(self, denoiser: Network | Denoiser) -> str:
        if self.steps is not None:
            return f"T={self.steps}"
        return "time" if denoiser.uses_level else "count"

    def with_estimator(self, name: str) -> Self:
        """This objective with another form of its bound: "count", "time" (continuous) or "T=1000" (steps)."""
        if name == "count":
            return dataclasses.replace(self, steps=None, form="count")
        if name == "time":
            return dataclasses.replace(self, steps=None, form="time")
        match = re.fullmatch(r"T=([1-9]\d{0,8})", name)
        if not match:
            raise UsageError(f"unknown estimator {name!r}; known: count, time, T=<steps>")
        return dataclasses.replace(self, steps=int(match[1]), form="time")

    def position_nats(self, denoiser: Network, batch: Batch) -> Tensor:
        noised = self.noised(batch, self.process(denoiser))
        nats_N = token_nats(denoiser, *self._masked_positions(denoiser, batch, noised))
        nats_BL = at_positions(noised.masked_BL, nats_N)
        if not self.carry_over:
            nats_BL = nats_BL + at_positions(
                batch.scored_BL, token_nats(denoiser, *self._reconstruction(denoiser, batch))
            )
        return nats_BL

    def score_queries(self, denoiser: Network, batch: Batch, *, num_samples: int) -> Iterator[ScoreQuery]:
        process = self.process(denoiser)
        for g, group in enumerate(bound_draws(batch.key_B, num_samples)):
            for key_1, time_1 in group:
                draw = dataclasses.replace(batch, key_B=key_1, time_B=time_1)
                noised, share = self.noised(draw, process), 1 / len(group)
                canvas = Canvas(batch.x_BL, process.mask_id, key_1, label_B=batch.label_B)
                nats = self._score(batch, noised, process)
                query = ask_about(canvas, noised.z_BL, noised.masked_BL, noised.level_B)
                if query is not None:  # at an early time nothing may be masked
                    yield ScoreQuery(query, g, share, noised.masked_BL[0].nonzero().squeeze(1), nats)
                if not self.carry_over:
                    clean = ask_about(canvas, batch.x_BL, batch.scored_BL, torch.zeros_like(noised.level_B))
                    assert clean is not None
                    position_N = batch.scored_BL[0].nonzero().squeeze(1)
                    yield ScoreQuery(clean, g, share, position_N, token_nats_of(batch.x_BL[0, position_N]))

    def _score(self, batch: Batch, noised: Noised, process: Absorbing) -> Callable[[Tensor], Tensor]:
        """A function that maps log x_theta at the masked positions to their nats."""
        x_N = batch.x_BL[0, noised.masked_BL[0]]
        if self.zero_masking:
            return token_nats_of(x_N, noised.weight_B)
        assert noised.level_s_B is not None
        assert self.steps is not None
        steps, levels = self.steps, (noised.level_s_B, noised.level_B)

        def nats(log_p_NI: Tensor) -> Tensor:
            log_p_NI = log_p_NI.cpu().double()
            log_p_x = log_p_NI.gather(1, x_N[:, None]).squeeze(1)
            return steps * d3pm_nats(log_p_x, log_p_NI[:, process.mask_id].exp(), *levels)

        return nats

    # --- sampling ---

    def predictor(self, denoiser: Network) -> Predictor:
        from unmask.sampling.predictor import XTheta

        self.check(denoiser)
        return XTheta(denoiser, self.process(denoiser), zero_masking=self.zero_masking)

    def sampler(self) -> Sampler:
        from unmask.samplers.ancestral import Ancestral
        from unmask.samplers.posterior import Posterior

        return Ancestral() if self.zero_masking else Posterior()


def uniform_subset(batch: Batch, n_B: Tensor) -> Tensor:
    """[B, L] a uniformly random subset of n of each row's scored tokens: those with the n smallest uniforms."""
    u_BL = position_uniforms(batch.key_B, batch.x_BL).masked_fill(~batch.scored_BL, 2.0)
    last_B1 = _sorted(u_BL).gather(1, n_B[:, None] - 1)
    return batch.scored_BL & (u_BL <= last_B1)  # 53 bits each, so ties are practically impossible


def _sorted(u_BL: Tensor) -> Tensor:
    """Sort each row. On a CPU, numpy sorts with vector instructions, more than ten times as fast as torch."""
    return u_BL.sort(dim=1).values if u_BL.device.type != "cpu" else torch.from_numpy(np.sort(u_BL.numpy(), axis=1))
