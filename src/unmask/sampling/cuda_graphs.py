"""Planned sampling on a GPU with the host out of the loop.

A planned sampler knows before the first network call which positions open in which round. So the whole plan is copied
to the device, and one round (network, draw, writing the tokens) is captured as a CUDA graph that finds its line of the
plan by a counter on the device. The loop replays this graph, without copies or synchronisation in between. The
distribution is the sampler's own: the same plan, the same uniforms, the same order of tokens in the inverse CDF.

Rows that are done leave: rows are sorted by their number of rounds, and a graph for fewer rows takes over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from unmask.data.batch import DRAW_TOKEN
from unmask.denoisers.network import Network
from unmask.devices import fast_attention, is_current, put
from unmask.rng import uniform
from unmask.samplers import Step
from unmask.samplers.planned import PlannedSampler, PlannedState
from unmask.sampling.captured import Decode, Denoise, graphs_of
from unmask.sampling.predictor import NextToken, Predictor, XTheta

MIN_ROUNDS = 16  # a graph for fewer rows must be used for this many rounds to be worth its capture


def can_replay(predictor: Predictor, sampler: PlannedSampler, state: PlannedState) -> bool:
    """Whether the sampler's rounds can be replayed, which needs a GPU and a network whose calls can be captured.

    Calls are captured on the current GPU; those on another one would run once and be missing in the graph.
    """
    canvas = state.canvas
    if not canvas.tokens.is_cuda or not is_current(canvas.tokens.device):
        return False
    if sampler.temperature_end is not None:  # a graph draws at one temperature
        return False
    if canvas.label_B is not None:  # nor does it support classes
        return False
    if isinstance(predictor, NextToken):
        with torch.no_grad():
            return predictor.denoiser.can_decode()
    return isinstance(predictor, XTheta) and predictor.denoiser.capturable


def replay(
    predictor: Predictor, sampler: PlannedSampler, state: PlannedState, *, quiet: bool = False
) -> Iterator[Step]:
    """The steps of the sampler. quiet: yield only the last step, with no work on the host in between."""
    denoiser = cast(XTheta | NextToken, predictor).denoiser
    way = _decode if isinstance(predictor, NextToken) else _denoise
    yield from way(denoiser, sampler, state, quiet)


@contextmanager
def _calling() -> Iterator[None]:
    """Settings for network calls; never active across a yield, so that the consumer of the steps keeps its own."""
    with torch.no_grad(), fast_attention():
        yield


# --- diffusion --------------------------------------------------------------------------------------------------------


def _denoise(denoiser: Network, sampler: PlannedSampler, state: PlannedState, quiet: bool) -> Iterator[Step]:
    canvas, device = state.canvas, state.tokens_BL.device
    L = state.tokens_BL.shape[1]
    plan = DevicePlan.of(state)
    graphs = graphs_of(denoiser)
    head = graphs.head(denoiser, device)
    with _calling():
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
        # As many lines as there are rounds, not the possible maximum: with few rounds, each queries many positions.
        shape = (rows, L, _bucket(len(at)), at.shape[2], source.shape[1], valid_BL is not None)
        key = ("denoise", *shape, _draw_key(sampler))
        with _calling():
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
    """The rounds of a plan as dense arrays, with the rows sorted by their number of rounds."""

    row_of_slot: np.ndarray
    slot_of_row: np.ndarray
    segments: list[tuple[int, int, int]]  # (lo, hi, number of rows): rounds lo..hi run with this many rows

    @classmethod
    def of(cls, state: PlannedState) -> DevicePlan:
        B = len(state.tokens_BL)
        round_E = np.repeat(np.arange(state.num_rounds), np.diff(state.starts))
        rounds_B = np.zeros(B, dtype=np.int64)
        rounds_B[state.row_E] = round_E + 1  # entries are sorted by round, so the last one remains
        row_of_slot = np.argsort(-rounds_B, kind="stable")
        active_R = B - np.searchsorted(np.sort(rounds_B), np.arange(state.num_rounds), side="right")
        return cls(row_of_slot, np.argsort(row_of_slot), _segments(active_R, B))

    def lines(self, state: PlannedState, lo: int, hi: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For each round: queried positions [rows, K]; which of them are real [N]; where tokens are written [N]; the
        level of each row. Padding is written after the last token, where it is not read."""
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
    """Split the rounds where the remaining rows fit a graph of half the size, if that graph then runs long enough.

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
    """The next power of two, so that few shapes and graphs are needed."""
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
    with _calling():
        head.refresh(denoiser, canvas, sampler)
        denoiser.before_replay()
    position_L = torch.arange(L, device=device) + canvas.offset
    u_BL = uniform(canvas.key_B[:, None], DRAW_TOKEN, position_L)
    with _calling():
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
    """A step with the final canvas, without the positions that opened before."""
    none = torch.empty(0, dtype=torch.long, device=state.tokens_BL.device)
    return Step(none, none, none, none.float(), state.tokens_BL)


def _draw_key(sampler: PlannedSampler) -> Hashable:
    """The drawing options that are fixed in a graph; the temperature alone is not."""
    if sampler.draws_whole_law:
        return True
    return sampler.draw, sampler.sure, sampler.temperature, sampler.top_k, sampler.top_p
