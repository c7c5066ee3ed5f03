"""D3PM with an absorbing state (arXiv 2107.03006): the T-step bound without SUBS, and its auxiliary loss.

The bound is MDLM's equation 9. Training may add D3PM's auxiliary term (its equation 5), lambda E[-log x_theta(z_t)[x]].
What differs from the published system: the term is computed at masked positions only; visible tokens are scored in the
reconstruction. And lambda multiplies a term beside the whole bound, as in the paper's equation; the published image
code puts it beside one step's term, a T-th of the bound: its 0.001 is 0.001 T here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from unmask.data.batch import Batch
from unmask.denoisers.network import Network
from unmask.devices import put
from unmask.errors import UsageError
from unmask.objectives.chunked_loss import Term, with_auxiliary
from unmask.objectives.mdlm import MDLM, Noised


@dataclass(frozen=True, kw_only=True)
class D3PM(MDLM):
    """T-step masked diffusion whose network may predict the mask and is asked to reconstruct visible tokens.

    With both switches (carry_over and zero_masking) on, it is MDLM in T steps, term by term. auxiliary: lambda, the
    weight of the cross-entropy of x_theta against x at masked positions in training; not part of the bound.

    >>> D3PM(steps=100, auxiliary=0.01).auxiliary
    0.01
    """

    steps: int | None = 1000
    carry_over: bool = False
    zero_masking: bool = False
    auxiliary: float = 0.0

    def __post_init__(self) -> None:
        if self.steps is None:
            raise UsageError("d3pm is a T-step objective: give steps, or use mdlm for continuous time")
        super().__post_init__()
        check_auxiliary(self.auxiliary)

    def training_weight(self, weight_B: Tensor) -> Tensor:
        return weight_B + self.auxiliary

    def _trained_positions(self, denoiser: Network, batch: Batch, noised: Noised) -> tuple[Tensor, Term]:
        h_ND, term = super()._trained_positions(denoiser, batch, noised)
        if not self.auxiliary:
            return h_ND, term
        x_N = put(batch.x_BL[noised.masked_BL], h_ND.device)
        return h_ND, with_auxiliary(term, x_N, self.auxiliary, denoiser.mask_id, self.zero_masking)


def check_auxiliary(auxiliary: float) -> None:
    """Refuse an invalid lambda.

    >>> check_auxiliary(-1.0)
    Traceback (most recent call last):
    unmask.errors.UsageError: auxiliary is lambda, what the auxiliary loss counts: give 0 (off) or more, got -1.0
    """
    if not (math.isfinite(auxiliary) and auxiliary >= 0):
        raise UsageError(f"auxiliary is lambda, what the auxiliary loss counts: give 0 (off) or more, got {auxiliary}")
