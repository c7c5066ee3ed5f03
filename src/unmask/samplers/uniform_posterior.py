"""Uniform states in T steps: each step redraws every open position from q(z_s | z_t, x_theta) (UDLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from unmask.processes.uniform import Uniform
from unmask.samplers._chains import ChainSampler, ChainState
from unmask.samplers.base import Accepts


@dataclass(frozen=True, kw_only=True)
class UniformPosterior(ChainSampler):
    """Order: all open positions in every step. Calls: T. Law: that of the T-step reverse chain, exactly.

    z_1 is uniform; z_s is drawn from the general posterior with x_theta in place of x. Temperature and cuts act on
    x_theta. A token may change until the last step, so texts cannot be streamed or constrained.
    """

    law: ClassVar[str] = "exactly the T-step chain q(z_s | z_t, x_theta) of uniform states"
    cost: ClassVar[str] = "steps"
    accepts: ClassVar[Accepts] = (("uniform", "x0"),)  # type: ignore[misc]

    state: Literal["absorbing", "uniform"] | None = "uniform"

    def moves(self, state: ChainState, log_p_NI: Tensor, z_N: Tensor) -> Tensor:
        process = Uniform(self.schedule, num_ids=log_p_NI.shape[1], mask_id=state.canvas.mask_id)
        return process.posterior(z_N, log_p_NI.exp(), *(time.to(log_p_NI) for time in self.times(state)))
