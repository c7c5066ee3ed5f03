"""A wrapper around any sampler that makes every draw obey the canvas's constraint.

The order of opening and the number of calls are the inner sampler's: it asks, selects and writes. Only the draw is
replaced, and each query covers all masks of the spans in which something may open, since whether a token leads to an
accepted text depends on what the other masks can become. The scores of an adaptive order are the model's own,
unconditioned ones.

The distribution: given which positions a step opens, their tokens are drawn from the model's factorised prediction
conditioned on the automaton accepting the text, with the positions that stay masked summed out. Each step is
conditioned separately, so the choice of the positions is not affected by the automaton. If a step also remasks tokens,
they are taken as they were before the step; remasking never makes an accepted completion impossible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.constraints.automaton import Automaton
from unmask.constraints.conditioning import Spans, draw, possible
from unmask.constraints.tables import Tables, tables_of
from unmask.data.batch import DRAW_REMASK
from unmask.errors import Public, UsageError
from unmask.rng import fold
from unmask.samplers import Sampler, Step, Wrapper
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query
from unmask.sampling.query import lines_of


@dataclass
class ConstrainedState:
    """row_G: the row of each span that the automaton reads. column_GM: the columns of its tokens, with OPENS and CLOSES
    around each gap if the automaton reads gaps, and NONE after the span's end. span_BL: the span of each position, -1
    for none. masked_BL: the masked positions at the time of the query. wanted_BL: the queried positions; row_N,
    position_N: those of them that the inner sampler queried, in its order."""

    inner: Any
    tables: Tables
    never: Tensor
    row_G: np.ndarray
    column_GM: np.ndarray
    span_BL: np.ndarray
    masked_BL: np.ndarray
    wanted_BL: np.ndarray
    row_N: np.ndarray
    position_N: np.ndarray

    @property
    def canvas(self) -> Canvas:
        canvas: Canvas = self.inner.canvas
        return canvas

    @property
    def tokens_BL(self) -> Tensor:
        tokens_BL: Tensor = self.inner.tokens_BL
        return tokens_BL


NONE, OPENS, CLOSES = -1, -2, -3


class Impossible(UsageError):
    """Raised if the masks of some spans cannot be filled so that the constraint holds."""

    def __init__(self, where: str, spans: int) -> None:
        super().__init__("the constraint cannot hold in {where}", where=Public(where))
        self.spans = spans


@dataclass(frozen=True, kw_only=True)
class Constrained(Wrapper):
    """Each step is exactly the inner sampler's, conditioned on the constraint."""

    inner: Sampler

    def max_calls(self, length: int) -> int:
        return self.inner.max_calls(length)

    def start(self, canvas: Canvas) -> ConstrainedState:
        automaton = canvas.constraint
        assert automaton is not None
        if self.inner.context is not None and self.inner.context < canvas.tokens.shape[1]:
            raise UsageError("a constraint is held within one window: ask for no more tokens than fit one")
        if automaton.num_words <= int(canvas.tokens.max()):
            raise UsageError("the constraint was made for another vocabulary: make it with the model's own tokenizer")
        # Some devices have no float64; the few numbers are moved to the CPU then.
        device = torch.device("cpu") if canvas.tokens.device.type == "mps" else canvas.tokens.device
        masked_BL = canvas.masked_BL.cpu().numpy()
        row_G, column_GM = spans_of(canvas, automaton.over)
        span_BL = np.full(masked_BL.shape, -1)
        g, m = np.nonzero(column_GM >= 0)
        span_BL[row_G[g], column_GM[g, m]] = g
        never = torch.tensor([canvas.mask_id, *canvas.forbidden], device=device)
        state = ConstrainedState(
            self.inner.start(replace(canvas, end_id=None)),
            tables_of(automaton, device),
            never,
            row_G,
            column_GM,
            span_BL,
            masked_BL,
            masked_BL,
            np.empty(0, dtype=np.int64),
            np.empty(0, dtype=np.int64),
        )
        self._check(state, canvas, automaton)
        return state

    def ask(self, state: ConstrainedState) -> Query | None:
        query = self.inner.ask(state.inner)
        if query is None:
            return None
        row_N, position_N = (x.cpu().numpy() for x in lines_of(query))
        state.row_N, state.position_N = row_N, position_N + query.lo
        state.masked_BL = (query.tokens_BL == state.canvas.mask_id).cpu().numpy()
        asked_BL = self._marked(state, slice(None))
        state.wanted_BL = asked_BL | self._together(state, asked_BL)
        rows = np.arange(len(asked_BL)) if query.rows_R is None else query.rows_R.cpu().numpy()
        count_R = state.wanted_BL[rows].sum(axis=1)
        wanted_RK = np.arange(count_R.max()) < count_R[:, None]
        at_RK = np.zeros(wanted_RK.shape, dtype=np.int64)
        at_RK[wanted_RK] = state.wanted_BL[rows].nonzero()[1]
        device = query.tokens_BL.device
        return replace(
            query,
            at_RK=torch.from_numpy(at_RK).to(device),
            wanted_RK=torch.from_numpy(wanted_RK).to(device),
            reach=int(at_RK.max()) + 1,
        )

    def select(self, state: ConstrainedState, prediction: Tensor) -> Tensor:
        if prediction.shape[1] != len(state.tables.word_I):
            raise UsageError("the constraint was made for another vocabulary: make it with the model's own tokenizer")
        line_BL = np.full(state.wanted_BL.shape, -1)
        line_BL[state.wanted_BL] = np.arange(len(prediction))
        line_N = line_BL[state.row_N, state.position_N]
        same = len(line_N) == len(prediction) and bool((np.diff(line_N) == 1).all())
        # If all lines are selected they are not copied, since they are large.
        lines = prediction if same else prediction[torch.from_numpy(line_N).to(prediction.device)]
        return self.inner.select(state.inner, lines)

    def draw_opened(self, state: ConstrainedState, prediction: Tensor, opens_N: Tensor) -> tuple[Tensor, Tensor]:
        chosen_N = opens_N.cpu().numpy()
        opens_BL = self._marked(state, chosen_N)
        if not opens_BL.any():
            return torch.empty(0, dtype=torch.long, device=prediction.device), prediction[:0, 0]
        together_BL = self._together(state, opens_BL)
        spans = self._read_opening(state, together_BL, opens_BL)
        log_p_NI = _lines(prediction, together_BL[state.wanted_BL])
        how = self.inner.drawing
        how = replace(how, temperature=0.0) if how.takes_likeliest else how
        token_N, log_prob_N = draw(state.tables, log_p_NI.to(state.never.device), spans, how, state.never)
        # Tokens are drawn from left to right in each row, but returned in the order of the inner sampler's query.
        place_BL = np.full(opens_BL.shape, -1)
        place_BL[opens_BL] = np.arange(len(token_N))
        order_N = torch.from_numpy(place_BL[state.row_N[chosen_N], state.position_N[chosen_N]]).to(token_N.device)
        device = state.tokens_BL.device
        return token_N[order_N].to(device), log_prob_N[order_N].to(device, log_p_NI.dtype)

    def write(self, state: ConstrainedState, opens_N: Tensor, token_N: Tensor, log_prob_N: Tensor) -> Step:
        return self.inner.write(state.inner, opens_N, token_N, log_prob_N)

    def _read_opening(self, state: ConstrainedState, together_BL: np.ndarray, opens_BL: np.ndarray) -> Spans:
        spans = _read_spans(state, np.unique(state.span_BL[opens_BL]), together_BL, opens_BL)
        visit = self.inner.visit(state.inner)
        return spans if visit is None else replace(spans, key_G=fold(spans.key_G, DRAW_REMASK, visit))

    @staticmethod
    def _marked(state: ConstrainedState, chosen_N: Any) -> np.ndarray:
        """[B, L] the positions of the chosen lines of the inner sampler's query."""
        marked_BL = np.zeros_like(state.wanted_BL)
        marked_BL[state.row_N[chosen_N], state.position_N[chosen_N]] = True
        return marked_BL

    def _together(self, state: ConstrainedState, opens_BL: np.ndarray) -> np.ndarray:
        """[B, L] the positions whose predictions are needed: all masks of the spans in which something opens."""
        together_BL: np.ndarray = state.masked_BL & np.isin(state.span_BL, np.unique(state.span_BL[opens_BL]))
        return together_BL

    def _check(self, state: ConstrainedState, canvas: Canvas, automaton: Automaton) -> None:
        """Refuse a constraint that cannot be met, before the network is called."""
        if not len(state.row_G):
            return  # no mask to fill
        everything = _read_spans(state, np.arange(len(state.row_G)), state.masked_BL, state.masked_BL)
        impossible = (~possible(state.tables, everything, state.never)).nonzero().flatten().tolist()
        if not impossible:
            return
        row, column_M = state.row_G[impossible[0]], state.column_GM[impossible[0]]
        column_M = column_M[column_M >= 0]
        num = len(column_M)
        what = "a gap" if automaton.over == "gap" else "a text"
        where = f"{what} of {num} token{'s' if num > 1 else ''}"
        where += f" (row {row})" if len(canvas.tokens) > 1 else ""
        if automaton.over == "both" or not state.masked_BL[row, column_M].all():
            raise Impossible(f"{where} with what is fixed in it: change one of them", len(impossible))
        least = automaton.shortest(state.never.tolist())
        if least is None or least <= num:
            raise Impossible(f"{where}: nothing of just that length obeys it", len(impossible))
        raise Impossible(f"{where}: it needs at least {least}", len(impossible))


def constrained(sampler: Sampler) -> Sampler:
    """The sampler wrapped so that it obeys the canvas's constraint; samplers that cannot do so are refused."""
    if not sampler.constrainable:
        raise UsageError(
            "the sampler {sampler} cannot hold a constraint, since it writes over its own tokens or draws by another "
            "law: use one that opens masks, such as ancestral, left_to_right, confidence or block, with a model of "
            "absorbing states",
            sampler=Public(type(sampler).__name__),
        )
    drawing = sampler.drawing
    if drawing.draw == "hybrid" or drawing.temperature_end is not None:
        raise UsageError("a constrained draw has one temperature: leave out temperature_end and draw=hybrid")
    return Constrained(inner=sampler)


def takes_likeliest(sampler: Sampler) -> bool:
    """Whether the sampler takes the likeliest accepted text instead of drawing one.

    >>> from unmask.samplers.ancestral import Ancestral
    >>> takes_likeliest(Ancestral(temperature=0.0)), takes_likeliest(Ancestral())
    (True, False)
    """
    return sampler.constrainable and sampler.drawing.takes_likeliest


def _lines(log_p_NI: Tensor, chosen_N: np.ndarray) -> Tensor:
    """The chosen lines; without a copy if all are chosen, since they are large."""
    return log_p_NI if chosen_N.all() else log_p_NI[torch.from_numpy(chosen_N).to(log_p_NI.device)]


def spans_of(canvas: Canvas, over: str) -> tuple[np.ndarray, np.ndarray]:
    """The constrained spans in order, as rows and columns: every run of masks, or every row's text.

    With over="both", the text with OPENS before and CLOSES after each run of masks.
    """
    open_BL = canvas.masked_BL.cpu().numpy()
    edge_BL = np.diff(open_BL.astype(np.int8), axis=1, prepend=0, append=0)
    row_G, lo_G = np.nonzero(edge_BL == 1)
    hi_G = np.nonzero(edge_BL == -1)[1]
    if over == "gap":
        return row_G, _columns(lo_G, hi_G)
    rows, first = np.unique(row_G, return_index=True)
    begin, end = canvas.frame
    column_GM = _columns(np.full_like(rows, begin), canvas.length_B.cpu().numpy()[rows] - end)
    if over == "text":
        return rows, column_GM
    gaps = zip(np.split(lo_G - begin, first[1:]), np.split(hi_G - begin, first[1:]), strict=True)
    marked = [_with_gaps(column_M[column_M != NONE], *gap) for column_M, gap in zip(column_GM, gaps, strict=True)]
    column_GM = np.full((len(marked), max(map(len, marked), default=0)), NONE)
    for column_M, columns in zip(column_GM, marked, strict=True):
        column_M[: len(columns)] = columns
    return rows, column_GM


def _columns(lo_G: np.ndarray, hi_G: np.ndarray) -> np.ndarray:
    column_GM = lo_G[:, None] + np.arange((hi_G - lo_G).max(initial=0))
    return np.where(column_GM < hi_G[:, None], column_GM, NONE)


def _with_gaps(column: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """The columns with markers around the gaps lo..hi.

    >>> _with_gaps(np.arange(3), np.array([1]), np.array([2])).tolist()
    [0, -2, 1, -3, 2]
    """
    marks = np.repeat([[OPENS, CLOSES]], len(lo), axis=0).reshape(-1)
    return np.insert(column, np.column_stack([lo, hi]).reshape(-1), marks)


def _read_spans(state: ConstrainedState, spans: np.ndarray, masked_BL: np.ndarray, opens_BL: np.ndarray) -> Spans:
    """The chosen spans as `Spans`; the lines of the prediction are their masked positions in this order."""
    canvas, device = state.canvas, state.never.device
    row_G, column_GM = state.row_G[spans], state.column_GM[spans]
    length_G = (column_GM != NONE).sum(axis=1)
    column_GM = column_GM[:, : length_G.max(initial=0)]
    real_GM = column_GM >= 0
    at = row_G[:, None], column_GM.clip(min=0)
    masked_GM = masked_BL[at] & real_GM
    line_GM = np.where(masked_GM, np.cumsum(masked_GM).reshape(masked_GM.shape) - 1, -1)

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    row, column = tensor(row_G), tensor(at[1])
    token_GM = state.tokens_BL.to(device)[row[:, None], column]
    last = len(state.tables.class_I) - 1
    for mark, id in ((OPENS, last - 1), (CLOSES, last)):
        token_GM = token_GM.masked_fill(tensor(column_GM == mark), id)
    return Spans(
        token_GM=token_GM,
        line_GM=tensor(line_GM),
        opens_GM=tensor(opens_BL[at] & real_GM),
        length_G=tensor(length_G),
        key_G=canvas.key_B.to(device)[row],
        counter_GM=column + canvas.offset,
    )
