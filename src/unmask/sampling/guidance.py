"""Classifier-free guidance: a finished model that follows its prompt or label more closely."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.errors import Public, UsageError
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Gives, Predictor, Query
from unmask.sampling.query import masked_share


@dataclass(frozen=True)
class Guidance:
    """The strength of guidance: p ∝ p(x | c)^(1 + weight) p(x)^(-weight).

    condition_BL: the positions of the condition; None: all that are fixed. A row's label is always part of it.
    weight 0 changes nothing, -1 ignores it.
    """

    weight: float
    condition_BL: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, int | float) or not math.isfinite(self.weight):
            raise UsageError("the guidance weight must be a number, got {weight!r}", weight=self.weight)


class Guided:
    """A predictor that calls the network with and without the condition, and extrapolates towards the former.

    It acts on x_theta, renormalised over the tokens, so it does not affect which positions open.
    """

    left_to_right = False
    gives: Gives

    def __init__(self, predictor: Predictor, canvas: Canvas, guidance: Guidance) -> None:
        if predictor.gives not in ("x0", "x0_by_rates") or predictor.left_to_right:
            raise UsageError("guidance needs a diffusion model that predicts clean tokens alone: leave it out")
        condition_BL = canvas.given_BL if guidance.condition_BL is None else guidance.condition_BL
        if canvas.valid_BL is not None:
            condition_BL = condition_BL & canvas.valid_BL
        hides = bool(condition_BL.any())
        labelled = canvas.label_B is not None and bool((canvas.label_B >= 0).any())
        maskless = predictor.process is not None and predictor.process.name != "absorbing"
        if hides and maskless and labelled:  # a prompt cannot be hidden here, so only the label guides
            hides = False
        if hides and maskless and predictor.process is not None:
            raise UsageError(
                "guidance hides the prompt by masks, which a {process} process does not know: guide by a label, or "
                "leave guidance out",
                process=Public(predictor.process.name),
            )
        if not hides and not labelled:
            raise UsageError("guidance needs a condition: give a prompt or a label, or leave guidance out")
        self.process, self.gives = predictor.process, predictor.gives
        self.predictor, self.weight = predictor, guidance.weight
        self.canvas, self.mask_id = canvas, canvas.mask_id
        self.condition_BL = condition_BL if hides else None  # None: the label alone

    def __call__(self, query: Query) -> Tensor:
        without = self._without(query)
        full, free = self.predictor(query), self.predictor(without)
        mixed = (1 + self.weight) * full - self.weight * free
        # Tokens that are impossible in either prediction stay impossible; -inf - -inf would be NaN.
        mixed = mixed.masked_fill((full == -torch.inf) | (free == -torch.inf), -torch.inf)
        return torch.log_softmax(mixed, dim=-1)

    def _without(self, query: Query) -> Query:
        """The same query without its condition. A conditioned network gets a higher level, since more is masked."""
        query = dataclasses.replace(query, label_B=None)
        if self.condition_BL is None:
            return query
        if query.tokens_BL.shape != self.condition_BL.shape:
            raise UsageError("guidance works within one window: ask for no more tokens than the model's window")
        tokens_BL = query.tokens_BL.masked_fill(self.condition_BL, self.mask_id)
        # The sampler's clock does not apply to a canvas with more masks, so the level is computed from the masks.
        share_B = masked_share(self.canvas, tokens_BL).to(query.level_R)
        less_B = self.condition_BL.any(dim=1)
        if query.rows_R is not None:
            share_B, less_B = share_B[query.rows_R], less_B[query.rows_R]
        return dataclasses.replace(query, tokens_BL=tokens_BL, level_R=torch.where(less_B, share_B, query.level_R))
