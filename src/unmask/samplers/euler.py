"""Euler steps of a score model's reverse rates (SEDD), in T steps, for absorbing and uniform states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unmask.processes.uniform import log_marginal
from unmask.samplers._chains import SMALLEST, ChainSampler, ChainState
from unmask.samplers.base import Accepts


@dataclass(frozen=True, kw_only=True)
class Euler(ChainSampler):
    """Order: random (absorbing), or all in every step (uniform). Calls: at most T. Law: its own T-step chain, exactly.

    Absorbing: in a step of length dt a masked position becomes v with probability dt w e^{l_v} / V, where w is
    -alpha' / (1 - alpha). Uniform: z becomes v with probability dt (-alpha' / (V alpha)) s_v (SEDD's equation 17).
    The position stays with the remaining probability. If the rates are too large for the step, this is clipped at 0,
    the others are renormalised, and the state's `clips` counts it. With log-linear noise and absorbing states dt w is
    (alpha_s - alpha_t) / (1 - alpha_t): Tweedie's step.
    """

    law: ClassVar[str] = "exactly its own T-step chain, which tends to the reverse process as T grows"
    cost: ClassVar[str] = "at most steps"
    accepts: ClassVar[Accepts] = (("absorbing", "score"), ("uniform", "score"))  # type: ignore[misc]

    def opening(self, s: Tensor, t: Tensor) -> Tensor:
        return (t - s) * self.schedule.weight(t)

    def moves(self, state: ChainState, log_p_NI: Tensor, z_N: Tensor) -> Tensor:
        s, t = self.times(state)
        num, noise = log_p_NI.shape[1] - 1, self.schedule
        alpha = noise.alpha(t).clamp(min=SMALLEST).to(log_p_NI)
        log_y_NI = log_marginal(log_p_NI, (1 - alpha).expand(len(z_N)))
        rate = (t - s).to(log_p_NI) * -noise.dalpha(t).to(log_p_NI) / (num * alpha)
        move_NI = rate * (log_y_NI - log_y_NI.gather(1, z_N[:, None])).exp()
        ids = torch.tensor([state.canvas.mask_id], device=z_N.device)
        move_NI = move_NI.index_fill(1, ids, 0.0).scatter(1, z_N[:, None], 0.0)
        whole_N1 = move_NI.sum(dim=1, keepdim=True)
        stays_N1 = 1 - whole_N1
        state.clips += int((stays_N1 < 0).sum())
        fast_N1 = whole_N1.clamp(min=1)  # if nothing stays, the others are renormalised
        return (move_NI / fast_N1).scatter(1, z_N[:, None], stays_N1.clamp(min=0))
