"""Corrector steps after each step of the reverse chain: some tokens are masked, others drawn, at one noise level."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from unmask.errors import UsageError
from unmask.noise import Noise
from unmask.samplers.remasking import Move, RemaskingSampler, alphas, check_steps, largest_sigma


@dataclass(frozen=True, kw_only=True)
class PredictorCorrector(RemaskingSampler):
    """Order: random, with returns. Calls: at most steps + (steps - 1) × corrections. Law: its chain, exactly.

    A correction masks each written token with probability eta, or (1 - alpha) / alpha if that is less, and opens as
    many masked positions on average, so the marginals of the forward process are preserved. The last step is not
    followed by a correction.
    """

    law: ClassVar[str] = "the chain of predictions and corrections, exactly; each keeps the marginals"
    cost: ClassVar[str] = "at most steps + (steps - 1) x corrections"

    steps: int = 64
    corrections: int = 1
    eta: float = 0.05
    noise: Noise | None = None  # None: the model's

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps(self.steps)
        check_steps(self.corrections, "corrections", 0)
        check_steps(self.max_calls(1), "steps × (1 + corrections)")
        if not 0 <= self.eta <= 1:
            raise UsageError("eta says how much is masked again, in [0, 1]; got {eta}", eta=self.eta)

    def max_calls(self, length: int) -> int:
        return self.steps + (self.steps - 1) * self.corrections

    def moves(self) -> list[Move]:
        moves: list[Move] = []
        for alpha_t, alpha_s in itertools.pairwise(alphas(self.schedule, 1, 0, self.steps)):
            if moves:
                correction = Move(alpha_t, alpha_t, min(self.eta, largest_sigma(alpha_t, alpha_t)))
                moves += [correction] * self.corrections
            moves.append(Move(alpha_t, alpha_s, 0.0))
        return moves
