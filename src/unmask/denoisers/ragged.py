"""Rows of different lengths end to end, without padding, so that per-position computations process only text."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.denoisers.flat_rows import put_rows, take_rows
from unmask.denoisers.network import Attend, Network, attending
from unmask.devices import put

FEW_SIZES = 4096


class Ragged(NamedTuple):
    """The places of the M tokens of a padded batch [B, L], row after row; only attention needs to know them."""

    at_M: Tensor  # in the flat padded batch: row x L + position
    row_M: Tensor
    position_M: Tensor
    starts: Tensor  # [B + 1]: row b is starts[b]..starts[b + 1]
    shape: tuple[int, int]  # B, L
    causal: bool = False  # nobody sees later positions, whatever the network is
    back: tuple[int, int] = (0, 0)  # nor do those of the first so many rows, which are so many tokens

    def to(self, device: torch.device) -> Ragged:
        at_M, row_M, position_M, starts = (put(t, device) for t in self[:4])
        return self._replace(at_M=at_M, row_M=row_M, position_M=position_M, starts=starts)

    def parts(self) -> tuple[Ragged, Ragged]:
        """The rows that look back, and the others."""
        (B, L), (rows, tokens) = self.shape, self.back
        first = [t[:tokens] for t in (self.at_M, self.row_M, self.position_M)]
        rest = (self.at_M[tokens:] - rows * L, self.row_M[tokens:] - rows, self.position_M[tokens:])
        return (
            Ragged(first[0], first[1], first[2], self.starts[: rows + 1], (rows, L), causal=True),
            Ragged(*rest, self.starts[rows:] - tokens, (B - rows, L), causal=self.causal),
        )


def ragged(valid_BL: Tensor, multiple: int = 1) -> Ragged:
    """The places of all tokens except padding, filled up to a multiple with additional rows at the end.

    The tokens are counted on the device of valid_BL, which in training is the host.

    >>> ragged(torch.tensor([[True, True, False], [True, False, False]])).starts
    tensor([0, 2, 3], dtype=torch.int32)
    >>> ragged(torch.tensor([[True, True, False], [True, False, False]]), 8).starts
    tensor([0, 2, 3, 6, 8, 8], dtype=torch.int32)
    """
    L = valid_BL.shape[1]
    if multiple > 1:
        missing = -int(valid_BL.sum()) % multiple
        rows = -(-(multiple - 1) // L)  # as many for any number: graphs are kept while no shape changes
        valid_BL = torch.cat([valid_BL, (torch.arange(rows * L, device=valid_BL.device) < missing).view(rows, L)])
    B = len(valid_BL)
    at_M = valid_BL.flatten().nonzero().squeeze(1)
    starts = F.pad(valid_BL.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
    return Ragged(at_M, at_M // L, at_M % L, starts, (B, L))


def ragged_attention(q_MHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, rows: Ragged, *, causal: bool) -> Tensor:
    """Attention inside each row, [M, H, K]; on a GPU by a kernel that knows where rows begin, elsewhere with padding.

    >>> rows = ragged(torch.tensor([[True, True, False], [True, False, False]]))
    >>> v = torch.arange(3.0).view(3, 1, 1)
    >>> ragged_attention(torch.zeros(3, 1, 1), torch.zeros(3, 1, 1), v, rows, causal=False).flatten()
    tensor([0.5000, 0.5000, 2.0000])
    """
    if rows.back[0]:
        both = zip(rows.parts(), *(t.tensor_split((rows.back[1],)) for t in (q_MHK, k_MHK, v_MHK)), strict=True)
        return torch.cat([ragged_attention(q, k, v, part, causal=causal or part.causal) for part, q, k, v in both])
    if q_MHK.is_cuda and q_MHK.dtype in (torch.bfloat16, torch.float16):
        # The kernel wants the longest row only to size its grid, and a graph is kept while it does not change. This is
        # what torch.nn.attention.varlen calls, which at its first call imports the compiler: seconds of every start.
        starts, longest = rows.starts, rows.shape[1]
        attention = torch.ops.aten._flash_attention_forward
        out: Tensor = attention(q_MHK, k_MHK, v_MHK, starts, starts, longest, longest, 0.0, causal, False)[0]
        return out
    (B, L), (M, H, K) = rows.shape, q_MHK.shape
    q, k, v = (put_rows(t.flatten(1), rows.at_M, B * L).view(B, L, H, K).transpose(1, 2) for t in (q_MHK, k_MHK, v_MHK))
    mask = None  # padding stands at the end of a row, so a causal mask already hides it
    if not causal:
        mask = torch.zeros(B * L, dtype=torch.bool, device=q.device).index_fill(0, rows.at_M, True).view(B, 1, 1, L)
    o_BHLK = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    o_MD: Tensor = take_rows(o_BHLK.transpose(1, 2).reshape(B * L, H * K), rows.at_M)
    return o_MD.view(M, H, K)


def vectors_at(
    network: Network,
    z: Tensor,
    level: Tensor | None,
    flat_N: Tensor,
    *,
    valid_BL: Tensor | None = None,
    attend: Attend | None = None,
    label_B: Tensor | None = None,
    second_BL: Tensor | None = None,
) -> Tensor:
    """The trunk's h_ND at the flat positions, by the shorter way; the arguments may still be on the host.

    second_BL: for a network that `tells_pairs`.
    """
    device = network.device_for(z)
    level, label_B = (None if t is None else put(t, device) for t in (level, label_B))
    attend = attending(attend, valid_BL)
    valid_BL = attend.valid_BL
    plain = attend.mask is None and attend.blocks is None
    padded = not plain or z.is_floating_point() or second_BL is not None
    if valid_BL is None or padded or not network.takes_ragged():
        valid, mask, blocks = (None if t is None else put(t, device) for t in attend[:3])
        moved = attend._replace(valid_BL=valid, mask=mask, blocks=blocks)
        usual = plain and not attend.causal and not attend.back
        options: dict[str, Any] = {"valid_BL": moved.valid_BL} if usual else {"attend": moved}
        options |= {} if second_BL is None else {"second_BL": put(second_BL, device)}
        return network.trunk_at(put(z, device), level, put(flat_N, device), cond=label_B, **options)
    # On a GPU every new size of a step costs the host a search for kernels and for memory: few sizes cost few.
    rows = ragged(valid_BL, FEW_SIZES if device.type == "cuda" else 1)
    back = (attend.back, int(rows.starts[attend.back])) if attend.back else (0, 0)  # a GPU is not asked for nothing
    rows = rows._replace(causal=attend.causal, back=back)
    place_N = (valid_BL.flatten().cumsum(0) - 1)[flat_N]
    z_M = F.pad(z[valid_BL], (0, len(rows.at_M) - int(rows.starts[len(z)])), value=network.mask_id)
    z_M = put(z_M, device)
    return network.trunk_ragged(z_M, level, rows.to(device), put(place_N, device), cond=label_B)
