"""The recorded parts of a sampling run on a GPU: buffers at fixed addresses, and CUDA graphs that use them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unmask import kernels
from unmask.denoisers.network import Network
from unmask.devices import put
from unmask.objectives.chunked_loss import ALIGN
from unmask.samplers.planned import PlannedSampler
from unmask.sampling.canvas import Canvas

MAX_GRAPHS = 16  # kept per network; the least recently used is dropped first
AT_ONCE = 8  # rounds in one launch, if the steps in between are not observed
STOP_STEP = 128  # an autoregressive cache is read up to the next multiple of this


class Head:
    """From vectors to drawn tokens: the head's product, the forbidden ids, and the draw."""

    def __init__(self, denoiser: Network, device: torch.device) -> None:
        linear = denoiser.head_linear()
        width = denoiser.num_ids if linear is None else -(-denoiser.num_ids // ALIGN) * ALIGN
        # Added to the logits: the head's bias, and -inf for forbidden ids.
        self.block_I = torch.full((width,), -torch.inf, device=device)
        self.weight_ID = None if linear is None else linear.weight.new_zeros(width, linear.weight.shape[1])
        self.inv_temperature = torch.ones(1, dtype=torch.float64, device=device)

    def refresh(self, denoiser: Network, canvas: Canvas, sampler: PlannedSampler) -> None:
        """Update the buffers: the current weights, this canvas's forbidden ids and this sampler's temperature."""
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
        """Draw the tokens of the current line, and write them."""
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
    """A plan on the device, one line per round, and the positions that receive the tokens. `line`: the current line.

    target [lines, N]: indices in the flat text; u: a uniform number for every index. token and log_prob [lines, N]
    record the draws. Padding entries write to the index after the last token.
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
    """Buffers at fixed addresses, and graphs that use them."""

    def __init__(
        self, head: Head, sampler: PlannedSampler, rows: int, length: int, num_lines: int, opened: int
    ) -> None:
        self.head, self.sampler, self.rows, self.length = head, sampler, rows, length
        self.lines = Lines.void(num_lines, opened, rows * length, head.block_I.device)

    def tokens(self) -> Tensor:
        return self.lines.text[:-1].view(self.rows, self.length)

    def drawn(self, line: int, n: int) -> tuple[Tensor, Tensor]:
        """The tokens that the round of this line wrote, and their log-probabilities."""
        return self.lines.token[line, :n].clone(), self.lines.log_prob[line, :n].clone()

    def begin(self, tokens_RL: Tensor, u_RL: Tensor, target: Tensor, line: int) -> None:
        lines = self.lines
        lines.text[:-1] = tokens_RL.flatten()
        lines.u[:-1] = u_RL.flatten()
        lines.target[: len(target)] = put(target, lines.target.device)
        lines.line.fill_(line)

    def capture(self, body: Callable[[], None], pool: Any, times: int = 1) -> torch.cuda.CUDAGraph:
        """Run once to warm up (compile kernels, let libraries choose theirs), then record `times` rounds."""
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
        # Recording runs some padding lines, so there must be enough of them.
        num_lines = max(num_lines, 1 + AT_ONCE) + 1
        super().__init__(head, sampler, rows, length, num_lines, opened)
        device = self.lines.text.device
        self.at = torch.zeros(num_lines, rows, asked, dtype=torch.long, device=device)
        self.source = torch.zeros(num_lines, opened, dtype=torch.long, device=device)
        self.level = torch.zeros(num_lines, rows, device=device)
        self.valid = torch.ones(rows, length, dtype=torch.bool, device=device) if padded else None
        pool = graphs_of(denoiser).pool
        self.one = self.capture(partial(self._round, denoiser), pool)
        self.several_rounds = self.capture(partial(self._round, denoiser), pool, AT_ONCE)

    def _round(self, denoiser: Network) -> None:
        line = self.lines.line
        at_RK = self.at.index_select(0, line)[0]
        level_R = self.level.index_select(0, line)[0] if denoiser.uses_level else None
        h_ND = denoiser.trunk(self.tokens(), level_R, valid_BL=self.valid, at_BK=at_RK).flatten(0, 1)
        if self.rows > 1:  # with one row, the queried positions are those that open
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
        calls, ones = divmod(rounds, AT_ONCE)
        for _ in range(calls):
            self.several_rounds.replay()
        for _ in range(ones):
            self.one.replay()


class Decode(Captured):
    """One column of a left-to-right sampler; the counter is the column's number."""

    def __init__(self, denoiser: Network, head: Head, sampler: PlannedSampler, rows: int, length: int) -> None:
        super().__init__(head, sampler, rows, length, length + 1, rows)
        self.cache = denoiser.new_cache(rows, length)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _column(self, denoiser: Network, stop: int) -> None:
        line = self.lines.line
        before_R = self.tokens().index_select(1, (line - 1).clamp(min=0))[:, 0]
        ids_R = torch.where(line > 0, before_R, denoiser.mask_id)
        self.head.draw(denoiser, denoiser.decode(ids_R, line, self.cache, stop), self.sampler, self.lines)
        line += 1

    def load(self, denoiser: Network, tokens_RL: Tensor, u_RL: Tensor, target: Tensor, first: int) -> None:
        """Set the canvas, and let the network read the prompt into its cache."""
        for stop in range(STOP_STEP, self.length + STOP_STEP, STOP_STEP):
            stop = min(stop, self.length)
            if stop > first and stop not in self.graphs:
                self.graphs[stop] = self.capture(partial(self._column, denoiser, stop), graphs_of(denoiser).pool)
        self.begin(tokens_RL, u_RL, target, first)
        if first > 0:
            denoiser.trunk(self.tokens(), cache=self.cache, span=(0, first))

    def replay(self, column: int) -> None:
        self.graphs[min(-(-(column + 1) // STOP_STEP) * STOP_STEP, self.length)].replay()


class Graphs:
    """A network's captured graphs. They share one memory pool, since they never run at the same time.

    No reference to the network is kept, so the graphs are freed with it.
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
    """The graphs captured for this network; none if its weights have moved to another address or dtype since."""
    graphs = _GRAPHS.get(denoiser)
    if graphs is None or graphs.place != _place(denoiser):
        graphs = _GRAPHS[denoiser] = Graphs(denoiser)
    return graphs


def _place(denoiser: Network) -> tuple[Hashable, ...]:
    """The addresses and types of the weights: a graph reads the addresses at capture, where values may change."""
    return tuple((p.data_ptr(), p.dtype) for p in denoiser.parameters())
