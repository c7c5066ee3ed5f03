"""The order in which rows are read: keyed permutations of all rows, or of the rows of a few shards at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_ROUNDS = 6
_FAR = 1 << 40  # far from the epoch numbers, which key the orders of rows


def permuted(places: Ints, size: int, seed: int, epochs: Ints) -> Ints:
    """The images of `places` under the permutation of range(size) keyed by (seed, epoch); needs memory only for the
    places.

    A Feistel network permutes the next power of four. A result outside the range is permuted again until it is inside,
    which keeps the map one-to-one on the range.

    >>> sorted(permuted(np.arange(5), 5, 0, np.zeros(5, dtype=np.int64)).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(3, ((size - 1).bit_length() + 1) // 2))  # at least 3 bits, for enough values per round
    low = np.uint64((1 << int(half)) - 1)
    keys = _mix(_mix(np.full(len(places), seed % (1 << 64), dtype=np.uint64)) ^ epochs.astype(np.uint64))
    out = places.astype(np.uint64)
    todo = np.arange(len(places))
    while len(todo):
        left, right, key = out[todo] >> half, out[todo] & low, keys[todo]
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(key ^ ((right << np.uint64(8)) | np.uint64(turn))) & low)
        out[todo] = (left << half) | right
        todo = todo[out[todo] >= size]
    return out.astype(np.int64)


def coins(seed: int, rows: Ints) -> NDArray[np.bool_]:
    """One random bit per row, keyed by the seed.

    >>> int(coins(0, np.arange(1000)).sum())
    520
    """
    key_1 = _mix(np.full(1, seed % (1 << 64), dtype=np.uint64))
    return (_mix(key_1 ^ _mix(rows.astype(np.uint64))) & np.uint64(1)).astype(bool)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function: every input bit affects every output bit; array arithmetic wraps around
    silently."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass
class Blocks:
    """Rows stored in shards: an epoch visits the shards in its own order and shuffles the rows of `buffer` shards at a
    time.

    So a reader needs at most that many shards at once, and there is still no state to save: every row's place follows
    from seed and epoch. rows_S: the number of rows in each shard.

    >>> blocks = Blocks(np.array([3, 2, 4]), buffer=2)
    >>> sorted(blocks.order(np.arange(9), seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """

    rows_S: Ints
    buffer: int
    _epochs: dict[tuple[int, int], tuple[Ints, Ints]] = field(default_factory=dict, repr=False)  # only the newest

    def order(self, places: Ints, *, seed: int, epoch: int) -> Ints:
        """The rows at these places of an epoch."""
        shard_S, first_S = self._shards(seed, epoch)
        first_G = np.append(first_S[: -1 : self.buffer], first_S[-1])  # where each group of shards begins, and the end
        group_n = np.searchsorted(first_G, places, side="right") - 1
        out = np.empty_like(places)
        for group in np.unique(group_n).tolist():
            here = group_n == group
            begin, size = int(first_G[group]), int(first_G[group + 1] - first_G[group])
            key = np.full(int(here.sum()), _FAR * (epoch + 1) + group)
            at = begin + permuted(places[here] - begin, size, seed, key)
            place = np.searchsorted(first_S, at, side="right") - 1
            out[here] = self._first_row[shard_S[place]] + at - first_S[place]
        return out

    @property
    def _first_row(self) -> Ints:
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.rows_S)])

    def _shards(self, seed: int, epoch: int) -> tuple[Ints, Ints]:
        """The epoch's order of shards, and the place where each begins, followed by the end."""
        if (seed, epoch) not in self._epochs:
            while len(self._epochs) > 1:  # a batch may extend into the next epoch
                self._epochs.pop(next(iter(self._epochs)))
            num = len(self.rows_S)
            shard_S = permuted(np.arange(num), num, seed, np.full(num, -_FAR - epoch))
            first_S = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.rows_S[shard_S])])
            self._epochs[seed, epoch] = shard_S, first_S
        return self._epochs[seed, epoch]
