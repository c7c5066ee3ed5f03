"""A batch of clean rows, with everything random about them already determined by (seed, step, global row)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from unmask.data.rows import RowBatch
from unmask.rng import fold, row_keys, uniform

# What each draw of a row's key is for; every purpose has its own number, so that no two share random bits.
DRAW_TIME, DRAW_MASK, DRAW_ORDER, DRAW_TOKEN, DRAW_PARTICLE, DRAW_REMASK, DRAW_LABEL, DRAW_STATE, DRAW_TWIN = range(9)
DRAW_CORRUPTION, DRAW_LATENT, DRAW_BLOCK, DRAW_OPENING = 9, 10, 11, 12


@dataclass(frozen=True)
class Batch:
    """Rows of the global batch, or a slice of them: results do not depend on how the batch is sliced.

    x_BL: clean tokens. valid_BL: not padding (None: all valid). scored_BL: noised and scored, which excludes prompt,
    anchors and padding. key_B: seeds the row's masks. time_B: the row's time in (0, 1]. label_B: the row's class, -1
    for none (None: no labels). place_B: the row's index in the order of the global batch's times. done: the fraction of
    the run's steps before this one, and epoch: how often the data has been read by then, for losses that change during
    training; measurements do not depend on either.
    """

    x_BL: Tensor
    valid_BL: Tensor | None
    scored_BL: Tensor
    key_B: Tensor
    time_B: Tensor
    label_B: Tensor | None = None
    place_B: Tensor | None = None
    done: float = 1.0
    epoch: float = 0.0

    @property
    def num_tokens(self) -> Tensor:
        return self.scored_BL.sum()

    def rows(self, lo: int, hi: int) -> Batch:
        """A slice: one micro-batch, or one worker's share."""
        return self._where(slice(lo, hi))

    def where(self, row_B: Tensor) -> Batch:
        """The rows at which row_B is true."""
        return self._where(row_B)

    def _where(self, rows: slice | Tensor) -> Batch:
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        cut: dict[str, Any] = {name: t[rows] for name, t in held.items() if isinstance(t, Tensor)}
        return replace(self, **cut)

    def drop_labels(self, share: float) -> Batch:
        """The same rows with the label removed from about this share of them, for training with classifier-free
        guidance."""
        if self.label_B is None or not share:
            return self
        lost_B = uniform(self.key_B, DRAW_LABEL) < share
        return replace(self, label_B=self.label_B.masked_fill(lost_B, -1))


def low_discrepancy_times(key: Tensor, rows_B: Tensor, num_rows: int) -> Tensor:
    """One uniform draw for the global batch; row i of N gets (u + i/N) mod 1, as a time in (0, 1].

    Each row's time is uniform; together they are evenly spread, which lowers the variance of the batch's loss.
    """
    u = uniform(key, DRAW_TIME)
    return 1 - (u + rows_B.to(u.dtype) / num_rows) % 1


def make_batch(
    x_BL: Tensor,
    valid_len_B: Tensor | None = None,
    prefix_len_B: Tensor | None = None,
    *,
    seed: int,
    step: int,
    first_row: int = 0,
    num_rows: int | None = None,
    label_B: Tensor | None = None,
    suffix: int = 0,
    done: float = 1.0,
    epoch: float = 0.0,
    fixed_ids: tuple[int, ...] = (),
) -> Batch:
    """Rows `first_row..` of the global batch of `num_rows` at this step.

    suffix: the number of tokens at each row's end that are neither noised nor scored. fixed_ids: ids that are neither
    noised nor scored at any position.

    >>> import torch
    >>> make_batch(torch.zeros(4, 8, dtype=torch.long), seed=0, step=0).scored_BL.sum()
    tensor(32)
    """
    B, L = x_BL.shape
    position_L = torch.arange(L, device=x_BL.device)
    scored_BL = torch.ones_like(x_BL, dtype=torch.bool)
    valid_BL = None
    if valid_len_B is not None:
        scored_BL = position_L < valid_len_B[:, None]
        valid_BL = scored_BL if bool((valid_len_B < L).any()) else None
    if suffix:
        end_B1 = L if valid_len_B is None else valid_len_B[:, None]
        scored_BL = position_L.expand_as(x_BL) < end_B1 - suffix
    if prefix_len_B is not None:
        scored_BL = scored_BL & (position_L >= prefix_len_B[:, None])
    if fixed_ids:
        scored_BL = scored_BL & ~torch.isin(x_BL, torch.tensor(fixed_ids, device=x_BL.device))
    rows_B = torch.arange(first_row, first_row + B, device=x_BL.device)
    step_key = fold(row_keys(seed, torch.zeros((), dtype=torch.long, device=x_BL.device)), step)
    num_rows = num_rows or B
    time_B = low_discrepancy_times(step_key, rows_B, num_rows)
    return Batch(
        x_BL=x_BL,
        valid_BL=valid_BL,
        scored_BL=scored_BL,
        key_B=fold(step_key, rows_B + 1),
        time_B=time_B,
        label_B=label_B,
        place_B=(torch.ceil(time_B * num_rows) - 1).long(),
        done=done,
        epoch=epoch,
    )


def batch_of(
    rows: RowBatch,
    *,
    seed: int,
    step: int,
    first_row: int = 0,
    num_rows: int | None = None,
    device: torch.device | None = None,
    done: float = 1.0,
    epoch: float = 0.0,
) -> Batch:
    """`make_batch` of packed rows, on the device (None: the host).

    >>> import numpy as np
    >>> rows = RowBatch(np.arange(2), np.zeros((2, 4), np.int64), np.array([4, 3]), np.array([1, 0]))
    >>> batch_of(rows, seed=0, step=0).num_tokens
    tensor(6)
    """
    x_BL, valid_len_B, prefix_len_B = (
        torch.from_numpy(array).to(device) for array in (rows.x, rows.valid_len, rows.prefix_len)
    )
    return make_batch(
        x_BL,
        valid_len_B,
        prefix_len_B,
        seed=seed,
        step=step,
        first_row=first_row,
        num_rows=num_rows,
        label_B=None if rows.label is None else torch.from_numpy(rows.label).to(device),
        suffix=rows.suffix,
        done=done,
        epoch=epoch,
        fixed_ids=rows.fixed_ids,
    )
