"""The draw of a constrained step: the product of the positions' distributions, given that the automaton accepts.

Backward messages carry, for each state before a position, the log of the probability that what follows is accepted;
forward the tokens that open are drawn from left to right, each from its exact law given those drawn before it, while
positions that stay masked are summed out. Everything is float64; messages are logarithms, so nothing underflows.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unmask.batch import DRAW_TOKEN
from unmask.constraints._automaton import Automaton
from unmask.draws import categorical, uniform
from unmask.errors import NonFiniteError, UsageError
from unmask.samplers._drawing import Drawing

# A token of probability 0 counts as e^-FLOOR of the likeliest: written only where the constraint leaves nothing else.
FLOOR = 1e5
COLD = 1e-9  # a temperature below it changes nothing: float32 logits differ by more than that
MAX_PAIRS = 1 << 19  # of states with a way between them; each position holds a number for each
_LINEAR = 600.0  # logs closer than this are summed in the plain, as e^-600 is still a normal float64
_CELLS = 1 << 24  # numbers held at a time in what grows with spans × positions × states
_LINES = 1 << 19  # the same of vocabulary × positions: what a processor's cache holds


@dataclass(frozen=True)
class Tables:
    """An automaton as tensors of one device. P: pairs of states with a way from one to the other.

    next_SC has state S for no way on, of which every message says -inf. sums_PC[p, c] = 1 where class c goes the way p.
    ways: states of similar numbers of ways on, and for each of them its pairs (P: none).
    class_I: of each id that may stand in a span, word_I: of those that a network predicts.
    """

    class_I: Tensor
    word_I: Tensor
    next_SC: Tensor
    log_accept_S: Tensor
    from_P: Tensor
    to_P: Tensor
    class_E: Tensor
    pair_E: Tensor
    sums_PC: Tensor
    ways: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, automaton: Automaton, device: torch.device) -> Tables:
        S, C = automaton.next_SC.shape
        from_E, class_E = np.nonzero(automaton.next_SC >= 0)
        to_E = automaton.next_SC[from_E, class_E].astype(np.int64)
        pair_P, pair_E = np.unique(from_E * S + to_E, return_inverse=True)
        pair_E = pair_E.reshape(-1)
        if len(pair_P) > MAX_PAIRS:
            raise UsageError(f"the constraint has {len(pair_P)} ways between its {S} states: use a simpler one")
        by_pair = np.argsort(pair_E, kind="stable")
        starts = np.searchsorted(pair_E[by_pair], np.arange(len(pair_P) + 1))

        def tensor(x: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "in beta state"
            sums_PC = torch.sparse_csr_tensor(
                tensor(starts), tensor(class_E[by_pair]), torch.ones(len(class_E), device=device).double(),
                size=(len(pair_P), C), check_invariants=False,
            )  # fmt: skip
        return cls(
            class_I=tensor(automaton.class_I),
            word_I=tensor(automaton.class_I[: automaton.num_words]),
            next_SC=tensor(np.where(automaton.next_SC < 0, S, automaton.next_SC).astype(np.int64)),
            log_accept_S=tensor(automaton.accept_S).double().log(),
            from_P=tensor(pair_P // S),
            to_P=tensor(pair_P % S),
            class_E=tensor(class_E),
            pair_E=tensor(pair_E),
            sums_PC=sums_PC,
            ways=[(tensor(s), tensor(p)) for s, p in _ways(pair_P // S, S)],
        )

    @property
    def num_states(self) -> int:
        return len(self.log_accept_S)

    @property
    def num_pairs(self) -> int:
        return len(self.to_P)


def _ways(from_P: np.ndarray, S: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """States and their pairs, padded. One table where that is no waste, else a table for each power of four."""
    count_S = np.bincount(from_P, minlength=S)
    most = max(1, int(count_S.max(initial=0)))
    size_S = np.full(S, most)
    if S * most > 4 * len(from_P) + 4096:
        size_S = 4 ** np.ceil(np.log(np.maximum(count_S, 1)) / np.log(4) - 1e-9).astype(int)
    start_S = np.cumsum(count_S) - count_S
    found = []
    for size in np.unique(size_S):
        states = np.flatnonzero(size_S == size)
        column = np.arange(size)
        pairs = start_S[states, None] + column
        found.append((states, np.where(column < count_S[states, None], pairs, len(from_P))))
    return found


@dataclass(frozen=True)
class Spans:
    """What the automaton reads: G spans of at most M tokens each, and where their positions are answered.

    line_GM: the line of log_p for a masked position, -1 for a fixed one. counter_GM: the position's number for draws.
    """

    token_GM: Tensor
    line_GM: Tensor
    opens_GM: Tensor
    length_G: Tensor
    key_G: Tensor
    counter_GM: Tensor

    def part(self, lo: int, hi: int) -> tuple[Spans, int, int]:
        """Some of the spans, with lines counted from their first one; and which lines those are."""
        some = Spans(*(x[lo:hi] for x in vars(self).values()))
        masked_GM = some.line_GM >= 0
        first, last = int(some.line_GM[masked_GM].min()), int(some.line_GM.max())
        return replace(some, line_GM=torch.where(masked_GM, some.line_GM - first, -1)), first, last + 1


def draw(tables: Tables, log_p_NI: Tensor, spans: Spans, drawing: Drawing, never: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of the positions that open, span by span from left to right, and the logs of their probabilities.

    Temperature acts on the distributions before they are conditioned, top-k and top-p on each token's law afterwards.
    At temperature 0 the likeliest accepted completion is taken, which is the limit of small temperatures; the
    probabilities told are then the model's own.
    """
    M = spans.token_GM.shape[1]
    held = M * (tables.num_pairs + tables.num_states) + tables.next_SC.numel()
    num = max(1, _CELLS // held)
    parts = []
    for lo in range(0, len(spans.token_GM), num):
        part, first, stop = spans.part(lo, lo + num)
        one = _best if drawing.temperature == 0 else _sample
        parts.append(one(tables, log_p_NI[first:stop], part, drawing, never))
    token_N, log_prob_N = (torch.cat(found) for found in zip(*parts, strict=True))
    return token_N, log_prob_N


def backward(tables: Tables, log_m_NP: Tensor, spans: Spans, *, best: bool = False) -> Tensor:
    """Messages [M + 1, G, S + 1]: the log of the probability that from this state on everything is accepted.

    log_m_NP has for each masked line the log weight of each pair of states, and -inf in one more column.
    best: the largest term instead of the sum.
    """
    G, M = spans.token_GM.shape
    S = tables.num_states
    beta_MGS = log_m_NP.new_full((M + 1, G, S + 1), -torch.inf)
    beta_MGS[:, :, :S] = tables.log_accept_S
    masked_GM = spans.line_GM >= 0
    inside_GM = torch.arange(M, device=masked_GM.device) < spans.length_G[:, None]
    some_masked, all_masked, all_inside = (masked_GM & inside_GM).any(0), masked_GM.all(0), inside_GM.all(0)
    flags = torch.stack([some_masked, all_masked, all_inside]).tolist()
    padded_P = torch.cat([tables.to_P, tables.to_P.new_full((1,), S)])
    for m in range(M - 1, -1, -1):
        after_GS, here_GS = beta_MGS[m + 1], None
        if flags[0][m]:
            x_GP = log_m_NP[spans.line_GM[:, m]] + after_GS[:, padded_P]
            here_GS = torch.empty_like(after_GS[:, :S])
            for states, pairs in tables.ways:
                x = x_GP[:, pairs.view(-1)].view(G, *pairs.shape)
                here_GS[:, states] = x.amax(dim=-1) if best else torch.logsumexp(x, dim=-1)
        if here_GS is None or not flags[1][m]:
            to_GS = tables.next_SC[:, tables.class_I[spans.token_GM[:, m]]].T
            fixed_GS = after_GS.gather(1, to_GS)
            here_GS = fixed_GS if here_GS is None else torch.where(masked_GM[:, m, None], here_GS, fixed_GS)
        if not flags[2][m]:
            here_GS = torch.where(inside_GM[:, m, None], here_GS, after_GS[:, :S])
        beta_MGS[m, :, :S] = here_GS
    return beta_MGS


def possible(tables: Tables, spans: Spans, never: Tensor) -> Tensor:
    """[G] whether some writing of the masks is accepted, whatever the network says."""
    may_I = torch.ones_like(tables.word_I, dtype=torch.float64).index_fill(0, never, 0.0)
    log_w_1C = torch.zeros(1, tables.next_SC.shape[1]).to(may_I).index_add(1, tables.word_I, may_I[None]).log()
    log_m_1P = _grouped(log_w_1C[:, tables.class_E], tables.pair_E, tables.num_pairs, best=True)
    log_m_1P = torch.cat([log_m_1P, log_m_1P.new_full((1, 1), -torch.inf)], dim=1)
    # Many rows are the same before anything is written: each kind is looked at once.
    M = spans.token_GM.shape[1]
    masked_GM = spans.line_GM >= 0
    inside_GM = torch.arange(M, device=masked_GM.device) < spans.length_G[:, None]
    seen_GM = spans.token_GM.masked_fill(masked_GM, -1).masked_fill(~inside_GM, -2)
    kinds_GM, kind_G = torch.unique(seen_GM, dim=0, return_inverse=True)
    found = []
    num = max(1, _CELLS // (M * (tables.num_pairs + tables.num_states)))
    for lo in range(0, len(kinds_GM), num):
        kind_KM = kinds_GM[lo : lo + num]
        nothing = torch.zeros_like(kind_KM)
        one_line = Spans(
            token_GM=kind_KM.clamp(min=0),
            line_GM=torch.where(kind_KM == -1, 0, -1),
            opens_GM=nothing.bool(),
            length_G=(kind_KM != -2).sum(dim=1),
            key_G=nothing[:, 0],
            counter_GM=nothing,
        )
        found.append(~backward(tables, log_m_1P, one_line, best=True)[0, :, 0].isneginf())
    return torch.cat(found)[kind_G]


def tempered(log_p_NI: Tensor, temperature: float, never: Tensor) -> tuple[Tensor, float]:
    """Log weights in float64, the largest 0; -inf for what is never written and for nothing else. And the least other.

    It walks through the vocabulary as few times as it can: nothing else here costs as much.
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


def _pair_weights(tables: Tables, log_p_NI: Tensor, temperature: float, never: Tensor, *, best: bool) -> Tensor:
    """[N, P + 1]: for each line and pair of states the log of the sum (or the largest) of the tokens between."""
    C = tables.next_SC.shape[1]
    log_m_NP = log_p_NI.new_full((len(log_p_NI), tables.num_pairs + 1), -torch.inf, dtype=torch.float64)
    num = max(1, _LINES // log_p_NI.shape[1])
    for lo in range(0, len(log_p_NI), num):
        x_NI, least = tempered(log_p_NI[lo : lo + num], temperature, never)
        if least > -_LINEAR and not best:
            w_NC = x_NI.new_zeros(len(x_NI), C).index_add_(1, tables.word_I, x_NI.exp_())
            log_m = (tables.sums_PC @ w_NC.T.contiguous()).T.log()
        else:
            log_w_NC = _grouped(x_NI, tables.word_I, C, best=best)
            few = max(1, _LINES // max(1, len(tables.class_E)))
            parts = (log_w_NC[at : at + few, tables.class_E] for at in range(0, len(log_w_NC), few))
            log_m = torch.cat([_grouped(x_NE, tables.pair_E, tables.num_pairs, best=best) for x_NE in parts])
        log_m_NP[lo : lo + num, :-1] = log_m
    return log_m_NP


def _grouped(x_NK: Tensor, group_K: Tensor, num: int, *, best: bool) -> Tensor:
    """Log-sum-exp (or the largest) of the columns of each group."""
    index_NK = group_K.expand_as(x_NK)
    top = x_NK.new_full((len(x_NK), num), -torch.inf).scatter_reduce(1, index_NK, x_NK, "amax")
    if best:
        return top
    shift = top.masked_fill(top.isneginf(), 0.0)
    total = torch.zeros_like(top).index_add_(1, group_K, (x_NK - shift.gather(1, index_NK)).exp())
    return total.log() + shift


def _sample(tables: Tables, log_p_NI: Tensor, spans: Spans, drawing: Drawing, never: Tensor) -> tuple[Tensor, Tensor]:
    S = tables.num_states
    log_m_NP = _pair_weights(tables, log_p_NI, drawing.temperature, never, best=False)
    beta_MGS = backward(tables, log_m_NP, spans)
    # Before position m the states' weights given what is drawn so far, all that follows included: these are plain
    # probabilities, so they need no logarithms.
    weight_GS = beta_MGS.new_zeros(len(spans.token_GM), S + 1)
    weight_GS[:, 0] = 1
    opens_GM = spans.opens_GM
    stays_GM = (spans.line_GM >= 0) & ~opens_GM
    u_GM = uniform(spans.key_G[:, None], DRAW_TOKEN, spans.counter_GM)
    class_GM = tables.class_I[spans.token_GM]
    token_GM, log_prob_GM = spans.token_GM.clone(), torch.zeros_like(spans.token_GM, dtype=torch.float64)
    flags = torch.stack([opens_GM.any(0), stays_GM.any(0), stays_GM.all(0)]).tolist()
    for m in range(int(opens_GM.any(0).nonzero().max()) + 1):
        # beta after / beta before, in logs: how much a way on is favoured by what must follow.
        before_GS = -beta_MGS[m].masked_fill(beta_MGS[m].isneginf(), torch.inf)
        after_GS = beta_MGS[m + 1]
        if flags[0][m]:
            g = opens_GM[:, m].nonzero().squeeze(1)
            x_GI, _ = tempered(log_p_NI[spans.line_GM[g, m]], drawing.temperature, never)
            log_a_GS = weight_GS[g].log_().add_(before_GS[g])
            token_G, log_prob_GM[g, m] = _draw_token(tables, x_GI, log_a_GS, after_GS[g], u_GM[g, m], drawing)
            token_GM[g, m], class_GM[g, m] = token_G, tables.class_I[token_G]
        moved_GS = None
        if flags[1][m]:
            x_GP = log_m_NP[spans.line_GM[:, m], :-1] + before_GS[:, tables.from_P] + after_GS[:, tables.to_P]
            flow_GP = weight_GS[:, tables.from_P] * x_GP.exp_()
            moved_GS = torch.zeros_like(weight_GS).index_add_(1, tables.to_P, flow_GP)
        if moved_GS is None or not flags[2][m]:
            to_GS = tables.next_SC.T[class_GM[:, m]]
            x_GS = weight_GS[:, :S].log().add_(before_GS[:, :S]).add_(after_GS.gather(1, to_GS))
            known_GS = torch.zeros_like(weight_GS).scatter_add_(1, to_GS, x_GS.softmax(dim=1))
            moved_GS = known_GS if moved_GS is None else torch.where(stays_GM[:, m, None], moved_GS, known_GS)
        weight_GS = moved_GS / moved_GS.sum(dim=1, keepdim=True)
    return token_GM[opens_GM], log_prob_GM[opens_GM]


def _draw_token(
    tables: Tables, x_GI: Tensor, log_a_GS: Tensor, after_GS: Tensor, u_G: Tensor, drawing: Drawing
) -> tuple[Tensor, Tensor]:
    """A token from weight × (sum over states of how far it leads on): the exact law at this position."""
    # Few states carry weight at a time: the others are left out.
    num = int((log_a_GS > -torch.inf).sum(dim=1).max())
    log_a_GK, state_GK = log_a_GS[:, :-1].topk(min(num, log_a_GS.shape[1] - 1), dim=1)
    to_GKC = tables.next_SC[state_GK]
    ahead_GKC = after_GS.gather(1, to_GKC.flatten(1)).view(to_GKC.shape)
    log_r_GC = torch.logsumexp(log_a_GK[:, :, None] + ahead_GKC, dim=1)
    log_q_GI = torch.log_softmax(drawing.cut(x_GI + log_r_GC[:, tables.word_I]), dim=1)
    token_G = categorical(log_q_GI, u_G)
    return token_G, log_q_GI.gather(1, token_G[:, None]).squeeze(1)


def _best(tables: Tables, log_p_NI: Tensor, spans: Spans, drawing: Drawing, never: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest accepted completion (Viterbi); of it, the positions that open."""
    beta_MGS = backward(tables, _pair_weights(tables, log_p_NI, 0.0, never, best=True), spans, best=True)
    state_G = torch.zeros_like(spans.length_G)
    token_GM = spans.token_GM.clone()
    log_prob_GM = torch.zeros_like(token_GM, dtype=torch.float64)
    for m in range(int(spans.opens_GM.any(0).nonzero().max()) + 1):
        g = (spans.line_GM[:, m] >= 0).nonzero().squeeze(1)
        if len(g):
            line_G = spans.line_GM[g, m]
            ahead_GC = beta_MGS[m + 1][g].gather(1, tables.next_SC[state_G[g]])
            x_GI, _ = tempered(log_p_NI[line_G], 0.0, never)
            token_GM[g, m] = (x_GI + ahead_GC[:, tables.word_I]).argmax(dim=1)
            log_prob_GM[g, m] = log_p_NI[line_G].double().log_softmax(dim=1).gather(1, token_GM[g, m, None]).squeeze(1)
        # Behind a shorter span's end the state does not matter any more.
        state_G = tables.next_SC[state_G, tables.class_I[token_GM[:, m]]].clamp(max=tables.num_states - 1)
    return token_GM[spans.opens_GM], log_prob_GM[spans.opens_GM]
