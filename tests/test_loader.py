"""The order of rows: every epoch a permutation, the same whatever the slices, and a thread that ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from unmask.data.loader import Loader
from unmask.data.order import permuted
from unmask.data.rows import RowBatch
from unmask.errors import DataError, UsageError

Ints = NDArray[np.int64]


class Numbers:
    """Rows that hold their own index; from `breaks` on they cannot be read."""

    length, blocks = 3, None

    def __init__(self, num: int, breaks: int | None = None) -> None:
        self.num, self.breaks = num, breaks

    def __len__(self) -> int:
        return self.num

    def take(self, indices: Ints, shift: Ints | None = None) -> RowBatch:
        assert shift is None  # nobody asked for it
        if self.breaks is not None and (indices >= self.breaks).any():
            raise DataError("this row is broken")
        x = np.repeat(indices[:, None], 3, axis=1)
        return RowBatch(indices, x, np.full(len(indices), 3), np.zeros(len(indices), dtype=np.int64))


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("unmask-loader")]


@settings(deadline=None, max_examples=60)
@given(num=st.integers(1, 700), batch=st.integers(1, 900), seed=st.integers(-(2**70), 2**70))
def test_every_epoch_is_a_permutation(num: int, batch: int, seed: int) -> None:
    loader = Loader(Numbers(num), batch, seed)
    steps = -(-3 * num // batch)
    order = np.concatenate([loader.indices(step) for step in range(steps)])[: 3 * num].reshape(3, num)
    for epoch in order:
        assert sorted(epoch.tolist()) == list(range(num))
    if num > 20:  # a chance of 1/20! that two agree
        assert len({tuple(epoch.tolist()) for epoch in order}) == 3


def test_large_range_is_a_permutation() -> None:
    num = 300_007
    order = permuted(np.arange(num), num, 5, np.full(num, 2))
    assert len(np.unique(order)) == num
    assert order.min() == 0
    assert order.max() == num - 1
    # Neighbours are sent apart: the correlation of a random order is about 1/sqrt(num).
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(np.arange(num), order)[0, 1]) < 0.01


def test_a_range_too_large_for_memory() -> None:
    loader = Loader(Numbers(1 << 40), 4096, 1)
    indices = loader.indices(10**9)
    assert len(np.unique(indices)) == 4096
    assert indices.max() > 1 << 39


def chi_square_is_plausible(counts: NDArray[np.int64]) -> bool:
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    chi = float(((counts - expected) ** 2 / expected).sum())
    return abs(chi - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("num", [2, 3, 5, 16, 37])
@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_places_are_uniform(num: int, vary: str) -> None:
    trials = 4000
    counts = np.zeros((num, num), dtype=np.int64)  # place × row
    pairs = np.zeros((num, num), dtype=np.int64)  # rows at places 0 and 1
    if vary == "epoch":
        places, epochs = np.tile(np.arange(num), trials), np.repeat(np.arange(trials), num)
        orders = permuted(places, num, 7, epochs).reshape(trials, num)
    else:
        orders = np.stack([permuted(np.arange(num), num, s, np.zeros(num, dtype=np.int64)) for s in range(trials // 8)])
    for place in range(num):
        counts[place] = np.bincount(orders[:, place], minlength=num)
    np.add.at(pairs, (orders[:, 0], orders[:, 1]), 1)
    assert all(chi_square_is_plausible(row) for row in counts)
    assert chi_square_is_plausible(pairs[~np.eye(num, dtype=bool)])


def test_order_is_pinned() -> None:
    """Resuming a run with a later version must go on with the same rows."""
    assert Loader(Numbers(1000), 6, 42).indices(3).tolist() == [481, 282, 524, 886, 973, 528]


def test_slices_are_the_global_batch() -> None:
    loader = Loader(Numbers(50), 12, 3)
    whole = loader.fetch(9)
    assert whole.indices.tolist() == loader.indices(9).tolist()
    assert whole.x[:, 0].tolist() == whole.indices.tolist()
    assert whole.valid_len.shape == whole.prefix_len.shape == (12,)
    assert whole.part(3, 5).x.tolist() == whole.x[3:5].tolist()
    for world in (1, 2, 3, 4):
        share = 12 // world
        parts = [loader.fetch(9, rank * share, (rank + 1) * share).indices for rank in range(world)]
        assert np.concatenate(parts).tolist() == whole.indices.tolist()


def test_order_depends_on_the_batch_only_through_the_place() -> None:
    small, large = Loader(Numbers(31), 4, 8), Loader(Numbers(31), 12, 8)
    assert np.concatenate([small.indices(s) for s in (3, 4, 5)]).tolist() == large.indices(1).tolist()


def test_seeds_differ() -> None:
    orders = {tuple(Loader(Numbers(100), 50, seed).indices(0).tolist()) for seed in range(50)}
    assert len(orders) == 50


def test_prefetch_gives_the_same_batches() -> None:
    loader = Loader(Numbers(40), 7, 1)
    with loader.prefetch(5, 6, lo=2, hi=6) as batches:
        got = [batch.x.tolist() for batch in batches]
    assert got == [loader.fetch(step, 2, 6).x.tolist() for step in range(5, 11)]
    assert not threads()
    assert list(loader.prefetch(0, 0)) == []
    assert not threads()


def test_prefetch_ends_when_left_early() -> None:
    loader = Loader(Numbers(40), 7, 1)

    def leave() -> None:
        with loader.prefetch(0, 1000, depth=4) as batches:
            next(batches)
            assert threads()
            raise KeyError("elsewhere")

    with pytest.raises(KeyError):
        leave()
    assert not threads()
    batches = loader.prefetch(0, 1000)
    next(batches)
    batches.close()
    batches.close()
    assert not threads()
    assert next(batches, None) is None


def test_prefetch_passes_errors_on() -> None:
    batches = Loader(Numbers(40, breaks=20), 40, 1).prefetch(0, 10)
    with pytest.raises(DataError, match="broken"):
        list(batches)
    assert not threads()


def test_wrong_use() -> None:
    with pytest.raises(UsageError):
        Loader(Numbers(3), 0, 0)
    with pytest.raises(DataError):
        Loader(Numbers(0), 1, 0)
    loader = Loader(Numbers(3), 2, 0)
    with pytest.raises(UsageError):
        loader.fetch(0, 1, 3)
    with pytest.raises(UsageError):
        loader.indices(-1)
    with pytest.raises(UsageError):
        loader.prefetch(0, 1, depth=0)
