"""The draw of a constrained step: the product of the positions' distributions, given that the automaton accepts.

A backward pass computes messages: for each state before a position, the log probability that the rest is accepted. A
forward pass draws the tokens that open from left to right, each from its exact conditional distribution given those
drawn before, while positions that stay masked are summed out. Everything is float64; messages are logarithms, so
nothing underflows.

Memory is bounded: spans are processed in groups, and for a long span messages are kept only at the edges of blocks,
inside which they are recomputed in the forward pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.constraints.cost import CELLS, LINES
from unmask.constraints.tables import Tables
from unmask.data.batch import DRAW_TOKEN
from unmask.errors import NonFiniteError
from unmask.rng import categorical, uniform
from unmask.samplers.drawing import Drawing

# A token of probability 0 gets e^-FLOOR times that of the likeliest: written only if the constraint allows no other.
FLOOR = 1e5
COLD = 1e-9  # lower temperatures make no difference: float32 logits differ by more than that
_LINEAR = 600.0  # logs closer than this are summed as plain numbers, as e^-600 is still a normal float64


@dataclass(frozen=True)
class Spans:
    """The automaton's input: G spans of at most M tokens each, and the lines of the prediction for their positions.

    line_GM: the line of log_p for a masked position, -1 for a fixed one. counter_GM: the position's counter for draws.
    """

    token_GM: Tensor
    line_GM: Tensor
    opens_GM: Tensor
    length_G: Tensor
    key_G: Tensor
    counter_GM: Tensor

    def part(self, lo: int, hi: int) -> tuple[Spans, int, int]:
        """Spans lo..hi-1, with lines counted from their first one, and the range of these lines."""
        some = Spans(*(x[lo:hi] for x in vars(self).values()))
        masked_GM = some.line_GM >= 0
        first, last = int(some.line_GM[masked_GM].min()), int(some.line_GM.max())
        return replace(some, line_GM=torch.where(masked_GM, some.line_GM - first, -1)), first, last + 1


def draw(tables: Tables, log_p_NI: Tensor, spans: Spans, drawing: Drawing, never: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens for the positions that open, span by span from left to right; also their log-probabilities.

    Temperature acts on the distributions before conditioning, top-k and top-p on each token's distribution afterwards.
    At temperature 0 the likeliest accepted completion is taken, which is the limit of small temperatures; the returned
    probabilities are then the model's own.
    """
    num = max(1, CELLS // _cells(tables, spans.token_GM.shape[1]))
    parts = []
    for lo in range(0, len(spans.token_GM), num):
        part, first, stop = spans.part(lo, lo + num)
        one = _best if drawing.temperature == 0 else _sample
        parts.append(one(tables, log_p_NI[first:stop], part, drawing, never))
    token_N, log_prob_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return token_N, log_prob_N


def _cells(tables: Tables, length: int) -> int:
    """The number of values in the weights and messages of `length` positions."""
    return length * (tables.num_sets + tables.num_states) + len(tables.to_P)


@dataclass(frozen=True)
class Block:
    """Positions lo..hi of all spans. beta_MGS: the message before each position and after the last. log_u_NU: for each
    masked line the log weight of each set of classes, with an additional column of -inf; line_GM: its lines."""

    lo: int
    hi: int
    beta_MGS: Tensor
    log_u_NU: Tensor
    line_GM: Tensor


def _blocks(
    tables: Tables, log_p_NI: Tensor, spans: Spans, temperature: float, never: Tensor, *, best: bool
) -> Iterator[Block]:
    """The blocks from left to right, up to the last position that opens, since all messages may not fit in memory."""
    G, M = spans.token_GM.shape
    size = max(1, CELLS // max(1, G * (tables.num_sets + tables.num_states)))
    starts = range(0, M, size)

    def block(lo: int, after_GS: Tensor) -> Block:
        hi = min(lo + size, M)
        line_GM = spans.line_GM[:, lo:hi]
        masked_GM = line_GM >= 0
        line_N = line_GM[masked_GM]
        here = replace(spans, line_GM=torch.where(masked_GM, (masked_GM.view(-1).cumsum(0) - 1).view_as(line_GM), -1))
        lines_NI = log_p_NI if len(line_N) == len(log_p_NI) else log_p_NI[line_N]
        log_u_NU = _set_weights(tables, lines_NI, temperature, never, best=best)
        return Block(lo, hi, backward(tables, log_u_NU, here, lo, hi, after_GS, best=best), log_u_NU, here.line_GM)

    edges = [_accepting(tables, G)]
    for lo in reversed(starts):
        last = block(lo, edges[-1])
        edges.append(last.beta_MGS[0])
    stop = int(spans.opens_GM.any(0).nonzero().max()) + 1
    for lo, after_GS in zip(starts, reversed(edges[:-1]), strict=True):
        if lo < stop:
            yield last if lo == 0 else block(lo, after_GS)


def _accepting(tables: Tables, num: int) -> Tensor:
    """The message after the last position [G, S + 1]."""
    nowhere = tables.log_accept_S.new_full((1,), -torch.inf)
    return torch.cat([tables.log_accept_S, nowhere]).expand(num, -1)


def backward(
    tables: Tables, log_u_NU: Tensor, spans: Spans, lo: int, hi: int, after_GS: Tensor, *, best: bool = False
) -> Tensor:
    """Messages before positions lo..hi, followed by `after_GS` itself, [hi - lo + 1, G, S + 1].

    A message is the log probability that the rest is accepted, for each state. spans.line_GM has the lines of these
    positions only.

    best: use the largest term instead of the sum.
    """
    S, device = tables.num_states, after_GS.device
    beta_MGS = after_GS.new_full((hi - lo + 1, *after_GS.shape), -torch.inf)
    beta_MGS[-1] = after_GS
    token_GM, line_GM = spans.token_GM[:, lo:hi], spans.line_GM
    masked_GM = line_GM >= 0
    inside_GM = torch.arange(lo, hi, device=device) < spans.length_G[:, None]
    some_masked, all_masked, all_inside = (masked_GM & inside_GM).any(0), masked_GM.all(0), inside_GM.all(0)
    flags = torch.stack([some_masked, all_masked, all_inside]).tolist()
    for m in range(hi - lo - 1, -1, -1):
        after_GS, here_GS = beta_MGS[m + 1], None
        if flags[0][m]:
            x_GP = log_u_NU[line_GM[:, m]][:, tables.set_P].add_(after_GS[:, tables.to_P])
            here_GS = torch.empty_like(after_GS[:, :S])
            for states, pairs in tables.by_state:
                x = x_GP[:, pairs.view(-1)].view(len(x_GP), *pairs.shape)
                here_GS[:, states] = x.amax(dim=-1) if best else torch.logsumexp(x, dim=-1)
        if here_GS is None or not flags[1][m]:
            to_GS = tables.after(tables.next_SC[:, tables.class_I[token_GM[:, m]]].T)
            fixed_GS = after_GS.gather(1, to_GS)
            here_GS = fixed_GS if here_GS is None else torch.where(masked_GM[:, m, None], here_GS, fixed_GS)
        if not flags[2][m]:
            here_GS = torch.where(inside_GM[:, m, None], here_GS, after_GS[:, :S])
        beta_MGS[m, :, :S] = here_GS
    return beta_MGS


def possible(tables: Tables, spans: Spans, never: Tensor) -> Tensor:
    """[G] whether the masks can be filled so that the span is accepted, for any network."""
    may_I = torch.ones_like(tables.word_I, dtype=torch.float64).index_fill(0, never, 0.0)
    w_C = torch.zeros(tables.next_SC.shape[1]).to(may_I).index_add(0, tables.word_I, may_I)
    log_u_1U = torch.cat([tables.sums_UC @ w_C, w_C.new_zeros(1)]).log()[None]
    # Many rows are equal before anything is written: each distinct row is checked once.
    M = spans.token_GM.shape[1]
    masked_GM = spans.line_GM >= 0
    inside_GM = torch.arange(M, device=masked_GM.device) < spans.length_G[:, None]
    fixed_GM = spans.token_GM.masked_fill(masked_GM, -1).masked_fill(~inside_GM, -2)
    kinds_GM, kind_G = torch.unique(fixed_GM, dim=0, return_inverse=True)
    possible = []
    num = max(1, CELLS // _cells(tables, 1))
    for lo in range(0, len(kinds_GM), num):
        kind_KM = kinds_GM[lo : lo + num]
        nothing = torch.zeros_like(kind_KM)
        one_line = Spans(
            token_GM=kind_KM.clamp(min=0),
            line_GM=nothing,
            opens_GM=nothing.bool(),
            length_G=(kind_KM != -2).sum(dim=1),
            key_G=nothing[:, 0],
            counter_GM=nothing,
        )
        beta_KS = _accepting(tables, len(kind_KM))
        size = max(1, CELLS // beta_KS.numel())
        for hi in range(M, 0, -size):
            at = slice(max(0, hi - size), hi)
            here = replace(one_line, line_GM=torch.where(kind_KM[:, at] == -1, 0, -1))
            beta_KS = backward(tables, log_u_1U, here, at.start, hi, beta_KS, best=True)[0]
        possible.append(~beta_KS[:, 0].isneginf())
    return torch.cat(possible)[kind_G]


def tempered(log_p_NI: Tensor, temperature: float, never: Tensor) -> tuple[Tensor, float]:
    """Log weights in float64, the largest 0, with -inf exactly for ids in `never`; also the smallest finite one.

    It passes over the vocabulary as few times as possible, since this is the most expensive part of a draw.
    """
    x_NI = log_p_NI.to(torch.float64, copy=True).index_fill_(1, never, -torch.inf)
    top_N1 = x_NI.amax(dim=1, keepdim=True)
    x_NI.sub_(top_N1.masked_fill_(top_N1.isneginf(), 0.0)).index_fill_(1, never, 0.0)
    least = float(x_NI.amin())
    if least != least:
        raise NonFiniteError(
            "the model's prediction is not a number: its weights are damaged, or overflow in this dtype"
        )
    if least < -FLOOR:
        x_NI.clamp_(min=-FLOOR)
        least = -FLOOR
    if temperature not in (0.0, 1.0):
        x_NI.div_(max(temperature, COLD))
        least /= max(temperature, COLD)
    return x_NI.index_fill_(1, never, -torch.inf), least


def _set_weights(tables: Tables, log_p_NI: Tensor, temperature: float, never: Tensor, *, best: bool) -> Tensor:
    """[N, U + 1] for each line and set of classes, the log of the sum (or the maximum) of its tokens' weights."""
    C, U = tables.next_SC.shape[1], tables.num_sets
    log_u_NU = log_p_NI.new_full((len(log_p_NI), U + 1), -torch.inf, dtype=torch.float64)
    num = max(1, LINES // max(log_p_NI.shape[1], U))
    for lo in range(0, len(log_p_NI), num):
        x_NI, least = tempered(log_p_NI[lo : lo + num], temperature, never)
        if least > -_LINEAR and not best:
            w_NC = x_NI.new_zeros(len(x_NI), C).index_add_(1, tables.word_I, x_NI.exp_())
            log_u_NU[lo : lo + num, :-1] = (tables.sums_UC @ w_NC.T.contiguous()).T.log_()
        else:
            log_w_NC = _grouped(x_NI, tables.word_I, C, best=best)
            log_u_NU[lo : lo + num, :-1] = _grouped_by_set(tables.sums_UC, log_w_NC, best=best)
    return log_u_NU


def _grouped_by_set(sums_UC: Tensor, log_w_NC: Tensor, *, best: bool) -> Tensor:
    """The product with sums_UC in logarithms (or the maximum), for some sets at a time."""
    start_U, class_E = sums_UC.crow_indices(), sums_UC.col_indices()
    log_u_NU = log_w_NC.new_empty(len(log_w_NC), len(start_U) - 1)
    edges, lo = start_U.tolist(), 0
    while lo < len(edges) - 1:
        hi = max(lo + 1, bisect_right(edges, edges[lo] + LINES) - 1)
        set_E = torch.repeat_interleave(torch.arange(hi - lo, device=class_E.device), start_U[lo : hi + 1].diff())
        some_E = class_E[edges[lo] : edges[hi]]
        few = max(1, LINES // max(1, len(some_E)))
        for at in range(0, len(log_w_NC), few):
            log_u_NU[at : at + few, lo:hi] = _grouped(log_w_NC[at : at + few, some_E], set_E, hi - lo, best=best)
        lo = hi
    return log_u_NU


def _grouped(x_NK: Tensor, group_K: Tensor, num: int, *, best: bool) -> Tensor:
    """Log-sum-exp (or the maximum) of the columns of each group."""
    index_NK = group_K.expand_as(x_NK)
    top = x_NK.new_full((len(x_NK), num), -torch.inf).scatter_reduce(1, index_NK, x_NK, "amax")
    if best:
        return top
    shift = top.masked_fill(top.isneginf(), 0.0)
    total = torch.zeros_like(top).index_add_(1, group_K, (x_NK - shift.gather(1, index_NK)).exp())
    return total.log() + shift


def _sample(tables: Tables, log_p_NI: Tensor, spans: Spans, drawing: Drawing, never: Tensor) -> tuple[Tensor, Tensor]:
    S, to_P = tables.num_states, tables.to_P[:-1]
    # The states' weights before position m, given the tokens drawn so far and that the rest is accepted: these are
    # plain probabilities, so they need no logarithms.
    weight_GS = tables.log_accept_S.new_zeros(len(spans.token_GM), S + 1)
    weight_GS[:, 0] = 1
    opens_GM = spans.opens_GM
    stays_GM = (spans.line_GM >= 0) & ~opens_GM
    u_GM = uniform(spans.key_G[:, None], DRAW_TOKEN, spans.counter_GM)
    class_GM = tables.class_I[spans.token_GM]
    token_GM, log_prob_GM = spans.token_GM.clone(), torch.zeros_like(spans.token_GM, dtype=torch.float64)
    flags = torch.stack([opens_GM.any(0), stays_GM.any(0), stays_GM.all(0)]).tolist()
    stop = max(m for m, opens in enumerate(flags[0]) if opens) + 1
    for block in _blocks(tables, log_p_NI, spans, drawing.temperature, never, best=False):
        for m in range(block.lo, min(block.hi, stop)):
            # beta after / beta before, in logs: how much the rest of the text favours a transition.
            before_GS, after_GS = block.beta_MGS[m - block.lo], block.beta_MGS[m - block.lo + 1]
            before_GS = -before_GS.masked_fill(before_GS.isneginf(), torch.inf)
            if flags[0][m]:
                g = opens_GM[:, m].nonzero().squeeze(1)
                x_GI, _ = tempered(log_p_NI[spans.line_GM[g, m]], drawing.temperature, never)
                log_a_GS = weight_GS[g].log_().add_(before_GS[g])
                token_G, log_prob_GM[g, m] = _draw_token(tables, x_GI, log_a_GS, after_GS[g], u_GM[g, m], drawing)
                token_GM[g, m], class_GM[g, m] = token_G, tables.class_I[token_G]
            moved_GS = None
            if flags[1][m]:
                x_GP = block.log_u_NU[block.line_GM[:, m - block.lo]][:, tables.set_P[:-1]]
                x_GP.add_(before_GS[:, tables.from_P]).add_(after_GS[:, to_P])
                flow_GP = weight_GS[:, tables.from_P] * x_GP.exp_()
                moved_GS = torch.zeros_like(weight_GS).index_add_(1, to_P, flow_GP)
            if moved_GS is None or not flags[2][m]:
                to_GS = tables.after(tables.next_SC.T[class_GM[:, m]])
                x_GS = weight_GS[:, :S].log().add_(before_GS[:, :S]).add_(after_GS.gather(1, to_GS))
                known_GS = torch.zeros_like(weight_GS).scatter_add_(1, to_GS, x_GS.softmax(dim=1))
                moved_GS = known_GS if moved_GS is None else torch.where(stays_GM[:, m, None], moved_GS, known_GS)
            weight_GS = moved_GS / moved_GS.sum(dim=1, keepdim=True)
    return token_GM[opens_GM], log_prob_GM[opens_GM]


def _draw_token(
    tables: Tables, x_GI: Tensor, log_a_GS: Tensor, after_GS: Tensor, u_G: Tensor, drawing: Drawing
) -> tuple[Tensor, Tensor]:
    """Draw a token from its exact conditional distribution: weight × (sum over states of the message it leads to)."""
    # Only few states have weight at a time; the others are skipped.
    num = int((log_a_GS > -torch.inf).sum(dim=1).max())
    log_a_GK, state_GK = log_a_GS[:, :-1].topk(min(num, log_a_GS.shape[1] - 1), dim=1)
    C = tables.next_SC.shape[1]
    log_r_GC = after_GS.new_empty(len(x_GI), C)
    some = max(1, LINES // state_GK.numel())
    for lo in range(0, C, some):
        to_GKC = tables.after(tables.next_SC[:, lo : lo + some][state_GK])
        ahead_GKC = after_GS.gather(1, to_GKC.flatten(1)).view(to_GKC.shape)
        log_r_GC[:, lo : lo + some] = torch.logsumexp(ahead_GKC.add_(log_a_GK[:, :, None]), dim=1)
    log_q_GI = torch.log_softmax(drawing.cut(x_GI + log_r_GC[:, tables.word_I]), dim=1)
    token_G = categorical(log_q_GI, u_G)
    return token_G, log_q_GI.gather(1, token_G[:, None]).squeeze(1)


def _best(tables: Tables, log_p_NI: Tensor, spans: Spans, drawing: Drawing, never: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest accepted completion (Viterbi), restricted to the positions that open."""
    state_G = torch.zeros_like(spans.length_G)
    token_GM = spans.token_GM.clone()
    log_prob_GM = torch.zeros_like(token_GM, dtype=torch.float64)
    stop = int(spans.opens_GM.any(0).nonzero().max()) + 1
    for block in _blocks(tables, log_p_NI, spans, 0.0, never, best=True):
        for m in range(block.lo, min(block.hi, stop)):
            g = (spans.line_GM[:, m] >= 0).nonzero().squeeze(1)
            if len(g):
                line_G = spans.line_GM[g, m]
                to_GC = tables.after(tables.next_SC[state_G[g]])
                ahead_GC = block.beta_MGS[m - block.lo + 1][g].gather(1, to_GC)
                x_GI, _ = tempered(log_p_NI[line_G], 0.0, never)
                token_GM[g, m] = (x_GI + ahead_GC[:, tables.word_I]).argmax(dim=1)
                log_x_theta_GI = log_p_NI[line_G].double().log_softmax(dim=1)
                log_prob_GM[g, m] = log_x_theta_GI.gather(1, token_GM[g, m, None]).squeeze(1)
            # After a shorter span's end the state no longer matters.
            to_G = tables.after(tables.next_SC[state_G, tables.class_I[token_GM[:, m]]])
            state_G = to_G.clamp(max=tables.num_states - 1)
    return token_GM[spans.opens_GM], log_prob_GM[spans.opens_GM]
