"""The canvas: tokens, which of them are fixed, and what may be written at the other positions.

Prompts, gaps, suffixes and semi-autoregressive windows are all canvases with some positions masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from unmask.errors import Public, UsageError
from unmask.rng import row_keys

if TYPE_CHECKING:
    from unmask.constraints.automaton import Automaton


@dataclass(frozen=True, repr=False)
class Canvas:
    """`tokens` [B, L]: open positions are to be written, all others are fixed and never change.

    key_B: the only source of randomness of each row. valid_BL: False after the end of a shorter row (None: none).
    forbidden: ids never written. offset: the absolute position of column 0, so that windows of one text differ.
    end_id: end-of-text. Once it is written with no mask before it, the row is done; the rest is not part of the text.
    draft_BL: written, but a sampler that refines may regenerate it; to all others it is fixed (None: nowhere).
    label_B: the class of each row, for a network trained with classes; -1 for none (None: none).
    frame: how many tokens at the beginning and at the end of each row anchor the text and are not part of it.
    constraint: what the finished text or its gaps must match, as an automaton over tokens (see unmask.constraints).
    open_BL: the open positions (default: those with masks). It does not change while tokens are written, so it also
    exists for a process without masks; the tokens say which positions are still masked.
    """

    tokens: Tensor
    mask_id: int
    key_B: Tensor
    valid_BL: Tensor | None = None
    forbidden: tuple[int, ...] = ()
    offset: int = 0
    end_id: int | None = None
    draft_BL: Tensor | None = None
    label_B: Tensor | None = None
    frame: tuple[int, int] = (0, 0)
    constraint: Automaton | None = None
    open_BL: Tensor = cast(Tensor, None)  # always a tensor after __post_init__

    def __post_init__(self) -> None:
        if cast(Tensor | None, self.open_BL) is None:
            object.__setattr__(self, "open_BL", self.tokens == self.mask_id)
        if self.tokens.ndim != 2 or self.key_B.shape != self.tokens.shape[:1]:
            raise UsageError(f"a canvas has tokens [B, L] and keys [B], got {self.tokens.shape} and {self.key_B.shape}")
        if self.open_BL.shape != self.tokens.shape:
            raise UsageError(
                f"a canvas says of each of its {list(self.tokens.shape)} positions whether it is open, got open_BL "
                f"{list(self.open_BL.shape)}"
            )
        if self.label_B is not None and self.label_B.shape != self.key_B.shape:
            raise UsageError(f"a canvas of {len(self.key_B)} rows has as many labels, got {list(self.label_B.shape)}")
        if self.end_id == self.mask_id:
            raise UsageError("end_id and mask_id are both {id}: a mask cannot end a text", id=Public(self.end_id))

    def __repr__(self) -> str:
        rows, length = self.tokens.shape
        return f"Canvas({rows} x {length}, {int(self.open_BL.sum())} open, mask {self.mask_id})"

    @classmethod
    def blank(cls, *, num: int, length: int, mask_id: int, seed: int = 0) -> Canvas:
        """A canvas of masks only.

        >>> Canvas.blank(num=1, length=3, mask_id=9).tokens
        tensor([[9, 9, 9]])
        """
        if num < 1 or length < 1:
            raise UsageError(
                "a canvas needs at least one row and one position, got {num} x {length}",
                num=Public(num),
                length=Public(length),
            )
        return cls.of(torch.full((num, length), mask_id), mask_id=mask_id, seed=seed)

    @classmethod
    def of(cls, tokens: Tensor, *, mask_id: int, seed: int = 0) -> Canvas:
        """A canvas of the given tokens, with masks where tokens are to be written; the key of row i is (seed, i)."""
        return cls(tokens, mask_id, row_keys(seed, torch.arange(len(tokens), device=tokens.device)))

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]], *, mask_id: int, pad_id: int, seed: int = 0) -> Canvas:
        """A canvas of rows of different lengths; positions after a row's end are neither attended to nor written."""
        length = max(len(row) for row in rows)
        tokens = torch.full((len(rows), length), pad_id)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row, dtype=torch.long)
        canvas = cls.of(tokens, mask_id=mask_id, seed=seed)
        if all(len(row) == length for row in rows):
            return canvas
        ends_B = torch.tensor([len(row) for row in rows])
        return replace(canvas, valid_BL=torch.arange(length) < ends_B[:, None])

    def rows_of(self, tokens_BL: Tensor) -> list[list[int]]:
        """The rows of a later state of this canvas, each up to its own end.

        >>> canvas = Canvas.of_rows([[5], [5, 6]], mask_id=9, pad_id=0)
        >>> canvas.rows_of(canvas.tokens)
        [[5], [5, 6]]
        """
        return [row[:end] for row, end in zip(tokens_BL.tolist(), self.length_B.tolist(), strict=True)]

    @property
    def masked_BL(self) -> Tensor:
        """The open positions that are still masked."""
        return self.open_BL & (self.tokens == self.mask_id)

    @property
    def given_BL(self) -> Tensor:
        """The user's own tokens: fixed, and no part of the frame."""
        position_L = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        begin, end = self.frame
        inside_BL = (position_L >= begin) & (position_L < self.length_B[:, None] - end)
        return ~self.open_BL & inside_BL

    @property
    def never(self) -> tuple[int, ...]:
        """Ids that must never be drawn."""
        return (self.mask_id, *self.forbidden)

    def close_ended(self, tokens_BL: Tensor) -> Tensor:
        """The given later state of this canvas, with rows that have ended filled up with end-of-text.

        An end-of-text ends its row if it was written (not part of the prompt) and no position before it is still
        masked: the text can then no longer change, whatever is written after it.

        >>> canvas = Canvas(torch.tensor([[1, 9, 9], [9, 9, 9]]), 9, torch.zeros(2, dtype=torch.long), end_id=1)
        >>> canvas.close_ended(torch.tensor([[1, 9, 9], [1, 9, 9]])).tolist()
        [[1, 9, 9], [1, 1, 1]]
        """
        if self.end_id is None:
            return tokens_BL
        masked_BL = tokens_BL == self.mask_id
        ends_BL = (tokens_BL == self.end_id) & self.open_BL & (masked_BL.cumsum(dim=1) == 0)
        return tokens_BL.masked_fill(masked_BL & ends_BL.any(dim=1, keepdim=True), self.end_id)

    def part(self, lo: int, hi: int, tokens_BL: Tensor, open_BL: Tensor) -> Canvas:
        """Columns lo..hi-1 of a later state of this canvas, whose open positions are open_BL."""
        valid_BL = None if self.valid_BL is None else self.valid_BL[:, lo:hi]
        draft_BL = None if self.draft_BL is None else self.draft_BL[:, lo:hi]
        frame = (max(0, self.frame[0] - lo), max(0, self.frame[1] - (self.tokens.shape[1] - hi)))
        tokens, offset = tokens_BL[:, lo:hi], self.offset + lo
        parts: dict[str, Any] = {"valid_BL": valid_BL, "draft_BL": draft_BL, "open_BL": open_BL[:, lo:hi]}
        return replace(self, tokens=tokens, frame=frame, offset=offset, **parts)

    @property
    def length_B(self) -> Tensor:
        """The number of positions in each row."""
        B, L = self.tokens.shape
        return self.tokens.new_full((B,), L) if self.valid_BL is None else self.valid_BL.sum(dim=1)

    def to(self, device: torch.device | str) -> Canvas:
        tensors: dict[str, Any] = {
            f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **{name: value.to(device) for name, value in tensors.items()})
