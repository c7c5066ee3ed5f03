"""Tokens in memory, and rows cut from them; the rows that every way is measured on."""

from __future__ import annotations

import io
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.data.order import permuted
from unmask.rng import row_keys, uniform

Ids = NDArray[np.uint16]


@dataclass(frozen=True)
class Tokens:
    """A text to learn from and one to be measured on, each a chain of tokens."""

    train: Ids
    valid: Ids
    num_ids: int
    mask_id: int

    @classmethod
    def load(cls, path: Path) -> Tokens:
        with lzma.open(path) as file, np.load(io.BytesIO(file.read())) as held:
            return cls(held["train"], held["valid"], int(held["num_ids"]), int(held["mask_id"]))

    def save(self, path: Path) -> None:
        """As numpy's archive in xz, which makes it a quarter smaller than the archive's own compression."""
        num_ids, mask_id = np.array(self.num_ids), np.array(self.mask_id)
        with lzma.open(path, "wb") as file:
            np.savez(file, train=self.train, valid=self.valid, num_ids=num_ids, mask_id=mask_id)

    def rows(self, first: int, count: int, length: int, *, seed: int, shifted: bool = False) -> Tensor:
        """Rows first..first+count of an endless chain of epochs, each in an order of its own.

        shifted: each epoch cuts the text at another place, so that no row comes back as it was.
        """
        windows = len(self.train) // length - shifted  # the last window has no room to be shifted
        epoch_B, place_B = np.divmod(np.arange(first, first + count, dtype=np.int64), windows)
        start_B = permuted(place_B, windows, seed, epoch_B) * length
        if shifted:
            u_B = uniform(row_keys(seed, torch.from_numpy(epoch_B))).numpy()
            start_B = start_B + (u_B * length).astype(np.int64)
        return torch.from_numpy(self.train[start_B[:, None] + np.arange(length)].astype(np.int64))

    def held_out(self, count: int, length: int) -> Tensor:
        """So many rows of the other text, spread evenly over it."""
        windows = len(self.valid) // length
        start_B = np.linspace(0, windows - 1, min(count, windows)).astype(np.int64) * length
        return torch.from_numpy(self.valid[start_B[:, None] + np.arange(length)].astype(np.int64))
