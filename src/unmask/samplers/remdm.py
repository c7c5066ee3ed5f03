"""The reverse chain with remasking: written tokens can be masked again and corrected, and the marginals are kept."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unmask.errors import UsageError
from unmask.noise import Noise
from unmask.samplers.remasking import Move, RemaskingSampler, RemaskingState, alphas, check_steps, largest_sigma


@dataclass(frozen=True, kw_only=True)
class ReMDM(RemaskingSampler):
    """Order: random, with returns. Calls: at most `steps`, and `loop` more in that variant. Law: its T-step chain.

    The probability sigma that a written token is masked again is at most (1 - alpha_s) / alpha_t. By variant:
    cap: eta, or this maximum if it is less. rescale: eta times the maximum. loop: 0, but at time `hold` there are
    `loop` additional moves that stay there, with the sigma of cap. These preserve the marginals of the forward process.
    confidence: the sigma of rescale, distributed over a row's written tokens by softmax(-p), where p is the probability
    with which each was drawn, while masked positions open as without remasking. More masks are then left than under the
    marginals, until the last step opens all.
    """

    law: ClassVar[str] = "the T-step chain with remasking, exactly; it keeps the marginals, but for variant=confidence"
    cost: ClassVar[str] = "at most steps; steps + loop with variant = loop"

    variant: Literal["cap", "rescale", "confidence", "loop"] = "cap"
    eta: float = 0.05
    steps: int = 128
    hold: float = 0.1
    loop: int = 64
    noise: Noise | None = None  # None: the model's

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps(self.steps)
        check_steps(self.loop, "loop", 0)
        if not 0 <= self.eta <= 1:
            raise UsageError("eta says how much is masked again, in [0, 1]; got {eta}", eta=self.eta)
        if not 0 < self.hold < 1:
            raise UsageError("hold is a time between 0 (clean) and 1 (all masked), got {hold}", hold=self.hold)
        if self.variant == "loop" and self.steps < 2:
            raise UsageError("variant=loop needs at least 2 steps: one to the time it holds, one from there")

    def max_calls(self, length: int) -> int:
        return self.steps + (self.loop if self.variant == "loop" else 0)

    def moves(self) -> list[Move]:
        if self.variant != "loop":
            pairs = itertools.pairwise(alphas(self.schedule, 1, 0, self.steps))
            return [Move(alpha_t, alpha_s, self._sigma(alpha_t, alpha_s)) for alpha_t, alpha_s in pairs]
        before = self.steps // 2
        down = [alphas(self.schedule, 1, self.hold, before), alphas(self.schedule, self.hold, 0, self.steps - before)]
        to, on = ([Move(alpha_t, alpha_s, 0.0) for alpha_t, alpha_s in itertools.pairwise(part)] for part in down)
        alpha = down[1][0]
        return [*to, *[Move(alpha, alpha, min(self.eta, largest_sigma(alpha, alpha)))] * self.loop, *on]

    def _sigma(self, alpha_t: float, alpha_s: float) -> float:
        largest = largest_sigma(alpha_t, alpha_s)
        # By confidence, sigma is 0 at masked positions, which then open as in the plain chain.
        return {"cap": min(self.eta, largest), "rescale": self.eta * largest, "confidence": 0.0}[self.variant]

    def sigma(self, state: RemaskingState, move: Move) -> Tensor | float:
        if self.variant != "confidence":
            return move.sigma
        written_BL = state.canvas.open_BL & (state.tokens_BL != state.canvas.mask_id)
        # In rows without written tokens the shares are NaN, but they are not used.
        doubt_BL = (-state.log_prob_BL.exp()).masked_fill(~written_BL, -torch.inf).softmax(dim=1)
        return self.eta * largest_sigma(move.alpha_t, move.alpha_s) * doubt_BL
