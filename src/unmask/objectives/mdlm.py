"""Masked diffusion: a weighted masked-LM loss, in continuous time, in T steps, or in count form (the paper)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from unmask.data.batch import DRAW_MASK, DRAW_TIME, Batch
from unmask.denoisers import Denoiser
from unmask.denoisers.network import Network, evaluating
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.noise import Noise
from unmask.noise.log_linear import LogLinear
from unmask.objectives import Objective
from unmask.objectives.chunked_loss import (
    LossSum,
    Term,
    cross_entropy,
    sum_rows,
    summed_nats,
    token_nats,
    weighted_cross_entropy,
)
from unmask.objectives.terms import continuous_weight, count_weight, d3pm_nats, step_weight, subs_log_probs
from unmask.registry import check_fields
from unmask.rng import fold, row_keys, uniform

if TYPE_CHECKING:
    from unmask.samplers import Sampler
    from unmask.sampling.predictor import Predictor


@dataclass(frozen=True)
class Noised:
    """A noised batch: z_t, what is masked in it, and what each masked token's loss counts."""

    z_BL: Tensor
    masked_BL: Tensor
    level_B: Tensor
    weight_B: Tensor
    level_s_B: Tensor | None = None  # T-step forms only: the level one step on


@dataclass(frozen=True, kw_only=True)
class MDLM(Objective):
    """-log p(x) <= E sum over masked tokens of weight x -log x_theta[x].

    steps=None is continuous time; form="count" draws the number of masks instead of a time.
    carry_over and zero_masking are the two halves of SUBS; turning one off needs steps.
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
            raise UsageError("masked diffusion needs a denoiser that sees both sides: set denoiser.causal = false")
        if self.form == "count" and denoiser.uses_level:
            raise UsageError(
                "the count form holds only for a denoiser that ignores the noise level: "
                "use form = time, or a denoiser without time conditioning"
            )

    # --- a schedule with parameters ---

    def build(self, *, num_ids: int, width: int) -> nn.Module | None:
        learned = self.noise.build()
        return None if learned is None else nn.ModuleDict({"noise": learned})

    def _noise(self, denoiser: Network) -> Noise:
        """The schedule with its trained parameters, where it has some."""
        noise = None if denoiser.objective is None else denoiser.objective.noise
        return noise if isinstance(noise, Noise) else self.noise

    # --- training ---

    def loss(self, denoiser: Network, batch: Batch) -> LossSum:
        self.check(denoiser)
        batch = batch.forgetting(denoiser.label_dropout)
        noised = self.noised(batch, denoiser.mask_id, self._noise(denoiser))
        if self.zero_masking:
            nats = weighted_cross_entropy(denoiser, *self._masked_vectors(denoiser, batch, noised)[:3])
        else:
            levels = [t for t in (noised.level_s_B, noised.level_B) if t is not None and t.requires_grad]
            nats = summed_nats(denoiser, *self._masked_positions(denoiser, batch, noised), tensors=levels)
        if not self.carry_over:
            nats = nats + summed_nats(denoiser, *self._reconstruction(denoiser, batch))
        return LossSum(nats, batch.num_tokens)

    def noised(self, batch: Batch, mask_id: int, noise: Noise | None = None) -> Noised:
        """q(z_t | x) for each row at its own time; prompts and padding stay as they are. noise: the trained one."""
        noise = noise or self.noise
        if self.form == "count":
            return self._noised_by_count(batch, mask_id)
        t_B = batch.time_B
        if self.steps is None:
            weight_B, level_s_B = continuous_weight(noise, t_B), None
        else:
            i_B = torch.ceil(t_B * self.steps).clamp(min=1)
            t_B, s_B = i_B / self.steps, (i_B - 1) / self.steps
            level_s_B = noise.level(s_B)
            weight_B = self.steps * step_weight(level_s_B, noise.level(t_B))
        level_B = noise.level(t_B)
        u_BL = _position_uniforms(batch)
        masked_BL = batch.scored_BL & (u_BL < level_B[:, None])
        return Noised(batch.x_BL.masked_fill(masked_BL, mask_id), masked_BL, level_B, weight_B, level_s_B)

    def _noised_by_count(self, batch: Batch, mask_id: int) -> Noised:
        """n uniform in 1..L, then a uniform subset of n tokens: those with the n smallest of independent uniforms."""
        tokens_B = batch.scored_BL.sum(dim=1)
        n_B = torch.ceil(batch.time_B * tokens_B).long().clamp(min=1)
        u_BL = _position_uniforms(batch).masked_fill(~batch.scored_BL, 2.0)
        last_B1 = _sorted(u_BL).gather(1, n_B[:, None] - 1)
        masked_BL = batch.scored_BL & (u_BL <= last_B1)  # 53 bits each: that two are equal is not to be expected
        level_B = n_B / tokens_B.clamp(min=1)
        weight_B = count_weight(tokens_B.to(batch.time_B.dtype), n_B)
        return Noised(batch.x_BL.masked_fill(masked_BL, mask_id), masked_BL, level_B, weight_B)

    def _masked_vectors(self, denoiser: Network, batch: Batch, noised: Noised) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """At the masked positions: the trunk's vector, the token that was there, its row's weight, its row."""
        flat_N = noised.masked_BL.flatten().nonzero().squeeze(1)  # counted where the batch is: on the host, in training
        row_N = flat_N // batch.x_BL.shape[1]
        device = denoiser.device_for(batch.x_BL)
        given = {"valid_BL": batch.valid_BL, "label_B": batch.label_B}
        h_ND = vectors_at(denoiser, noised.z_BL, noised.level_B, flat_N, **given)
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
            level_s, level_t = (level_B.to(log_p)[row_N[lo:hi]] for level_B in (level_s_B, level_t_B))
            return steps * d3pm_nats(log_p_x, log_p[:, denoiser.mask_id].exp(), level_s, level_t)

        return h_ND, term

    def _reconstruction(self, denoiser: Network, batch: Batch) -> tuple[Tensor, Term]:
        """Without carry-over: -log x_theta(x, t=0)[x] at every scored position of the clean row."""
        flat_N = batch.scored_BL.flatten().nonzero().squeeze(1)
        clean_B = torch.zeros_like(batch.time_B)
        given = {"valid_BL": batch.valid_BL, "label_B": batch.label_B}
        h_ND = vectors_at(denoiser, batch.x_BL, clean_B, flat_N, **given)
        x_N = put(batch.x_BL.flatten()[flat_N], h_ND.device)
        return h_ND, cross_entropy(x_N, denoiser.mask_id, self.zero_masking)

    # --- evaluation ---

    def estimator(self, denoiser: Network | Denoiser) -> str:
        if self.steps is not None:
            return f"T={self.steps}"
        return "time" if denoiser.uses_level else "count"

    def with_estimator(self, name: str) -> MDLM:
        """This objective in another form of its bound: "count", "time" (continuous) or "T=1000" (steps)."""
        if name in ("count", "time"):
            form: Literal["count", "time"] = "count" if name == "count" else "time"
            return MDLM(noise=self.noise, form=form, carry_over=self.carry_over, zero_masking=self.zero_masking)
        match = re.fullmatch(r"T=([1-9]\d{0,8})", name)
        if not match:
            raise UsageError(f"unknown estimator {name!r}; known: count, time, T=<steps>")
        return dataclasses.replace(self, steps=int(match[1]), form="time")

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
        num_samples: int = 8,
        estimator: str | None = None,
        label_B: Tensor | None = None,
    ) -> Bound:
        objective = self.with_estimator(estimator or self.estimator(denoiser))
        objective.check(denoiser)
        if num_samples < 1:
            raise UsageError(f"num_samples must be at least 1, got {num_samples}")
        if scored_BL is None:
            scored_BL = torch.ones_like(x_BL, dtype=torch.bool) if valid_BL is None else valid_BL
        key_B = row_keys(seed, torch.arange(first_row, first_row + len(x_BL), device=x_BL.device))
        groups = []
        for group in bound_draws(key_B, num_samples):
            group_B = torch.zeros(len(x_BL), dtype=group[0][1].dtype)
            for key_j_B, time_B in group:
                batch = Batch(x_BL, valid_BL, scored_BL, key_j_B, time_B, label_B)
                with evaluating(denoiser):
                    group_B += objective.row_nats(denoiser, batch).to(group_B) / len(group)
            groups.append(group_B)
        return Bound(draws_BS=torch.stack(groups, dim=1), tokens_B=scored_BL.sum(dim=1).cpu())

    def row_nats(self, denoiser: Network, batch: Batch) -> Tensor:
        """One unbiased estimate of each row's bound; its mean over keys and times is the bound."""
        noised = self.noised(batch, denoiser.mask_id, self._noise(denoiser))
        total_B = sum_rows(noised.masked_BL, token_nats(denoiser, *self._masked_positions(denoiser, batch, noised)))
        if not self.carry_over:
            total_B = total_B + sum_rows(batch.scored_BL, token_nats(denoiser, *self._reconstruction(denoiser, batch)))
        return total_B

    # --- sampling ---

    def predictor(self, denoiser: Network) -> Predictor:
        from unmask.sampling.predictor import XTheta

        self.check(denoiser)
        return XTheta(denoiser, zero_masking=self.zero_masking)

    def sampler(self) -> Sampler:
        from unmask.samplers.ancestral import Ancestral
        from unmask.samplers.posterior import Posterior

        return Ancestral(noise=self.noise) if self.zero_masking else Posterior(noise=self.noise)


def bound_draws(key_B: Tensor, num_samples: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The draws behind a bound, in groups: the rows' keys and times of each.

    Times are spread evenly inside a group of a row's draws; groups and rows are independent of each other.

    >>> [len(group) for group in bound_draws(torch.tensor([1]), 16)]
    [4, 4, 4, 4]
    """
    strata = 4 if num_samples % 4 == 0 and num_samples >= 8 else 1  # two groups at least: one has no spread
    for g in range(num_samples // strata):
        u_B = uniform(fold(key_B, g), DRAW_TIME)
        yield [(fold(key_B, g, j + 1), 1 - (u_B + j / strata) % 1) for j in range(strata)]


def _sorted(u_BL: Tensor) -> Tensor:
    """Each row in order. On a CPU numpy does it by vector instructions, more than ten times as fast as torch."""
    return u_BL.sort(dim=1).values if u_BL.device.type != "cpu" else torch.from_numpy(np.sort(u_BL.numpy(), axis=1))


def _position_uniforms(batch: Batch) -> Tensor:
    position_L = torch.arange(batch.x_BL.shape[1], device=batch.x_BL.device)
    return uniform(batch.key_B[:, None], DRAW_MASK, position_L)
