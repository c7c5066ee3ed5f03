"""A planned or adaptive sampler whose every draw obeys the canvas's constraint.

The order of opening and the number of calls are the inner sampler's. Only, each call asks about all masks of the spans
in which something opens: whether a token leads to an accepted text depends on what the others can still become.
An adaptive order asks about all masks anyway; its scores are the model's own, unconditioned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.canvas import Canvas
from unmask.constraints._automaton import Automaton
from unmask.constraints._conditioning import Spans, Tables, draw, possible
from unmask.errors import UsageError
from unmask.predictor import Query
from unmask.samplers import Sampler, Step
from unmask.samplers._adaptive import AdaptiveSampler
from unmask.samplers._planned import PlannedSampler
from unmask.samplers.semi_ar import SemiAR


@dataclass
class ConstrainedState:
    """row_G, lo_G, hi_G: the spans that the automaton reads. span_BL: the span of each position, -1 for none."""

    inner: Any
    tables: Tables
    never: Tensor
    row_G: np.ndarray
    lo_G: np.ndarray
    hi_G: np.ndarray
    span_BL: np.ndarray
    masked_BL: np.ndarray
    asked: Spans | None = None


@dataclass(frozen=True, kw_only=True)
class Constrained(Sampler):
    """Each step is exactly the inner sampler's, conditioned on the constraint."""

    inner: PlannedSampler | AdaptiveSampler

    def max_calls(self, length: int) -> int:
        return self.inner.max_calls(length)

    def start(self, canvas: Canvas) -> ConstrainedState:
        automaton = canvas.constraint
        assert automaton is not None
        if len(automaton.class_I) <= int(canvas.tokens.max()):
            raise UsageError("the constraint was made for another vocabulary: make it with the model's own tokenizer")
        # float64 sums are not for every device; where there are none the few numbers are moved
        device = torch.device("cpu") if canvas.tokens.device.type == "mps" else canvas.tokens.device
        masked_BL = canvas.open_BL.cpu().numpy()
        row_G, lo_G, hi_G = spans_of(canvas, automaton.over)
        span_BL = np.full(masked_BL.shape, -1)
        for g, (row, lo, hi) in enumerate(zip(row_G, lo_G, hi_G, strict=True)):
            span_BL[row, lo:hi] = g
        never = torch.tensor([canvas.mask_id, *canvas.forbidden], device=device)
        state = ConstrainedState(
            self.inner.start(replace(canvas, end_id=None)),
            Tables.of(automaton, device),
            never,
            row_G,
            lo_G,
            hi_G,
            span_BL,
            masked_BL,
        )
        self._check(state, canvas, automaton)
        return state

    def ask(self, state: ConstrainedState) -> Query | None:
        query = self.inner.ask(state.inner)
        if query is None or isinstance(self.inner, AdaptiveSampler):
            return query
        opens_BL = np.zeros_like(state.masked_BL)
        opens_BL[state.inner.opens(state.inner.round)] = True
        wanted_BL = self._open(state, opens_BL)
        rows = np.flatnonzero(opens_BL.any(axis=1))
        count_R = wanted_BL[rows].sum(axis=1)
        wanted_RK = np.arange(count_R.max()) < count_R[:, None]
        at_RK = np.zeros(wanted_RK.shape, dtype=np.int64)
        at_RK[wanted_RK] = wanted_BL[rows].nonzero()[1]
        device = query.tokens_BL.device
        return replace(
            query,
            at_RK=torch.from_numpy(at_RK).to(device),
            wanted_RK=torch.from_numpy(wanted_RK).to(device),
            reach=int(at_RK.max()) + 1,
        )

    def tell(self, state: ConstrainedState, prediction: Tensor) -> Step:
        if prediction.shape[1] != len(state.tables.class_I):
            raise UsageError("the constraint was made for another vocabulary: make it with the model's own tokenizer")
        if isinstance(self.inner, PlannedSampler):
            return self.inner.write(state.inner, *self._draw(state, prediction))
        opens_N = self.inner.decide(state.inner, prediction)
        masked_BL = state.masked_BL
        opens_BL = np.zeros_like(masked_BL)
        opens_BL[masked_BL] = opens_N.cpu().numpy()
        asked_N = self._open(state, opens_BL)[masked_BL]
        drawn = self._draw(state, prediction[torch.from_numpy(asked_N).to(prediction.device)])
        return self.inner.write(state.inner, opens_N, *drawn)

    def _open(self, state: ConstrainedState, opens_BL: np.ndarray) -> np.ndarray:
        """[B, L] what must be known to open this: all masks of the spans in which something opens."""
        spans = np.unique(state.span_BL[opens_BL])
        wanted_BL = state.masked_BL & np.isin(state.span_BL, spans)
        state.asked = _read_spans(state, spans, wanted_BL, opens_BL)
        state.masked_BL = state.masked_BL & ~opens_BL
        return wanted_BL

    def _draw(self, state: ConstrainedState, log_p_NI: Tensor) -> tuple[Tensor, Tensor]:
        assert state.asked is not None
        token_N, log_prob_N = draw(state.tables, log_p_NI.to(state.never.device), state.asked, self.inner, state.never)
        device = state.inner.tokens_BL.device
        return token_N.to(device), log_prob_N.to(device, log_p_NI.dtype)

    def _check(self, state: ConstrainedState, canvas: Canvas, automaton: Automaton) -> None:
        """Refuse, before the network is called, what no writing of the masks can meet."""
        if not len(state.row_G):
            return  # nothing is to be written
        everything = _read_spans(state, np.arange(len(state.row_G)), state.masked_BL, state.masked_BL)
        bad = (~possible(state.tables, everything, state.never)).nonzero().flatten().tolist()
        if not bad:
            return
        row, lo, hi = state.row_G[bad[0]], state.lo_G[bad[0]], state.hi_G[bad[0]]
        what = "a gap" if automaton.over == "gap" else "a text"
        where = f"{what} of {hi - lo} token{'s' if hi - lo > 1 else ''}"
        where += f" (row {row})" if len(canvas.tokens) > 1 else ""
        if not state.masked_BL[row, lo:hi].all():
            raise UsageError(f"the constraint cannot hold in {where} with what is fixed in it: change one of them")
        least = automaton.shortest(state.never.tolist())
        if least is None or least <= hi - lo:
            raise UsageError(f"the constraint cannot hold in {where}: nothing of just that length obeys it")
        raise UsageError(f"the constraint cannot hold in {where}: it needs at least {least}")


def constrained(sampler: Sampler) -> Sampler:
    """The same sampler, bound to the canvas's constraint; those that cannot hold one are refused."""
    if isinstance(sampler, PlannedSampler | AdaptiveSampler):
        if sampler.draw == "hybrid" or sampler.temperature_end is not None:
            raise UsageError("a constrained draw has one temperature: leave out temperature_end and draw=hybrid")
        return Constrained(inner=replace(sampler, temperature=0.0) if sampler.takes_likeliest else sampler)
    if isinstance(sampler, SemiAR):
        raise UsageError("a constraint is held within one window: ask for no more tokens than the model's window")
    raise UsageError(
        f"the sampler {type(sampler).__name__} cannot hold a constraint: use ancestral, left_to_right or confidence"
    )


def spans_of(canvas: Canvas, over: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, first positions and ends of what is constrained, in order: every run of masks, or every row's text."""
    open_BL = canvas.open_BL.cpu().numpy()
    if over == "text":
        rows = np.flatnonzero(open_BL.any(axis=1))
        length = open_BL.shape[1]
        ends = np.full(len(open_BL), length) if canvas.valid_BL is None else canvas.valid_BL.sum(1).cpu().numpy()
        return rows, np.zeros_like(rows), ends[rows]
    edge_BL = np.diff(open_BL.astype(np.int8), axis=1, prepend=0, append=0)
    rows, lo = np.nonzero(edge_BL == 1)
    return rows, lo, np.nonzero(edge_BL == -1)[1]


def _read_spans(state: ConstrainedState, spans: np.ndarray, masked_BL: np.ndarray, opens_BL: np.ndarray) -> Spans:
    """The chosen spans side by side; their masked positions are answered line by line in this order."""
    canvas, device = state.inner.canvas, state.never.device
    row_G, lo_G, hi_G = state.row_G[spans], state.lo_G[spans], state.hi_G[spans]
    length_G = hi_G - lo_G
    column_GM = lo_G[:, None] + np.arange(length_G.max(initial=0))
    inside_GM = column_GM < hi_G[:, None]
    at = row_G[:, None], column_GM.clip(max=masked_BL.shape[1] - 1)
    masked_GM = masked_BL[at] & inside_GM
    line_GM = np.where(masked_GM, np.cumsum(masked_GM).reshape(masked_GM.shape) - 1, -1)

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    row, column = tensor(row_G), tensor(at[1])
    return Spans(
        token_GM=state.inner.tokens_BL.to(device)[row[:, None], column],
        line_GM=tensor(line_GM),
        opens_GM=tensor(opens_BL[at] & inside_GM),
        length_G=tensor(length_G),
        key_G=canvas.key_B.to(device)[row],
        counter_GM=column + canvas.offset,
    )
