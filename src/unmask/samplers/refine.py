"""Generate a text with another sampler, or take a finished one, and regenerate its least confident tokens in rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from unmask.data.batch import DRAW_REMASK
from unmask.errors import UsageError
from unmask.registry import check_fields
from unmask.rng import fold
from unmask.samplers import Sampler, State, Step, Wrapper
from unmask.samplers.adaptive import places
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.base import Accepts
from unmask.samplers.remasking import check_steps
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query
from unmask.sampling.query import ask_about, masked_share


@dataclass(kw_only=True)
class RefineState(State):
    """writable_BL: the positions that may be rewritten. inner: the inner sampler's state while it writes, else None.

    sure_BL: log-probability of each token given the rest, as far as this round has computed it; hidden_BL: the
    positions that are masked to compute it.
    """

    writable_BL: Tensor
    inner: Any
    part: int = 0
    sure_BL: Tensor | None = None
    hidden_BL: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Refine(Wrapper):
    """Order: that of `inner`, then its least sure `share` again, `rounds` times. Calls: (1 + rounds) × inner's + looks.

    A token's probability is computed while it is masked: each round makes `parts` calls, each of which masks every
    parts-th token. Fixed tokens are kept, except where the canvas's `draft_BL` allows its text to be rewritten.
    Rows do not leave at their end-of-text, since a round may remove it. No law is claimed.
    """

    law: ClassVar[str] = "no law claimed; rounds=0: that of the inner sampler"
    cost: ClassVar[str] = "(1 + rounds) x the inner sampler's calls + rounds x parts"
    final = False
    constrainable = False

    inner: Sampler = Ancestral()
    rounds: int = 2
    share: float = 0.1
    parts: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        check_steps(self.rounds, "rounds", 0)
        check_steps(self.parts, "parts")
        if not 0 < self.share <= 1:
            raise UsageError(
                "share is how much of the text each round writes anew, in (0, 1]; got {share}", share=self.share
            )

    @property
    def accepts(self) -> Accepts:  # type: ignore[override]
        """What the inner sampler accepts, restricted to predictions that give the probability of a token."""
        return tuple(pair for pair in self.inner.accepts if pair == ("absorbing", "x0"))

    def max_calls(self, length: int) -> int:
        inner = self.inner.max_calls(length)
        return inner + self.rounds * (min(self.parts, length) + inner)

    def start(self, canvas: Canvas) -> RefineState:
        writable_BL = canvas.masked_BL if canvas.draft_BL is None else canvas.masked_BL | canvas.draft_BL
        canvas = replace(canvas, end_id=None, draft_BL=None)
        return RefineState(canvas, canvas.tokens.clone(), writable_BL=writable_BL, inner=self.inner.start(canvas))

    def ask(self, state: RefineState) -> Query | None:
        state.query = self._next(state)
        return state.query

    def _next(self, state: RefineState) -> Query | None:
        while True:
            if state.inner is not None:
                if (query := self.inner.ask(state.inner)) is not None:
                    return query
                state.inner, state.part = None, 0
                state.sure_BL = torch.zeros(state.tokens_BL.shape, device=state.tokens_BL.device)
                state.round += 1
            if state.round > self.rounds:
                return None
            if (query := self._look(state)) is not None:
                return query
            self._mask_least_sure(state)

    def _look(self, state: RefineState) -> Query | None:
        """The query of the round's next part; None when all parts are done."""
        canvas, column_L = state.canvas, torch.arange(state.tokens_BL.shape[1], device=state.tokens_BL.device)
        while state.part < min(self.parts, len(column_L)):
            state.hidden_BL = state.writable_BL & (column_L % self.parts == state.part)
            tokens_BL = state.tokens_BL.masked_fill(state.hidden_BL, canvas.mask_id)
            state.part += 1
            query = ask_about(canvas, tokens_BL, state.hidden_BL, masked_share(canvas, tokens_BL))
            if query is not None:
                return query
        return None

    def _mask_least_sure(self, state: RefineState) -> None:
        assert state.sure_BL is not None
        doubt_BL = (-state.sure_BL).masked_fill(~state.writable_BL, -torch.inf)
        # Subtract a little before rounding up: a tenth of thirty must be three, also in float32.
        num_B1 = (state.writable_BL.sum(dim=1, keepdim=True) * self.share - 1e-4).ceil().clamp(min=1)
        again_BL = state.writable_BL & (places(doubt_BL) < num_B1)
        state.tokens_BL = state.tokens_BL.masked_fill(again_BL, state.canvas.mask_id)
        # New keys, so that a position that is written again gets new random numbers.
        key_B = fold(state.canvas.key_B, DRAW_REMASK, state.round)
        state.inner = self.inner.start(
            replace(state.canvas, tokens=state.tokens_BL, open_BL=state.tokens_BL == state.canvas.mask_id, key_B=key_B)
        )

    def visit(self, state: RefineState) -> int | None:
        return None if state.inner is None else self.inner.visit(state.inner)

    def select(self, state: RefineState, prediction: Tensor) -> Tensor:
        if state.inner is not None:
            return self.inner.select(state.inner, prediction)
        assert state.hidden_BL is not None
        assert state.sure_BL is not None
        row_N, position_N = state.hidden_BL.nonzero(as_tuple=True)
        sure_N = prediction.gather(1, state.tokens_BL[row_N, position_N][:, None]).squeeze(1)
        state.sure_BL = state.sure_BL.to(sure_N.dtype).index_put((row_N, position_N), sure_N)
        return torch.zeros(len(prediction), dtype=torch.bool, device=prediction.device)  # these queries open nothing

    def draw_opened(self, state: RefineState, prediction: Tensor, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        if state.inner is not None:
            return self.inner.draw_opened(state.inner, prediction, opens_N)
        return torch.empty(0, dtype=torch.long, device=prediction.device), prediction[:0, 0]

    def write(self, state: RefineState, opens_N: Tensor, token_N: Tensor, log_prob_N: Tensor) -> Step:
        if state.inner is not None:
            step = self.inner.write(state.inner, opens_N, token_N, log_prob_N)
            state.tokens_BL = step.tokens_BL
            return step
        return Step(token_N, token_N, token_N, log_prob_N, state.tokens_BL)
