"""The reverse chain for tokens with their own rates: a mask becomes v with probability x_theta[v] rho_v in a step."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from unmask.data.batch import DRAW_ORDER
from unmask.errors import Public, UsageError
from unmask.processes.base import Process
from unmask.processes.token_rates import Rates, TokenRates
from unmask.rng import uniform
from unmask.samplers.base import MAX_STEPS, Accepts, Sampler, State
from unmask.samplers.drawing import Drawing
from unmask.sampling.predictor import Query
from unmask.sampling.query import ask_about


@dataclass(frozen=True, kw_only=True)
class TokenPosterior(Drawing, Sampler):
    """Order: random, faster where fast tokens are likely. Calls: at most T. Law: that of the T-step chain, exactly.

    Whether a position opens depends on the network's prediction, so nothing can be planned: in the step from t to s it
    opens with probability Σ_v x_theta[v] rho_v, and the token is then drawn from x_theta[v] rho_v, normalised.
    Temperature and cuts act on this distribution. In the last step every rho is 1.
    """

    law: ClassVar[str] = "exactly the T-step chain in which a mask becomes v with probability x_theta[v] rho_v"
    cost: ClassVar[str] = "at most steps"
    accepts: ClassVar[Accepts] = (("absorbing", "x0_by_rates"),)  # type: ignore[misc]
    _rates: ClassVar[Rates | None] = None  # of the model that the sampler is bound to; not an option

    steps: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.steps <= MAX_STEPS:
            raise UsageError("steps must lie in 1..{most}, got {steps}", most=Public(MAX_STEPS), steps=self.steps)

    @property
    def constrainable(self) -> bool:
        """False: a constraint draws from x_theta, but here opened tokens have another distribution."""
        return False

    def bind(self, process: Process | None) -> Sampler:
        bound = cast(TokenPosterior, copy.copy(super().bind(process)))
        if isinstance(process, TokenRates):
            process.rates.check(process.rates.numbers(torch.empty(0)))
            object.__setattr__(bound, "_rates", process.rates)
        return bound

    def max_calls(self, length: int) -> int:
        return self.steps

    def ask(self, state: State) -> Query | None:
        masked_BL = state.tokens_BL == state.canvas.mask_id
        t = torch.tensor(self._time(state)[0], dtype=torch.float64)
        level_B = self.schedule.level(t).expand(len(masked_BL)).to(masked_BL.device, torch.float32)
        state.query = ask_about(state.canvas, state.tokens_BL, masked_BL, level_B)
        return state.query

    def select(self, state: State, prediction: Tensor) -> Tensor:
        opens_N = super().select(state, prediction)
        if state.round == self.steps - 1:
            return opens_N
        canvas = state.canvas
        row_N, position_N = self.opened(state, opens_N)
        u_N = uniform(canvas.key_B[row_N], DRAW_ORDER, position_N + canvas.offset, self.steps - state.round)
        return u_N < self._opening(state, prediction).logsumexp(dim=1).exp()

    def draw_opened(self, state: State, prediction: Tensor, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        return super().draw_opened(state, self._opening(state, prediction), opens_N)

    @torch.no_grad()
    def _opening(self, state: State, prediction: Tensor) -> Tensor:
        """[N, I] log(x_theta[v] rho_v)."""
        assert self._rates is not None
        t, step = (torch.tensor(time, device=prediction.device) for time in self._time(state))
        rho_I = self._rates.opens(t.to(prediction), step.to(prediction), self._rates.numbers(prediction))
        return prediction + rho_I.log()

    def _time(self, state: State) -> tuple[float, float]:
        """t and t - s of the current step."""
        return (self.steps - state.round) / self.steps, 1 / self.steps
