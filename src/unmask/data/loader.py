"""Batches of rows in an order that depends only on seed and step: there is no state to save, for any world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from unmask.data.ahead import Ahead
from unmask.data.order import Blocks, permuted
from unmask.data.rows import Ints, RowBatch, Windows
from unmask.errors import DataError, UsageError


class SupportsTake(Protocol):
    """The part of `unmask.data.packing.Rows` that the loader needs."""

    length: int

    @property
    def blocks(self) -> Blocks | None: ...

    def __len__(self) -> int: ...

    def take(self, indices: Ints, shift: Ints | None = None) -> RowBatch: ...


class Loader:
    """Row i of step s is element s·batch + i of an endless chain of epochs, each with its own permutation of the rows.

    Rows that are read from shards on demand have `blocks`: an epoch then shuffles a few shards at a time.

    windows: "shifted" cuts the stream of the packing `wrap` at different positions in each epoch after the first, so
    that a text that is read repeatedly is not always cut into the same rows; see `window_shifts` and `Rows.take`.
    augment: a function that changes rows, given the epoch in which each is read.

    >>> loader = Loader(rows, batch=64, seed=0)  # doctest: +SKIP
    >>> loader.fetch(step=1000, lo=0, hi=32).x.shape  # half of it  # doctest: +SKIP
    (32, 256)
    """

    def __init__(
        self,
        rows: SupportsTake,
        batch: int,
        seed: int,
        windows: Windows = "fixed",
        augment: Callable[[RowBatch, Ints], RowBatch] | None = None,
    ) -> None:
        if batch < 1:
            raise UsageError(f"a batch has at least 1 row, got {batch}")
        if len(rows) < 1:
            raise DataError("there are no rows to load; give more text or a smaller length")
        if rows.blocks is not None and windows != "fixed":
            raise UsageError("rows of token shards are cut where the shards say: leave out data.windows = shifted")
        self.rows, self.batch, self.seed, self.windows, self.augment = rows, batch, seed, windows, augment

    def indices(self, step: int) -> Ints:
        """The rows of the global batch of this step.

        >>> Loader(rows, batch=4, seed=0).indices(7)  # doctest: +SKIP
        array([ 12, 803, 255,  41])
        """
        return self._order(step, 0, self.batch)[0]

    def epoch(self, step: int) -> float:
        """How often the rows have been read before this step.

        >>> Loader(rows, batch=4, seed=0).epoch(7)  # of 8 rows  # doctest: +SKIP
        3.5
        """
        return step * self.batch / len(self.rows)

    def fetch(self, step: int, lo: int = 0, hi: int | None = None) -> RowBatch:
        """Rows lo..hi of the global batch of this step: the share of a rank or micro-batch."""
        hi = self.batch if hi is None else hi
        if not 0 <= lo <= hi <= self.batch:
            raise UsageError(f"rows {lo} to {hi} do not lie within a batch of {self.batch}")
        indices, epochs = self._order(step, lo, hi)
        shifts = None if self.windows == "fixed" else window_shifts(epochs, self.rows.length, self.seed)
        rows = self.rows.take(indices) if shifts is None else self.rows.take(indices, shifts)
        return rows if self.augment is None else self.augment(rows, epochs)

    def prefetch(
        self, start_step: int, num_steps: int, depth: int = 2, lo: int = 0, hi: int | None = None
    ) -> Ahead[RowBatch]:
        """The steps from `start_step` on, read `depth` steps ahead by a thread that ends with the iterator.

        >>> with loader.prefetch(0, 100) as batches:  # doctest: +SKIP
        ...     for rows in batches: ...
        """
        steps = range(start_step, start_step + num_steps)
        return Ahead((self.fetch(step, lo, hi) for step in steps), depth=depth, name="loader")

    def _order(self, step: int, lo: int, hi: int) -> tuple[Ints, Ints]:
        """The rows lo..hi of this step's batch, and the epoch of each."""
        if step < 0:
            raise UsageError(f"steps count from 0, got {step}")
        places = np.arange(step * self.batch + lo, step * self.batch + hi, dtype=np.int64)
        epochs, within = np.divmod(places, len(self.rows))
        if self.rows.blocks is None:
            return permuted(within, len(self.rows), self.seed, epochs), epochs
        parts = [
            self.rows.blocks.order(within[epochs == epoch], seed=self.seed, epoch=int(epoch))
            for epoch in np.unique(epochs)  # epochs ascend with the places
        ]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts]), epochs


def window_shifts(epochs: Ints, length: int, seed: int) -> Ints:
    """The shift in tokens of each epoch's windows: 0 in the first epoch, then all numbers below `length` once before
    any repeats.

    >>> window_shifts(np.arange(4), 4, seed=0).tolist()
    [0, 1, 3, 2]
    """
    rounds, within = np.divmod(epochs, length)
    keys = -1 - rounds  # epochs are not negative, so these keys differ from those of row orders
    start = permuted(np.zeros(1, dtype=np.int64), length, seed, np.full(1, -1))
    return (permuted(within, length, seed, keys) - start) % length
