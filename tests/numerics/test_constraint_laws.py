"""A constrained step is the model's factorised step given that the automaton accepts: by enumeration and chi-square."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from chains import World, fits
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from unmask import samplers
from unmask.constraints.automaton import Automaton, interleave, intersect
from unmask.constraints.conditioning import Spans, possible
from unmask.constraints.tables import Tables
from unmask.denoisers.network import Network, as_denoiser
from unmask.errors import NonFiniteError, UsageError
from unmask.noise import LogLinear
from unmask.samplers import Sampler
from unmask.samplers.planned import Plan, PlannedSampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.constrained import spans_of
from unmask.sampling.loop import sample, steps

NUM = 30_000
P_MIN = 1e-4


@dataclass(frozen=True, kw_only=True)
class Given(PlannedSampler):
    """Opens what it is told to, round by round; the rest at the end."""

    rounds: tuple[tuple[int, ...], ...]

    def max_calls(self, length: int) -> int:
        return len(self.rounds) + 1

    def plan(self, canvas: Canvas) -> Plan:
        open_BL = canvas.open_BL.numpy()
        rank_L = np.full(open_BL.shape[1], len(self.rounds))
        for rank, positions in enumerate(self.rounds):
            rank_L[list(positions)] = rank
        rank_BL = np.where(open_BL, rank_L, -1)
        return Plan(rank_BL, np.ones(rank_BL.shape))


def random_automaton(seed: int, S: int, V: int, mask_id: int, dead: float = 0.25, over: str = "text") -> Automaton:
    """Any table, some of whose ways are closed. The mask leads nowhere."""
    g = np.random.default_rng(seed)
    next_SI = g.integers(0, S, (S, V + 1)).astype(np.int32)
    next_SI[g.random(next_SI.shape) < dead] = -1
    next_SI[:, mask_id] = -1
    accept_S = g.random(S) < 0.5
    accept_S[g.integers(S)] = True
    return Automaton.of(next_SI, accept_S, over)


def accepted(world: World, automaton: Automaton) -> Tensor:
    """[states] which of the world's states are texts that the automaton accepts."""
    return torch.tensor([world.mask_id not in x and automaton.accepts(x) for x in world.states.tolist()])


def completions(world: World, automaton: Automaton | Tensor, z_L: Tensor, temperature: float = 1.0) -> Tensor:
    """[states] the law of whole completions of z under the factorised step, given that they are accepted."""
    p_LI = world.x_theta(z_L[None], 1.0)[0]
    law = (automaton if isinstance(automaton, Tensor) else accepted(world, automaton)).double()
    for position in range(world.L):
        p_I = p_LI[position] ** (1 / temperature)
        law = law * (p_I / p_I.sum())[world.states[:, position]]
    return law / law.sum()


def constrained_world(seed: int, V: int, L: int, S: int, fixed: dict[int, int]) -> tuple[World, Automaton, Tensor]:
    """A table, an automaton and a canvas row: less than half of all texts obey, at no position just one token."""
    world = World.random(V, L, seed=seed)
    z_L = torch.full((L,), world.mask_id)
    for position, token in fixed.items():
        z_L[position] = token
    for attempt in range(1000):
        automaton = random_automaton(seed + 1000 * attempt, S, V, world.mask_id)
        left = world.states[completions(world, automaton, z_L) > 0]
        masked = z_L == world.mask_id
        every = V ** int(masked.sum())
        if len(left) < every / 2 and all(len(column.unique()) > 1 for column in left[:, masked].T):
            return world, automaton, z_L
    raise AssertionError("no automaton fits")


def canvas_of(world: World, automaton: Automaton, z_L: Tensor, num: int, seed: int = 5) -> Canvas:
    canvas = Canvas.of(z_L.repeat(num, 1), mask_id=world.mask_id, seed=seed)
    return dataclasses.replace(canvas, constraint=automaton)


CASES = [
    (0, 2, 3, 2, {}, (0, 1, 2)),
    (1, 3, 4, 3, {}, (1, 3)),
    (2, 4, 4, 4, {0: 1}, (2,)),
    (3, 3, 5, 5, {2: 0}, (0, 4)),
    (4, 4, 5, 3, {}, (0, 1, 2, 3, 4)),
    (5, 2, 5, 6, {4: 1}, (1, 2)),
]


@pytest.mark.parametrize(("seed", "V", "L", "S", "fixed", "opens"), CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_opens_has_exactly_the_conditioned_probability(
    seed: int, V: int, L: int, S: int, fixed: dict[int, int], opens: tuple[int, ...], temperature: float
) -> None:
    """The probability told with each draw is the enumerated marginal of the positions that open, to 1e-9."""
    world, automaton, z_L = constrained_world(seed, V, L, S, fixed)
    law = completions(world, automaton, z_L, temperature)
    canvas = canvas_of(world, automaton, z_L, num=300)
    step = next(steps(world.denoiser(), canvas, Given(rounds=(opens,), temperature=temperature)))
    columns = list(opens)
    told_B = torch.zeros(300).double().index_add(0, step.row_N, step.log_prob_N.double())
    seen = set()
    for row, told in zip(step.tokens_BL.tolist(), told_B.tolist(), strict=True):
        agrees = (world.states[:, columns] == torch.tensor(row)[columns]).all(dim=1)
        assert math.exp(told) == pytest.approx(float(law[agrees].sum()), rel=1e-9)
        seen.add(tuple(row[c] for c in columns))
        assert [row[i] for i in range(L) if i not in opens] == [int(z_L[i]) for i in range(L) if i not in opens]
    assert len(seen) > 1


@pytest.mark.parametrize(("seed", "V", "L", "S", "fixed", "opens"), CASES)
def test_what_opens_follows_the_conditioned_law(
    seed: int, V: int, L: int, S: int, fixed: dict[int, int], opens: tuple[int, ...]
) -> None:
    world, automaton, z_L = constrained_world(seed, V, L, S, fixed)
    law = completions(world, automaton, z_L)
    step = next(steps(world.denoiser(), canvas_of(world, automaton, z_L, num=NUM), Given(rounds=(opens,))))
    marginal = torch.zeros_like(law)
    partial = world.states.clone()
    rest = [i for i in range(L) if i not in opens]
    partial[:, rest] = z_L[rest]
    marginal.index_add_(0, world.index(partial), law)
    assert fits(world, step.tokens_BL, marginal) > P_MIN


def step_matrix(world: World, automaton: Automaton, opening: float) -> Tensor:
    """Each masked position opens with this chance; what opens follows the conditioned law of the step."""
    matrix = torch.zeros(len(world.states), len(world.states)).double()
    for i, z_L in enumerate(world.states):
        law = completions(world, automaton, z_L)
        if law.isnan().any():
            continue  # nothing can become of it: it is never reached
        masked = (z_L == world.mask_id).nonzero().flatten().tolist()
        for num in range(len(masked) + 1):
            for opens in itertools.combinations(masked, num):
                rest = [position for position in range(world.L) if position not in opens]
                partial = world.states.clone()
                partial[:, rest] = z_L[rest]
                chance = opening**num * (1 - opening) ** (len(masked) - num)
                matrix[i].index_add_(0, world.index(partial), chance * law)
    return matrix


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_whole_chain_has_the_law_of_conditioned_steps(num_steps: int) -> None:
    world, automaton, z_L = constrained_world(7, 2, 3, 3, {})
    law = torch.zeros(len(world.states)).double()
    law[world.index(z_L[None])] = 1
    alpha = LogLinear().alpha(torch.arange(num_steps + 1, dtype=torch.float64) / num_steps).tolist()
    for i in range(num_steps, 0, -1):
        law = law @ step_matrix(world, automaton, (alpha[i - 1] - alpha[i]) / (1 - alpha[i]))
    tokens = sample(world.denoiser(), canvas_of(world, automaton, z_L, NUM), samplers.Ancestral(steps=num_steps)).tokens
    assert fits(world, tokens, law) > P_MIN


@pytest.mark.parametrize("num_steps", [1, 3])
def test_the_textbook_chain_holds_a_constraint_with_the_same_law(num_steps: int) -> None:
    world, automaton, z_L = constrained_world(7, 2, 3, 3, {})
    law = torch.zeros(len(world.states)).double()
    law[world.index(z_L[None])] = 1
    alpha = LogLinear().alpha(torch.arange(num_steps + 1, dtype=torch.float64) / num_steps).tolist()
    for i in range(num_steps, 0, -1):
        law = law @ step_matrix(world, automaton, (alpha[i - 1] - alpha[i]) / (1 - alpha[i]))
    tokens = sample(world.denoiser(), canvas_of(world, automaton, z_L, NUM), samplers.Posterior(steps=num_steps)).tokens
    assert fits(world, tokens, law) > P_MIN


def masks_again(world: World, sigma: float) -> Tensor:
    """Each token is masked with this chance."""
    matrix = torch.zeros(len(world.states), len(world.states)).double()
    for i, z_L in enumerate(world.states):
        written = (z_L != world.mask_id).nonzero().flatten().tolist()
        for num in range(len(written) + 1):
            for again in itertools.combinations(written, num):
                to = z_L.clone()
                to[list(again)] = world.mask_id
                matrix[i, world.index(to[None])] += sigma**num * (1 - sigma) ** (len(written) - num)
    return matrix


@pytest.mark.parametrize(("V", "fixed"), [(2, {}), (3, {0: 1})])
def test_a_chain_with_remasking_holds_a_constraint_step_by_step(V: int, fixed: dict[int, int]) -> None:
    """A move draws what opens given that what stands before it can be completed; then tokens are masked again, of those
    that stood before the move."""
    world, automaton, z_L = constrained_world(7, V, 3, 3, fixed)
    sampler = samplers.ReMDM(steps=3, eta=0.4)
    law = torch.zeros(len(world.states)).double()
    law[world.index(z_L[None])] = 1
    for move in sampler.moves():
        after = torch.zeros_like(law)
        opening, removing = step_matrix(world, automaton, move.opening), masks_again(world, move.sigma)
        for i in law.nonzero().flatten().tolist():
            # what stood before the move and is masked by it, beside what it opens: the two are independent
            before = world.states[i]
            stood = [p for p in range(world.L) if before[p] != world.mask_id and p not in fixed]
            for j in opening[i].nonzero().flatten().tolist():
                for k in removing[i].nonzero().flatten().tolist():
                    to = world.states[j].clone()
                    to[[p for p in stood if world.states[k][p] == world.mask_id]] = world.mask_id
                    if any(world.states[k][p] == world.mask_id for p in fixed):
                        continue  # what is given is never masked
                    chance = removing[i, k] / (1 - move.sigma) ** len(fixed)
                    after[world.index(to[None])] += law[i] * opening[i, j] * chance
        law = after
    assert float(law.sum()) == pytest.approx(1)
    tokens = sample(world.denoiser(), canvas_of(world, automaton, z_L, NUM), sampler).tokens
    assert all(automaton.accepts(row) for row in tokens[:500].tolist())
    assert fits(world, tokens, law) > P_MIN
    plain = samplers.Ancestral(steps=3)
    assert fits(world, sample(world.denoiser(), canvas_of(world, automaton, z_L, NUM), plain).tokens, law) < 0.01


def test_it_is_not_the_chain_conditioned_on_its_end() -> None:
    """What the guide says of the law: step by step is another one, and these draws tell the two apart."""
    world, automaton, z_L = constrained_world(7, 2, 3, 3, {})
    whole = world.chain_law(LogLinear(), 3) * accepted(world, automaton)
    tokens = sample(world.denoiser(), canvas_of(world, automaton, z_L, NUM), samplers.Ancestral(steps=3)).tokens
    assert fits(world, tokens, whole / whole.sum()) < 1e-8


def test_top_k_and_top_p_cut_the_conditioned_law_and_never_the_last_way_out() -> None:
    """Position 0 may be anything, position 1 must repeat it: the cut is made on what the pattern leaves."""
    world = World.random(V=4, L=2, seed=6)
    next_SI = np.full((6, 5), -1, dtype=np.int32)
    next_SI[0, :4] = [1, 2, 3, 4]
    next_SI[[1, 2, 3, 4], [0, 1, 2, 3]] = 5
    twice = Automaton.of(next_SI, np.arange(6) == 5)
    z_L = torch.tensor([4, 4])
    law = completions(world, twice, z_L)
    best = law.argsort(descending=True)
    for options in ({"top_k": 2}, {"top_p": float(law[best[:2]].sum()) - 1e-6}):
        cut = torch.zeros_like(law)
        cut[best[:2]] = law[best[:2]]
        sampler = samplers.Ancestral(steps=1, **options)  # type: ignore[arg-type]
        tokens = sample(world.denoiser(), canvas_of(world, twice, z_L, NUM), sampler).tokens
        assert fits(world, tokens, cut / cut.sum()) > P_MIN
    only = canvas_of(world, twice, torch.tensor([4, 4]), 50)
    for sampler in (samplers.Ancestral(steps=2, top_k=1), samplers.LeftToRight(top_p=1e-9)):
        tokens = sample(world.denoiser(), only, sampler).tokens
        assert (tokens[:, 0] == tokens[:, 1]).all()


@pytest.mark.parametrize(("seed", "V", "L", "S", "fixed", "opens"), CASES)
def test_temperature_zero_opens_the_likeliest_completion(
    seed: int, V: int, L: int, S: int, fixed: dict[int, int], opens: tuple[int, ...]
) -> None:
    world, automaton, z_L = constrained_world(seed, V, L, S, fixed)
    best = world.states[completions(world, automaton, z_L).argmax()]
    for temperature in (0.0, 1e-30, 1e-3):
        canvas = canvas_of(world, automaton, z_L, num=3)
        step = next(steps(world.denoiser(), canvas, Given(rounds=(opens,), temperature=temperature)))
        assert (step.tokens_BL[:, list(opens)] == best[list(opens)]).all()


def flat(logits_LI: Tensor) -> Network:
    """A denoiser that says the same whatever it sees."""
    return as_denoiser(
        lambda z, level: logits_LI.expand(len(z), *logits_LI.shape), vocab_size=logits_LI.shape[1] - 1,
        mask_id=logits_LI.shape[1] - 1,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.01, 1e-6, 0.0])
@pytest.mark.parametrize("scale", [1.0, 40.0, math.inf])
def test_nothing_underflows(temperature: float, scale: float) -> None:
    """The model is sure of token 0 at 400 positions; the pattern wants token 1 at each but the last."""
    L = 400
    logits_LI = torch.zeros(L, 4)
    logits_LI[:, 1:] = -scale
    # State 1 has read ones, state 2 the zero behind them; nothing leads to state 3, where all is well.
    next_SC = np.array([[-1, 1, -1, -1], [2, 1, -1, -1], [-1, -1, -1, -1], [3, 3, 3, -1]], dtype=np.int32)
    ones = Automaton(next_SC, np.array([False, False, True, True]), np.arange(4))
    canvas = dataclasses.replace(Canvas.blank(num=2, length=L, mask_id=3), constraint=ones)
    tokens = sample(flat(logits_LI), canvas, samplers.Ancestral(steps=3, temperature=temperature)).tokens
    assert (tokens[:, :-1] == 1).all()
    assert (tokens[:, -1] == 0).all()


def test_a_wide_range_in_one_step_is_still_exact() -> None:
    """Weights of e^-5000 decide between two ways when the pattern closes the rest; their ratio is kept."""
    logits_LI = torch.tensor([[0.0, -5000.0, -5001.0, 0.0], [0.0, -5001.0, -5000.0, 0.0]]).double()
    next_SI = np.array([[-1, 1, 1, -1], [-1, 2, 2, -1], [-1, -1, -1, -1]], dtype=np.int32)
    automaton = Automaton.of(next_SI, np.array([False, False, True]))
    canvas = dataclasses.replace(Canvas.blank(num=NUM, length=2, mask_id=3), constraint=automaton)
    tokens = sample(flat(logits_LI), canvas, samplers.Ancestral(steps=2)).tokens
    share = 1 / (1 + math.exp(-1))
    error = 5 * math.sqrt(share * (1 - share) / NUM)
    assert abs(float((tokens[:, 0] == 1).double().mean()) - share) < error
    assert abs(float((tokens[:, 1] == 2).double().mean()) - share) < error


def test_a_prediction_that_is_not_a_number_is_reported() -> None:
    automaton = random_automaton(0, 1, 2, 2, dead=0.0)
    canvas = dataclasses.replace(Canvas.blank(num=1, length=2, mask_id=2), constraint=automaton)
    with pytest.raises(NonFiniteError, match="not a number"):
        sample(flat(torch.full((2, 3), math.nan)), canvas, samplers.Ancestral(steps=1))


ORDERS = (
    samplers.Ancestral(steps=1),
    samplers.Ancestral(steps=3),
    samplers.Ancestral(steps=None, temperature=0.5),
    samplers.LeftToRight(top_k=1),
    samplers.Ancestral(steps=2, temperature=0),
    samplers.Ancestral(steps=2, top_p=0.5),
)


def _spans(canvas: Canvas, over: str) -> list[tuple[int, list[int]]]:
    row_G, column_GM = spans_of(canvas, over)
    return [
        (row, [c for c in column if c >= 0]) for row, column in zip(row_G.tolist(), column_GM.tolist(), strict=True)
    ]


@given(
    seed=st.integers(0, 10**6), S=st.integers(1, 6), V=st.integers(1, 4), L=st.integers(1, 5), data=st.data(),
    over=st.sampled_from(["text", "gap"]), sampler=st.sampled_from(ORDERS),
)  # fmt: skip
def test_always(seed: int, S: int, V: int, L: int, data: st.DataObject, over: str, sampler: Sampler) -> None:
    """Refused before the first call exactly where no text obeys; else obeyed, fixed positions kept, no mask left, no
    more calls than promised, and each row as if it were alone."""
    world = World.random(V, L, seed=seed % 97)
    automaton = random_automaton(seed, S, V, world.mask_id, over=over)
    rows = data.draw(st.lists(st.lists(st.integers(0, V), min_size=L, max_size=L), min_size=1, max_size=3))
    assume(any(world.mask_id in row for row in rows))
    canvas = dataclasses.replace(Canvas.of(torch.tensor(rows), mask_id=world.mask_id, seed=seed), constraint=automaton)
    spans = [(row, column[0], column[-1] + 1) for row, column in _spans(canvas, over)]

    def obeys(row: list[int], lo: int, hi: int) -> bool:
        return automaton.accepts(row[lo:hi])

    can = all(
        any(obeys(text, lo, hi) for text in world.texts.tolist() if agrees(text, rows[row], world.mask_id))
        for row, lo, hi in spans
    )
    calls = 0

    def count(z_BL: Tensor, level_B: Tensor | None) -> Tensor:
        nonlocal calls
        calls += 1
        return world.f(z_BL, level_B)

    net = as_denoiser(count, vocab_size=V, mask_id=world.mask_id, uses_level=False)
    if not can:
        with pytest.raises(UsageError, match="the constraint cannot hold in"):
            sample(net, canvas, sampler)
        assert calls == 0
        return
    tokens = sample(net, canvas, sampler).tokens
    assert 0 < calls <= sampler.max_calls(L)
    assert (tokens != world.mask_id).all()
    assert all(obeys(tokens[row].tolist(), lo, hi) for row, lo, hi in spans)
    assert all(agrees(text, row, world.mask_id) for text, row in zip(tokens.tolist(), rows, strict=True))
    for i in range(len(rows)):
        if world.mask_id in rows[i]:
            alone = dataclasses.replace(
                canvas,
                tokens=canvas.tokens[i : i + 1],
                open_BL=canvas.open_BL[i : i + 1],
                key_B=canvas.key_B[i : i + 1],
            )
            assert sample(net, alone, sampler).tokens[0].tolist() == tokens[i].tolist()


def agrees(text: list[int], row: list[int], mask_id: int) -> bool:
    return all(b in (mask_id, a) for a, b in zip(text, row, strict=True))


def test_forbidden_ids_are_not_written_and_count_in_what_is_possible() -> None:
    next_SI = np.array([[0, 0, 1, -1], [-1, -1, -1, -1]], dtype=np.int32)
    automaton = Automaton.of(next_SI, np.array([False, True]))  # any number of 0 and 1, then 2
    canvas = dataclasses.replace(Canvas.blank(num=200, length=4, mask_id=3), constraint=automaton)
    world = World.random(V=3, L=4)
    tokens = sample(world.denoiser(), dataclasses.replace(canvas, forbidden=(0,)), samplers.Ancestral()).tokens
    assert tokens.tolist() == [[1, 1, 1, 2]] * 200
    with pytest.raises(UsageError, match=r"a text of 4 tokens \(row 0\): nothing of just that length obeys it"):
        sample(world.denoiser(), dataclasses.replace(canvas, forbidden=(2,)), samplers.Ancestral())


@given(seed=st.integers(0, 10**6), S=st.integers(1, 5), T=st.integers(1, 5))
def test_the_intersection_accepts_what_both_do(seed: int, S: int, T: int) -> None:
    a, b = random_automaton(seed, S, 2, 2), random_automaton(seed + 1, T, 2, 2)
    texts = [x for n in range(6) for x in itertools.product(range(2), repeat=n)]
    both = [a.accepts(x) and b.accepts(x) for x in texts]
    try:
        joined = intersect(a, b)
    except UsageError:
        assert not any(both)
        return
    assert [joined.accepts(x) for x in texts] == both


@given(seed=st.integers(0, 10**6), S=st.integers(1, 8), V=st.integers(1, 4))
def test_reducing_changes_nothing(seed: int, S: int, V: int) -> None:
    g = np.random.default_rng(seed)
    next_SI = g.integers(-1, S, (S, V)).astype(np.int32)
    accept_S = g.random(S) < 0.4
    plain, small = Automaton(next_SI, accept_S, np.arange(V)), Automaton.of(next_SI, accept_S)
    assert small.num_states <= S
    for text in (x for n in range(5) for x in itertools.product(range(V), repeat=n)):
        assert plain.accepts(text) == small.accepts(text)


def test_states_with_many_ways_on_are_read_in_tables_of_their_size() -> None:
    """One state leads to 300 others, each of which leads on alone; all of it still follows the law."""
    S, V = 302, 300
    next_SI = np.full((S, V + 1), -1, dtype=np.int32)
    next_SI[0, :V] = np.arange(1, V + 1)
    next_SI[np.arange(1, V + 1), np.arange(V)] = S - 1
    automaton = Automaton.of(next_SI, np.arange(S) == S - 1)
    tables = Tables.of(automaton, torch.device("cpu"))
    assert len(tables.by_state) > 1
    logits_LI = torch.randn(2, V + 1, generator=torch.Generator().manual_seed(0))
    canvas = dataclasses.replace(Canvas.blank(num=2000, length=2, mask_id=V), constraint=automaton)
    tokens = sample(flat(logits_LI), canvas, samplers.Ancestral(steps=1)).tokens
    assert (tokens[:, 0] == tokens[:, 1]).all()
    law = logits_LI[:, :V].double().sum(0).softmax(0)
    mean = float((law * torch.arange(V)).sum())
    spread = math.sqrt(float((law * (torch.arange(V) - mean) ** 2).sum()) / 2000)
    assert abs(float(tokens[:, 0].double().mean()) - mean) < 5 * spread
    assert possible(tables, _all(canvas), torch.tensor([V])).all()


def test_an_automaton_that_would_fill_the_memory_is_refused() -> None:
    canvas = dataclasses.replace(
        Canvas.blank(num=1, length=2, mask_id=1000), constraint=random_automaton(0, 1000, 1000, 1000, dead=0.0)
    )
    with pytest.raises(UsageError, match="ways between its 1000 states"):
        sample(flat(torch.zeros(2, 1001)), canvas, samplers.Ancestral())


def _all(canvas: Canvas) -> Spans:
    B, L = canvas.tokens.shape
    line_BL = torch.arange(B * L).view(B, L)
    return Spans(
        canvas.tokens, line_BL, canvas.open_BL, torch.full((B,), L), canvas.key_B, torch.arange(L).expand(B, L)
    )


# --- adaptive orders --------------------------------------------------------------------------------------------------


def surest_first(world: World, automaton: Automaton, z_L: Tensor, sure: Callable[[Tensor], Tensor]) -> Tensor:
    """The law of the chain that opens the surest position, one a call, each draw conditioned on the pattern."""
    law = torch.zeros(len(world.states), dtype=torch.float64)
    law[world.index(z_L[None])] = 1
    for _ in range(int((z_L == world.mask_id).sum())):
        new = torch.zeros_like(law)
        for i in law.nonzero().flatten().tolist():
            z = world.states[i]
            masked = (z == world.mask_id).nonzero().flatten()
            position = int(masked[sure(world.x_theta(z[None], 1.0)[0, masked]).argmax()])
            whole = completions(world, automaton, z)
            for v in range(world.V):
                to = z.clone()
                to[position] = v
                new[world.index(to[None])] += law[i] * whole[world.states[:, position] == v].sum()
        law = new
    return law


@pytest.mark.parametrize(("seed", "V", "L", "S", "fixed", "opens"), CASES[:4])
@pytest.mark.parametrize("order", ["confidence", "margin", "entropy"])
def test_an_adaptive_order_follows_the_conditioned_law(
    seed: int, V: int, L: int, S: int, fixed: dict[int, int], opens: tuple[int, ...], order: str
) -> None:
    world, automaton, z_L = constrained_world(seed, V, L, S, fixed)
    sure: dict[str, Callable[[Tensor], Tensor]] = {
        "confidence": lambda p: p.max(dim=1).values,
        "margin": lambda p: -(p.topk(2, dim=1).values.diff(dim=1).squeeze(1)),
        "entropy": lambda p: (p * p.clamp(min=1e-300).log()).sum(dim=1),
    }
    sampler = {"confidence": samplers.Confidence, "margin": samplers.Margin, "entropy": samplers.Entropy}[order]()
    tokens = sample(world.denoiser(), canvas_of(world, automaton, z_L, num=10_000), sampler).tokens
    assert fits(world, tokens, surest_first(world, automaton, z_L, sure[order])) > P_MIN


@pytest.mark.parametrize(
    "sampler",
    [
        samplers.Threshold(threshold=0.6),
        samplers.EntropyBounded(gamma=0.5),
        samplers.Confidence(steps=2, random=0.5),
        samplers.Confidence(steps=2, draw="argmax"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("over", ["text", "gap"])
def test_every_order_ends_in_what_is_accepted(sampler: Sampler, over: str) -> None:
    world = World.random(3, 5, seed=3)
    z_L = torch.tensor([world.mask_id, world.mask_id, 0, world.mask_id, world.mask_id])
    automaton = random_automaton(12, 4, 3, world.mask_id, dead=0.1, over=over)
    tokens = sample(world.denoiser(), canvas_of(world, automaton, z_L, num=500), sampler).tokens
    for row in tokens.tolist():
        assert row[2] == 0
        assert all(map(automaton.accepts, [row] if over == "text" else [row[:2], row[3:]]))


# --- blocks, windows, gaps and text together --------------------------------------------------------------------------


def in_rounds(world: World, good: Tensor, z_L: Tensor, rounds: list[tuple[int, ...]]) -> Tensor:
    """The law of opening these positions round by round, each the conditioned step's."""
    law = torch.zeros(len(world.states)).double()
    law[world.index(z_L[None])] = 1
    for opens in rounds:
        after = torch.zeros_like(law)
        for i in law.nonzero().flatten().tolist():
            rest = [p for p in range(world.L) if p not in opens]
            partial = world.states.clone()
            partial[:, rest] = world.states[i][rest]
            after.index_add_(0, world.index(partial), law[i] * completions(world, good, world.states[i]))
        law = after
    return law


@pytest.mark.parametrize("over", ["text", "gap"])
def test_block_by_block_the_steps_are_conditioned_on_the_whole(over: str) -> None:
    """Blocks of two, each opened at once: the automaton reads far beyond the block."""
    world, automaton, z_L = constrained_world(3, 3, 5, 5, {})
    automaton = dataclasses.replace(automaton, over=over)
    canvas, good = canvas_of(world, automaton, z_L, 10_000), accepted(world, automaton)
    for inner in (samplers.Ancestral(steps=1), samplers.Confidence(steps=1)):
        tokens = sample(world.denoiser(), canvas, samplers.Block(size=2, inner=inner)).tokens
        assert fits(world, tokens, in_rounds(world, good, z_L, [(0, 1), (2, 3), (4,)])) > P_MIN
    assert fits(world, tokens, in_rounds(world, good, z_L, [(0, 1, 2, 3, 4)])) < 1e-8


def test_one_window_holds_a_constraint_and_two_do_not() -> None:
    world, automaton, z_L = constrained_world(3, 3, 5, 5, {2: 0})
    canvas = canvas_of(world, automaton, z_L, 200)
    plain = samplers.Ancestral(steps=2)
    for around in (samplers.SemiAR(window=5, inner=plain), samplers.SemiAR(window=9, inner=plain)):
        assert sample(world.denoiser(), canvas, around).tokens.equal(sample(world.denoiser(), canvas, plain).tokens)
    for inside in (samplers.Block(size=2, inner=plain), samplers.Confidence(tokens=2)):
        tokens = sample(world.denoiser(), canvas, samplers.SemiAR(window=5, inner=inside)).tokens
        assert all(automaton.accepts(row) for row in tokens.tolist())
    with pytest.raises(UsageError, match="held within one window"):
        sample(world.denoiser(), canvas, samplers.SemiAR(window=4, inner=plain))


@pytest.mark.parametrize("sampler", [Given(rounds=((1, 4),)), samplers.Block(size=3, inner=samplers.LeftToRight())])
def test_gap_and_text_constraints_hold_together_with_the_conditioned_law(sampler: Sampler) -> None:
    """Two gaps, of which each must be accepted by one automaton and the whole by another."""
    world = World.random(3, 5, seed=2)
    z_L = torch.tensor([3, 3, 1, 3, 3])
    every = [x for x in world.texts.tolist() if agrees(x, z_L.tolist(), world.mask_id)]
    for seed in itertools.count():
        text = random_automaton(seed, 3, 3, world.mask_id)
        gap = random_automaton(seed + 10_000, 3, 3, world.mask_id, over="gap")
        only_text = [x for x in every if text.accepts(x)]
        fine = [x for x in only_text if gap.accepts(x[:2]) and gap.accepts(x[3:])]
        if 8 < len(fine) < len(only_text) < 60:
            break
    both = interleave(text, gap)

    good = torch.tensor([x in fine for x in world.states.tolist()])
    canvas = canvas_of(world, both, z_L, 10_000)
    tokens = sample(world.denoiser(), canvas, sampler).tokens
    rounds = [(1, 4), (0, 3)] if isinstance(sampler, Given) else [(0,), (1,), (3,), (4,)]
    assert all(row in fine for row in tokens[:500].tolist())
    assert fits(world, tokens, in_rounds(world, good, z_L, rounds)) > P_MIN
    best = sample(
        world.denoiser(), canvas_of(world, both, z_L, 5), Given(rounds=((0, 1, 3, 4),), temperature=0.0)
    ).tokens
    assert best[0].equal(world.states[completions(world, good, z_L).argmax()])


def test_gap_and_text_that_exclude_each_other_are_refused_before_the_first_call() -> None:
    ones = Automaton.of(np.array([[-1, 0, -1]], dtype=np.int32), np.array([True]), "gap")
    zeros = Automaton.of(np.array([[0, -1, -1]], dtype=np.int32), np.array([True]))
    canvas = Canvas.of(torch.tensor([[0, 2, 0]]), mask_id=2)
    net = as_denoiser(lambda z, level: pytest.fail("called"), vocab_size=2, mask_id=2)
    with pytest.raises(UsageError, match="a text of 3 tokens with what is fixed in it"):
        sample(net, dataclasses.replace(canvas, constraint=interleave(zeros, ones)), samplers.Ancestral())
