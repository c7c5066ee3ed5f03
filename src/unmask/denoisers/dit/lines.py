"""Which positions of a batch the lines of the residual stream are: a row's modulation has to know."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from unmask.denoisers.flat_rows import gather_positions, take_rows


class Lines(NamedTuple):
    """Nothing: all positions, [B, L, D]. at_BK: these of each row, [B, K, D]. row_N: a flat list, [N, D], of the row of
    each line; flat_N: its place in the padded batch, row x L + position, which only a level for each position needs.
    """

    at_BK: Tensor | None = None
    row_N: Tensor | None = None
    flat_N: Tensor | None = None

    def spread(self, m: Tensor) -> Tensor:
        """What is known of each row, [B or 1, C], or of each position, [B, L, C], for each line."""
        if self.row_N is None:
            if m.ndim == 2:
                return m.unsqueeze(1)
            return m if self.at_BK is None else gather_positions(m, self.at_BK)
        if m.ndim == 2:
            return m if len(m) == 1 else m[self.row_N]
        assert self.flat_N is not None
        return m.flatten(0, 1)[self.flat_N]


class Keep(NamedTuple):
    """Which lines go on after the last exchange between positions: by position, or by their place among all lines."""

    lines: Lines
    take_N: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        if self.take_N is not None:
            picked: Tensor = take_rows(x.flatten(0, -2), self.take_N)
            return picked
        assert self.lines.at_BK is not None
        return gather_positions(x, self.lines.at_BK)
