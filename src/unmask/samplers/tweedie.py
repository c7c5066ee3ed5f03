"""The analytic reverse step of a score model (SEDD's Tweedie sampler), in T steps, for absorbing and uniform states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unmask.processes.uniform import log_marginal
from unmask.samplers._chains import SMALLEST, ChainSampler, ChainState
from unmask.samplers.base import Accepts


@dataclass(frozen=True, kw_only=True)
class Tweedie(ChainSampler):
    """Order: random (absorbing), or all in every step (uniform). Calls: at most T. Law: its own T-step chain, exactly.

    Absorbing: a masked position becomes v with probability (alpha_s - alpha_t) / (1 - alpha_t) e^{l_v} / V; the last
    step draws from e^l alone. Uniform, with e = alpha_t / alpha_s: the probability of v is
    [s_v / e - (1 - e) / (V e) Σ s] [(1 - e) / V + e 1(v = z)] (SEDD's equation 19). Values outside [0, 1] are clipped
    and counted in the state's `clips`, and the rest is renormalised. For a normalised network the absorbing chain is
    the ancestral one.
    """

    law: ClassVar[str] = "exactly its own T-step chain, with probabilities outside [0, 1] cut off"
    cost: ClassVar[str] = "at most steps"
    accepts: ClassVar[Accepts] = (("absorbing", "score"), ("uniform", "score"))  # type: ignore[misc]

    def opening(self, s: Tensor, t: Tensor) -> Tensor:
        alpha_s, alpha_t = self.schedule.alpha(s), self.schedule.alpha(t)
        return (alpha_s - alpha_t) / self.schedule.level(t)

    def moves(self, state: ChainState, log_p_NI: Tensor, z_N: Tensor) -> Tensor:
        s, t = self.times(state)
        num = log_p_NI.shape[1] - 1
        alpha_t = self.schedule.alpha(t).clamp(min=SMALLEST).to(log_p_NI)
        e = alpha_t / self.schedule.alpha(s).to(log_p_NI)
        log_y_NI = log_marginal(log_p_NI, (1 - alpha_t).expand(len(z_N)))
        s_NI = (log_y_NI - log_y_NI.gather(1, z_N[:, None])).exp()
        s_NI = s_NI.index_fill(1, torch.tensor([state.canvas.mask_id], device=z_N.device), 0.0)
        stays_NI = torch.full_like(s_NI, float((1 - e) / num)).scatter_add(1, z_N[:, None], e.expand(len(z_N), 1))
        return (s_NI / e - (1 - e) / (num * e) * s_NI.sum(dim=1, keepdim=True)) * stays_NI
