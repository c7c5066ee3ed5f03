"""What a shifted network reads: a token that begins each row before its own, so that position l is read off l - 1's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.denoisers.ragged import Ragged


def with_begin(allowed: Tensor, *, padding: bool) -> Tensor:
    """A mask of `Attend.allowed` for rows with a begin before them: of [B, 1, L, L] one of [B, 1, L + 1, L + 1], or,
    where it tells of padding alone, of [B, 1, 1, L] one of [B, 1, 1, L + 1].

    Everybody sees the begin. It sees the later positions that the first one may see, and the first one with them: where
    nothing later is seen, it must not see what it answers for.

    >>> with_begin(torch.ones(2, 2, dtype=torch.bool).tril()[None, None], padding=False)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    if padding:
        return F.pad(allowed, (1, 0), value=True)
    later = allowed[..., :1, 1:]
    first = later[..., :1] if later.shape[-1] else torch.zeros_like(allowed[..., :1, :1])
    return F.pad(torch.cat([torch.cat([first, later], dim=-1), allowed], dim=-2), (1, 0), value=True)


def ragged_with_begin(z_M: Tensor, rows: Ragged, flat_N: Tensor, begin_id: int) -> tuple[Tensor, Ragged, Tensor]:
    """The same of rows end to end: each has one token more, and `flat_N` counts the tokens that answer."""
    (B, L), M, device = rows.shape, len(z_M), z_M.device
    row_B, begin_B = torch.arange(B, device=device), rows.starts[:-1].long() + torch.arange(B, device=device)
    place_M = torch.arange(M, device=device) + rows.row_M + 1

    def woven(first_B: Tensor, rest_M: Tensor) -> Tensor:
        return rest_M.new_zeros(M + B).index_copy(0, place_M, rest_M).index_copy(0, begin_B, first_B.to(rest_M.dtype))

    row, position = woven(row_B, rows.row_M), woven(torch.zeros_like(row_B), rows.position_M + 1)
    longer = rows._replace(
        at_M=row * (L + 1) + position,
        row_M=row,
        position_M=position,
        starts=rows.starts + torch.arange(B + 1, device=device, dtype=rows.starts.dtype),
        shape=(B, L + 1),
        back=(rows.back[0], rows.back[1] + rows.back[0]),
    )
    return woven(torch.full_like(row_B, begin_id), z_M), longer, flat_N + rows.row_M[flat_N]
