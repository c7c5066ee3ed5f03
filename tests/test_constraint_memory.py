"""What constrained rows hold: tables once, whatever the number of rows, and a bounded share of the messages."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unmask import samplers
from unmask.constraints import conditioning, tables
from unmask.constraints.automaton import Automaton
from unmask.constraints.tables import Tables, tables_of
from unmask.denoisers.network import Network, as_denoiser
from unmask.samplers import Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.constrained import constrained
from unmask.sampling.loop import sample

CPU = torch.device("cpu")
IDS = 40


def ring(S: int, V: int = IDS - 1, seed: int = 0) -> Automaton:
    """From each state a token leads one to three states on; some tokens lead nowhere. The last id is the mask."""
    g = np.random.default_rng(seed)
    step_SV = g.integers(1, 4, (S, V))
    next_SI = np.full((S, V + 1), -1, dtype=np.int32)
    next_SI[:, :V] = np.where(g.random((S, V)) < 0.2, -1, (np.arange(S)[:, None] + step_SV) % S)
    return Automaton.of(next_SI, np.arange(S) % 5 == 0)


def even(V: int = IDS - 1) -> Network:
    """Laws of no pattern's liking, the same in every call."""
    logits_LI = torch.randn(512, V + 1, generator=torch.Generator().manual_seed(1))
    return as_denoiser(lambda z, level: logits_LI[: z.shape[1]].expand(len(z), -1, -1), vocab_size=V, mask_id=V)


def blank(automaton: Automaton, num: int, length: int, mask_id: int = IDS - 1) -> Canvas:
    return dataclasses.replace(Canvas.blank(num=num, length=length, mask_id=mask_id), constraint=automaton)


def test_rows_and_threads_share_one_table_and_it_goes_with_the_automaton(monkeypatch: pytest.MonkeyPatch) -> None:
    automaton, made = ring(12), []
    plain = Tables.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Tables, "of", classmethod(lambda cls, *how: made.append(how) or plain(cls, *how)))
    held, canvas = constrained(samplers.Ancestral(steps=2)), blank(automaton, 1, 9)
    with ThreadPoolExecutor(8) as pool:
        states = list(pool.map(held.start, [canvas] * 16))
    assert len(made) == 1
    assert len({id(state.tables) for state in states}) == 1
    made.clear()
    gone = weakref.ref(states[0].tables)
    assert automaton in tables._shared
    del states, canvas, automaton
    gc.collect()
    assert gone() is None


def test_the_ways_travel_with_an_automaton_and_are_on_its_own_memory() -> None:
    automaton = ring(30)
    ways = automaton.ways
    there = pickle.loads(pickle.dumps(automaton))
    assert "ways" in vars(there)
    assert all(np.array_equal(a, b) for a, b in zip(vars(ways).values(), vars(there.ways).values(), strict=True))
    assert tables_of(there, CPU).next_SC.data_ptr() == there.next_SC.ctypes.data


def test_sets_of_classes_are_kept_once() -> None:
    """Of a pattern that repeats itself ten times they are no more than of one turn."""
    for times in (1, 10):
        S, V = 21 * times, 30
        next_SI = np.full((S + 2, V + 1), -1, dtype=np.int32)
        for s in range(S):
            next_SI[s, :V] = np.where(
                np.arange(V) == s % 21, -1, np.where(np.arange(V) % 7 == s % 21 % 7, s + 2, s + 1)
            )
        ways = Automaton.of(next_SI, np.arange(S + 2) >= S).ways
        assert ways.num_pairs > 30 * times
        assert ways.num_sets <= 64
        assert [*zip(ways.from_P, ways.to_P, strict=True)] == sorted({*zip(ways.from_P, ways.to_P, strict=True)})


@pytest.mark.parametrize(
    "sampler",
    [
        samplers.Ancestral(steps=3),
        samplers.Ancestral(steps=3, temperature=0.5, top_k=4),
        samplers.Ancestral(steps=2, temperature=0),
        samplers.LeftToRight(),
        samplers.Block(size=5, inner=samplers.Confidence(steps=2)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("wide", [False, True])
def test_blocks_and_chunks_change_no_text(sampler: Sampler, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all messages, for those of a few positions, and of one. wide: logs that are summed as logs."""
    automaton, net = ring(17), even()
    if wide:
        logits_LI = 900 * torch.randn(32, IDS, generator=torch.Generator().manual_seed(2))
        net = as_denoiser(lambda z, level: logits_LI[: z.shape[1]].expand(len(z), -1, -1), vocab_size=39, mask_id=39)
    canvas = blank(automaton, 3, 12)
    tokens = canvas.tokens.clone()
    tokens[1, 5:8] = sample(net, canvas, samplers.Ancestral(steps=1)).tokens[1, 5:8]  # some are fixed
    canvas = dataclasses.replace(canvas, tokens=tokens)
    whole = sample(net, canvas, sampler).tokens
    for cells, lines in ((1000, 1 << 19), (1, 200)):
        monkeypatch.setattr(conditioning, "CELLS", cells)
        monkeypatch.setattr(conditioning, "LINES", lines)
        assert torch.equal(sample(net, canvas, sampler).tokens, whole)
    assert all(automaton.accepts(row) for row in whole.tolist())


class Largest(TorchDispatchMode):
    """The most bytes of one new tensor."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor) and x.layout == torch.strided}
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.layout == torch.strided:
            storage = found.untyped_storage()
            self.most = max(self.most, 0 if storage.data_ptr() in given else storage.nbytes())
        return found


def test_no_step_holds_much_however_large_the_automaton_and_long_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor has more numbers than the limit; each token's way on from every state, or the weights of all positions,
    would be twice as many at least."""
    S, V, L = 200, 80, 24
    automaton = ring(S, V)
    tables_of(automaton, CPU)
    monkeypatch.setattr(conditioning, "CELLS", 1 << 14, raising=False)
    monkeypatch.setattr(conditioning, "LINES", 1 << 12, raising=False)
    canvas, net = blank(automaton, 2, L, V), even(V)
    for sampler in (samplers.Ancestral(steps=2), samplers.Ancestral(steps=2, temperature=0)):
        with Largest() as largest:
            sample(net, canvas, sampler)
        assert largest.most <= 8 << 14


def test_what_it_costs_is_told() -> None:
    small, large = ring(5), ring(200, 200)
    assert small.cost(100).call < large.cost(100).call
    assert small.cost(100).call * 3 == small.cost(300).call
    assert large.cost(100).call < large.cost(100, likeliest=True).call
    assert large.cost(100).token > 26 * large.num_states * large.num_classes
    tables = tables_of(large, CPU)
    tensors = [x for x in vars(tables).values() if isinstance(x, Tensor) and x.layout == torch.strided]
    tensors += [x for both in tables.by_state for x in both]
    tensors += [tables.sums_UC.crow_indices(), tables.sums_UC.col_indices(), tables.sums_UC.values()]
    held = sum(x.untyped_storage().nbytes() for x in tensors)
    assert held <= large.cost(100).shared_bytes <= 3 * held
    # Whatever the length, a row holds a bounded number of messages; its predictions are the network's.
    long = large.cost(1 << 20)
    assert long.row_bytes - 4 * (1 << 20) * large.num_words < 8 * (3 * conditioning.CELLS)
