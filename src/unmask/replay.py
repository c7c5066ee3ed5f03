"""Planned sampling on a GPU with the host out of the loop.

A planned sampler knows before the first network call which positions open in which round. So the whole plan goes to the
device, one round (network, draw, writing the tokens) is captured as a CUDA graph that reads its line of the plan by a
counter on the device, and the loop is that graph, replayed. Nothing is copied or waited for in between. The law is the
sampler's own: the same plan, the same uniforms, the same order of tokens in the inverse CDF.

Rows that are done leave: rows stand in the order of their number of rounds, and a graph for fewer rows takes over.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from unmask import kernels
from unmask.batch import DRAW_TOKEN
from unmask.canvas import Canvas
from unmask.denoisers._network import KVCache, Network
from unmask.devices import fast_attention, put
from unmask.draws import uniform
from unmask.objectives._loss import ALIGN
from unmask.predictor import NextToken, Predictor, XTheta
from unmask.samplers import Sampler, Step
from unmask.samplers._planned import PlannedSampler, PlannedState

MIN_ROUNDS = 16  # a graph for fewer rows must serve this many rounds to be worth its capture
MAX_GRAPHS = 16  # kept for each network; the least recently used goes first
AT_ONCE = 8  # rounds in one launch, where nobody looks in between
STOP_STEP = 128  # an autoregressive cache is read up to the next multiple of this


def can_replay(predictor: Predictor, sampler: Sampler, canvas: Canvas) -> bool:
    """A planned sampler, a network whose calls can be captured, and a GPU."""
    if not (isinstance(sampler, PlannedSampler) and canvas.tokens.is_cuda):
        return False
    if sampler.temperature_end is not None:  # a graph draws at one temperature
        return False
    if isinstance(predictor, NextToken):
        with torch.no_grad():
            return predictor.denoiser.can_decode()
    return isinstance(predictor, XTheta) and predictor.denoiser.capturable


def replay(
    predictor: Predictor, sampler: PlannedSampler, state: PlannedState, *, quiet: bool = False
) -> Iterator[Step]:
    """The steps of the sampler; quiet: only the last one, and the host does nothing in between."""
    denoiser = cast(XTheta | NextToken, predictor).denoiser
    with torch.no_grad(), fast_attention():
        if isinstance(predictor, NextToken):
            yield from _decode(denoiser, sampler, state, quiet)
        else:
            yield from _denoise(denoiser, sampler, state, quiet)


# --- diffusion --------------------------------------------------------------------------------------------------------


def _denoise(denoiser: Network, sampler: PlannedSampler, state: PlannedState, quiet: bool) -> Iterator[Step]:
    canvas, device = state.canvas, state.tokens_BL.device
    L = state.tokens_BL.shape[1]
    plan = DevicePlan.of(state)
    graphs = graphs_of(denoiser)
    head = graphs.head(denoiser, device)
    head.refresh(denoiser, canvas, sampler)
    denoiser.before_replay()
    slots_B = put(torch.from_numpy(plan.row_of_slot), device)
    back_B = put(torch.from_numpy(np.argsort(plan.row_of_slot)), device)
    tokens_BL = state.tokens_BL[slots_B]
    position_L = torch.arange(L, device=device) + canvas.offset
    u_BL = uniform(canvas.key_B[slots_B][:, None], DRAW_TOKEN, position_L)
    valid_BL = None if canvas.valid_BL is None else canvas.valid_BL[slots_B]
    for lo, hi, rows in plan.segments:
        at, source, target, level = plan.lines(state, lo, hi, rows)
        # So many lines as there are rounds, not as there could be: with few rounds, many positions are asked about.
        shape = (rows, L, _bucket(len(at)), at.shape[2], source.shape[1], valid_BL is not None)
        key = ("denoise", *shape, _draw_key(sampler))
        graph = graphs.get(key, partial(Denoise, denoiser, head, sampler, *shape))
        graph.load(
            tokens_BL[:rows], u_BL[:rows], at, source, target, level, None if valid_BL is None else valid_BL[:rows]
        )
        if quiet:
            graph.replay(hi - lo)
            tokens_BL[:rows] = graph.tokens()
            continue
        for r in range(lo, hi):
            graph.replay()
            row_N, position_N = (put(torch.from_numpy(a), device) for a in state.opens(r))
            tokens_BL[:rows] = graph.tokens()
            token_N, log_prob_N = graph.drawn(r - lo, len(row_N))
            yield Step(row_N, position_N, token_N, log_prob_N, tokens_BL[back_B])
    state.round, state.tokens_BL = state.num_rounds, tokens_BL[back_B]
    if quiet:
        yield _nothing(state)


@dataclass(frozen=True)
class DevicePlan:
    """The rounds of a plan as dense arrays, with the rows sorted by how long they take."""

    row_of_slot: np.ndarray
    slot_of_row: np.ndarray
    segments: list[tuple[int, int, int]]  # rounds lo..hi run with so many rows

    @classmethod
    def of(cls, state: PlannedState) -> DevicePlan:
        B = len(state.tokens_BL)
        round_E = np.repeat(np.arange(state.num_rounds), np.diff(state.starts))
        rounds_B = np.zeros(B, dtype=np.int64)
        rounds_B[state.row_E] = round_E + 1  # the last one stays: entries are sorted by round
        row_of_slot = np.argsort(-rounds_B, kind="stable")
        active_R = B - np.searchsorted(np.sort(rounds_B), np.arange(state.num_rounds), side="right")
        return cls(row_of_slot, np.argsort(row_of_slot), _segments(active_R, B))

    def lines(self, state: PlannedState, lo: int, hi: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For each round: positions asked at [rows, K]; of those, the real ones [N]; where they are written [N];
        the level of each row. What only fills up is written behind the last token, where nobody reads."""
        length = state.tokens_BL.shape[1]
        part = slice(state.starts[lo], state.starts[hi])
        row, position = state.row_E[part], state.position_E[part]
        counts = np.diff(state.starts[lo : hi + 1])
        line = np.repeat(np.arange(hi - lo), counts)
        n = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        # a line's entries are sorted by row: k counts inside each (line, row)
        new = np.r_[True, (np.diff(row) != 0) | (np.diff(line) != 0)]
        k = np.arange(len(row)) - np.maximum.accumulate(np.where(new, np.arange(len(row)), 0))
        slot = self.slot_of_row[row]
        K, N = min(_bucket(int(k.max()) + 1), length), _bucket(int(n.max()) + 1)
        at = np.zeros((hi - lo, rows, K), dtype=np.int64)
        source = np.zeros((hi - lo, N), dtype=np.int64)
        target = np.full((hi - lo, N), rows * length, dtype=np.int64)
        level = np.zeros((hi - lo, rows), dtype=np.float32)
        at[line, slot, k] = position
        source[line, n] = slot * K + k
        target[line, n] = slot * length + position
        level[line, slot] = state.level_BL[row, position]
        return torch.from_numpy(at), torch.from_numpy(source), torch.from_numpy(target), torch.from_numpy(level)


def _segments(active_R: np.ndarray, batch: int) -> list[tuple[int, int, int]]:
    """Cut the rounds where the number of rows left fits a graph of half the size, if that graph then runs long enough.

    >>> _segments(np.array([8] * 20 + [3] * 20 + [1] * 2), 8)
    [(0, 20, 8), (20, 42, 4)]
    """
    segments: list[tuple[int, int, int]] = []
    lo, rows = 0, batch
    while lo < len(active_R):
        smaller = -(-rows // 2)
        fits = np.nonzero(active_R <= smaller)[0]
        hi = int(fits[0]) if rows > 1 and len(fits) and len(active_R) - fits[0] >= MIN_ROUNDS else len(active_R)
        if hi > lo:
            segments.append((lo, hi, rows))
        lo, rows = hi, smaller
    return segments


def _bucket(n: int) -> int:
    """The next power of two: few shapes, few graphs."""
    return 1 << (n - 1).bit_length()


# --- autoregression ---------------------------------------------------------------------------------------------------


def _decode(denoiser: Network, sampler: PlannedSampler, state: PlannedState, quiet: bool) -> Iterator[Step]:
    canvas, device = state.canvas, state.tokens_BL.device
    B, L = state.tokens_BL.shape
    if state.num_rounds == 0:
        return
    columns = state.position_E[state.starts[:-1]]  # a round is a column
    first, last = int(columns[0]), int(columns[-1])
    target = np.full((L, B), B * L, dtype=np.int64)
    target[state.position_E, state.row_E] = state.row_E * L + state.position_E
    graphs = graphs_of(denoiser)
    head = graphs.head(denoiser, device)
    head.refresh(denoiser, canvas, sampler)
    denoiser.before_replay()
    position_L = torch.arange(L, device=device) + canvas.offset
    u_BL = uniform(canvas.key_B[:, None], DRAW_TOKEN, position_L)
    graph = graphs.get(("decode", B, L, _draw_key(sampler)), partial(Decode, denoiser, head, sampler, B, L))
    graph.load(denoiser, state.tokens_BL, u_BL, torch.from_numpy(target), first)
    line_of = {int(c): r for r, c in enumerate(columns)}
    for column in range(first, last + 1):
        graph.replay(column)
        if not quiet and column in line_of:
            rows, positions = (put(torch.from_numpy(a), device) for a in state.opens(line_of[column]))
            token_B, log_prob_B = graph.drawn(column, B)
            yield Step(rows, positions, token_B[rows], log_prob_B[rows], graph.tokens().clone())
    state.round, state.tokens_BL = state.num_rounds, graph.tokens().clone()
    if quiet:
        yield _nothing(state)


def _nothing(state: PlannedState) -> Step:
    """The canvas at the end, without what opened on the way."""
    none = torch.empty(0, dtype=torch.long, device=state.tokens_BL.device)
    return Step(none, none, none, none.float(), state.tokens_BL)


# --- what is captured -------------------------------------------------------------------------------------------------


class Head:
    """From vectors to drawn tokens: the head's product, what may not be drawn, and the draw."""

    def __init__(self, denoiser: Network, device: torch.device) -> None:
        linear = denoiser.head_linear()
        width = denoiser.num_ids if linear is None else -(-denoiser.num_ids // ALIGN) * ALIGN
        # Added to the logits: the head's bias, and -inf where nothing may be drawn.
        self.block_I = torch.full((width,), -torch.inf, device=device)
        self.weight_ID = None if linear is None else linear.weight.new_zeros(width, linear.weight.shape[1])
        self.inv_temperature = torch.ones(1, dtype=torch.float64, device=device)

    def refresh(self, denoiser: Network, canvas: Canvas, sampler: PlannedSampler) -> None:
        """The weights as they are now, this canvas's forbidden ids and this sampler's temperature."""
        linear, num_ids = denoiser.head_linear(), denoiser.num_ids
        block = torch.zeros(num_ids)
        block[[canvas.mask_id, *canvas.forbidden]] = -torch.inf
        block = put(block, self.block_I.device)
        if linear is not None and self.weight_ID is not None:
            self.weight_ID[:num_ids] = linear.weight
            block = block if linear.bias is None else block + linear.bias
        self.block_I[:num_ids] = block
        self.inv_temperature.fill_(1 / sampler.divisor)

    def draw(self, denoiser: Network, h_ND: Tensor, sampler: PlannedSampler, lines: Lines) -> None:
        """Draw for the line that is due, and write."""
        if self.weight_ID is None:
            h_ND = denoiser.head(h_ND).float()
        if sampler.draws_whole_law and kernels.fit(h_ND):
            from unmask.kernels.draw import draw

            draw(h_ND, self.weight_ID, self.block_I, self.inv_temperature, lines)
            return
        logits_NI = h_ND if self.weight_ID is None else (h_ND @ self.weight_ID.T).float()
        target_N = lines.target.index_select(0, lines.line)[0]
        log_p_NI = torch.log_softmax(logits_NI + self.block_I, dim=-1)
        token_N, log_prob_N = sampler.choose(log_p_NI, lines.u.index_select(0, target_N))
        lines.text.index_copy_(0, target_N, token_N)
        lines.token.index_copy_(0, lines.line, token_N[None])
        lines.log_prob.index_copy_(0, lines.line, log_prob_N[None])


@dataclass(frozen=True)
class Lines:
    """A plan on the device, one line a round, and where what is drawn goes. `line` says which one is due.

    target [lines, N]: places in the flat text; u: a uniform for every place. token and log_prob [lines, N] keep a
    record. The place behind the last token takes what is void.
    """

    line: Tensor
    target: Tensor
    u: Tensor
    text: Tensor
    token: Tensor
    log_prob: Tensor

    @classmethod
    def void(cls, lines: int, opened: int, places: int, device: torch.device) -> Lines:
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            line=zeros(1),
            target=zeros(lines, opened) + places,
            u=zeros(places + 1, dtype=torch.float64),
            text=zeros(places + 1),
            token=zeros(lines, opened),
            log_prob=zeros(lines, opened, dtype=torch.float32),
        )


class Captured:
    """Buffers at fixed addresses, and graphs that work on them."""

    def __init__(
        self, head: Head, sampler: PlannedSampler, rows: int, length: int, num_lines: int, opened: int
    ) -> None:
        self.head, self.sampler, self.rows, self.length = head, sampler, rows, length
        self.lines = Lines.void(num_lines, opened, rows * length, head.block_I.device)

    def tokens(self) -> Tensor:
        return self.lines.text[:-1].view(self.rows, self.length)

    def drawn(self, line: int, n: int) -> tuple[Tensor, Tensor]:
        """What the round of this line wrote."""
        return self.lines.token[line, :n].clone(), self.lines.log_prob[line, :n].clone()

    def begin(self, tokens_RL: Tensor, u_RL: Tensor, target: Tensor, line: int) -> None:
        lines = self.lines
        lines.text[:-1] = tokens_RL.flatten()
        lines.u[:-1] = u_RL.flatten()
        lines.target[: len(target)] = put(target, lines.target.device)
        lines.line.fill_(line)

    def capture(self, body: Callable[[], None], pool: Any, times: int = 1) -> torch.cuda.CUDAGraph:
        """Run once to warm up (kernels are compiled, libraries choose), then record so many rounds."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(times):
                body()
        self.lines.line.zero_()
        return graph


class Denoise(Captured):
    """Rounds of a planned diffusion sampler."""

    def __init__(
        self,
        denoiser: Network,
        head: Head,
        sampler: PlannedSampler,
        rows: int,
        length: int,
        num_lines: int,
        asked: int,
        opened: int,
        padded: bool,
    ) -> None:
        # Recording runs some void lines: there must be so many.
        num_lines = max(num_lines, 1 + AT_ONCE) + 1
        super().__init__(head, sampler, rows, length, num_lines, opened)
        device = self.lines.text.device
        self.at = torch.zeros(num_lines, rows, asked, dtype=torch.long, device=device)
        self.source = torch.zeros(num_lines, opened, dtype=torch.long, device=device)
        self.level = torch.zeros(num_lines, rows, device=device)
        self.valid = torch.ones(rows, length, dtype=torch.bool, device=device) if padded else None
        pool = graphs_of(denoiser).pool
        self.one = self.capture(partial(self._round, denoiser), pool)
        self.many = self.capture(partial(self._round, denoiser), pool, AT_ONCE)

    def _round(self, denoiser: Network) -> None:
        line = self.lines.line
        at_RK = self.at.index_select(0, line)[0]
        level_R = self.level.index_select(0, line)[0] if denoiser.uses_level else None
        h_ND = denoiser.trunk(self.tokens(), level_R, valid_BL=self.valid, at_BK=at_RK).flatten(0, 1)
        if self.rows > 1:  # with one row, what is asked is what opens
            h_ND = h_ND.index_select(0, self.source.index_select(0, line)[0])
        self.head.draw(denoiser, h_ND, self.sampler, self.lines)
        line += 1

    def load(
        self,
        tokens_RL: Tensor,
        u_RL: Tensor,
        at: Tensor,
        source: Tensor,
        target: Tensor,
        level: Tensor,
        valid_RL: Tensor | None,
    ) -> None:
        self.begin(tokens_RL, u_RL, target, 0)
        for buffer, lines in ((self.at, at), (self.source, source), (self.level, level)):
            buffer[: len(lines)] = put(lines, buffer.device)
        if self.valid is not None and valid_RL is not None:
            self.valid.copy_(valid_RL)

    def replay(self, rounds: int = 1) -> None:
        many, ones = divmod(rounds, AT_ONCE)
        for _ in range(many):
            self.many.replay()
        for _ in range(ones):
            self.one.replay()


class Decode(Captured):
    """One column of a left-to-right sampler; the counter is the column's number."""

    def __init__(self, denoiser: Network, head: Head, sampler: PlannedSampler, rows: int, length: int) -> None:
        super().__init__(head, sampler, rows, length, length + 1, rows)
        self.kv = denoiser.empty_cache(rows, length)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _column(self, denoiser: Network, stop: int) -> None:
        line = self.lines.line
        before_R = self.tokens().index_select(1, (line - 1).clamp(min=0))[:, 0]
        ids_R = torch.where(line > 0, before_R, denoiser.mask_id)
        self.head.draw(denoiser, denoiser.decode(ids_R, line, self.kv, stop), self.sampler, self.lines)
        line += 1

    def load(self, denoiser: Network, tokens_RL: Tensor, u_RL: Tensor, target: Tensor, first: int) -> None:
        """Set the canvas, and compute the keys and values of the prompt."""
        for stop in range(STOP_STEP, self.length + STOP_STEP, STOP_STEP):
            stop = min(stop, self.length)
            if stop > first and stop not in self.graphs:
                self.graphs[stop] = self.capture(partial(self._column, denoiser, stop), graphs_of(denoiser).pool)
        self.begin(tokens_RL, u_RL, target, first)
        if first > 0:
            cache = KVCache()
            cache.stop, cache.blocks = first, self.kv
            denoiser.trunk(self.tokens(), cache=cache)

    def replay(self, column: int) -> None:
        self.graphs[min(-(-(column + 1) // STOP_STEP) * STOP_STEP, self.length)].replay()


class Graphs:
    """A network's captured graphs. They share one memory pool, since they never run at the same time.

    Nothing here holds the network itself: when it goes, its graphs go.
    """

    def __init__(self, denoiser: Network) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.known: OrderedDict[Hashable, Captured] = OrderedDict()
        self.captures = 0
        self.place = _place(denoiser)
        self._head: Head | None = None

    def head(self, denoiser: Network, device: torch.device) -> Head:
        if self._head is None:
            self._head = Head(denoiser, device)
        return self._head

    def get(self, key: Hashable, make: Callable[[], Captured]) -> Any:
        if key not in self.known:
            self.captures += 1
            self.known[key] = make()
            if len(self.known) > MAX_GRAPHS:
                self.known.popitem(last=False)
        self.known.move_to_end(key)
        return self.known[key]


_GRAPHS: weakref.WeakKeyDictionary[Network, Graphs] = weakref.WeakKeyDictionary()


def graphs_of(denoiser: Network) -> Graphs:
    """The graphs captured for this network; weights that moved to another place or type have none yet."""
    graphs = _GRAPHS.get(denoiser)
    if graphs is None or graphs.place != _place(denoiser):
        graphs = _GRAPHS[denoiser] = Graphs(denoiser)
    return graphs


def _place(denoiser: Network) -> tuple[Hashable, ...]:
    """A graph reads the weights where they were when it was captured; new values in the same place are fine."""
    return tuple((p.data_ptr(), p.dtype) for p in denoiser.parameters())


def _draw_key(sampler: PlannedSampler) -> Hashable:
    """What of the drawing is recorded in a graph; a temperature alone is not."""
    if sampler.draws_whole_law:
        return True
    return sampler.draw, sampler.sure, sampler.temperature, sampler.top_k, sampler.top_p
