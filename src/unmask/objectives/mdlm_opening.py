"""Masked diffusion from autoregressive weights: causal attention gradually opens to both sides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.data.batch import DRAW_OPENING, Batch
from unmask.denoisers.network import Attend
from unmask.errors import UsageError
from unmask.objectives.mdlm_warm import MDLMWarm
from unmask.rng import uniform


@dataclass(frozen=True, kw_only=True)
class MDLMOpening(MDLMWarm):
    """MDLM, where in training a token is seen by the positions before it with a probability that rises from 0 at the
    beginning of the run to 1 at `opened` of it: weights that read from left to right find at first what they know.

    It is the annealing of DiffuLLaMA (arXiv 2410.17891), drawn for each token of a row rather than for each pair. As in
    mdlm_warm (share, flat, until, until_epoch), some rows may be trained for the next token; by default none are. What
    is measured is MDLM's bound, with both sides seen throughout.
    """

    share: float = 0.0
    opened: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.opened <= 1:
            raise UsageError(f"opened is a share of the run, in [0, 1], got {self.opened}")

    def open_at(self, done: float) -> float:
        """The probability with which a later token is seen.

        >>> [MDLMOpening(opened=0.5).open_at(done) for done in (0.0, 0.25, 0.5, 1.0)]
        [0.0, 0.5, 1.0, 1.0]
        """
        return 1.0 if done >= self.opened else done / self.opened

    def attend(self, batch: Batch) -> Attend:
        seen = self.open_at(batch.done)
        if seen == 1:
            return Attend(batch.valid_BL)
        if seen == 0:
            return Attend(batch.valid_BL, causal=True)
        return Attend(batch.valid_BL, mask=self._seen(batch, seen))

    def _seen(self, batch: Batch, seen: float) -> Tensor:
        """[B, L, L] the visible positions: all earlier ones, and the later ones that were drawn as visible."""
        L = batch.x_BL.shape[1]
        position_L = torch.arange(L, device=batch.x_BL.device)
        open_BL = uniform(batch.key_B[:, None], DRAW_OPENING, position_L) < seen
        return open_BL[:, None, :] | (position_L[None, :] <= position_L[:, None])
