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
from unmask.data.rows import Ints, RowBatch
from unmask.data.splitting import SplitTokens
from unmask.errors import UsageError
from unmask.rng import row_keys, uniform

Ids = NDArray[np.uint16]


@dataclass(frozen=True)
class Tokens:
    """A text to learn from and one to be measured on, each a chain of tokens.

    parts_I2: the two tokens that each was merged from (`merged_from`), of a BPE. split: how many are read as those.
    """

    train: Ids
    valid: Ids
    num_ids: int
    mask_id: int
    parts_I2: Ints | None = None
    split: float = 0.0

    @classmethod
    def load(cls, path: Path) -> Tokens:
        with lzma.open(path) as file, np.load(io.BytesIO(file.read())) as held:
            parts_I2 = held.get("parts")
            return cls(held["train"], held["valid"], int(held["num_ids"]), int(held["mask_id"]), parts_I2)

    def save(self, path: Path) -> None:
        """As numpy's archive in xz, which makes it a quarter smaller than the archive's own compression."""
        parts = {} if self.parts_I2 is None else {"parts": self.parts_I2}
        parts |= {"num_ids": np.array(self.num_ids), "mask_id": np.array(self.mask_id)}
        with lzma.open(path, "wb") as file:
            np.savez(file, train=self.train, valid=self.valid, **parts)

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
        x_BL = self.train[start_B[:, None] + np.arange(length)].astype(np.int64)
        return torch.from_numpy(self._in_parts(x_BL, place_B, epoch_B, seed) if self.split else x_BL)

    def _in_parts(self, x_BL: Ints, place_B: Ints, epoch_B: Ints, seed: int) -> Ints:
        if self.parts_I2 is None:
            raise UsageError("these tokens were not merged from others: prepare a text with a BPE")
        rows = RowBatch(place_B, x_BL, np.full(len(x_BL), x_BL.shape[1]), np.zeros(len(x_BL), dtype=np.int64))
        return SplitTokens(self.parts_I2, self.split, seed)(rows, epoch_B).x

    def held_out(self, count: int, length: int) -> Tensor:
        """So many rows of the other text, spread evenly over it."""
        windows = len(self.valid) // length
        start_B = np.linspace(0, windows - 1, min(count, windows)).astype(np.int64) * length
        return torch.from_numpy(self.valid[start_B[:, None] + np.arange(length)].astype(np.int64))
