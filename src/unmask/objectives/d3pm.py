"""D3PM with an absorbing state: the T-step bound without SUBS (the paper's ablation and baseline)."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.errors import UsageError
from unmask.objectives.mdlm import MDLM


@dataclass(frozen=True, kw_only=True)
class D3PM(MDLM):
    """T-step masked diffusion whose network may predict the mask and is asked to reconstruct visible tokens.

    With both switches on it is MDLM in T steps, term by term.
    """

    steps: int | None = 1000
    carry_over: bool = False
    zero_masking: bool = False

    def __post_init__(self) -> None:
        if self.steps is None:
            raise UsageError("d3pm is a T-step objective: give steps, or use mdlm for continuous time")
        super().__post_init__()
