"""A block of the DiT: attention and MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask import kernels
from unmask.denoisers.dit.dropout import hashed_dropout
from unmask.denoisers.dit.norm import Norm
from unmask.denoisers.dit.rotary import Rope, rope_at, rotate, tables
from unmask.denoisers.network import gather_positions, take_rows
from unmask.denoisers.ragged import Ragged, ragged_attention


class Block(nn.Module):
    """Attention and MLP, each pre-normed; with conditioning, adaLN shifts, scales and gates both."""

    def __init__(self, hidden: int, heads: int, cond_dim: int, dropout: float, qk_norm: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.qk_norm = heads, dropout, qk_norm
        self.norm1 = Norm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = Norm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)
        self.modulation = nn.Linear(cond_dim, 6 * hidden) if cond_dim else None

    def forward(
        self,
        x_BLD: Tensor,
        c_BC: Tensor | None,
        rope: Rope,
        mask: Tensor | None,
        causal: bool,
        at_BK: Tensor | None = None,
        cached: tuple[tuple[Tensor, Tensor], int, int] | None = None,
        flat_N: Tensor | None = None,
        rows: Ragged | None = None,
    ) -> Tensor:
        """With `rows`, [M, D] stands for [B, L, D] throughout."""
        attn_in, attn_gate, mlp_in, mlp_gate = self._modulators(c_BC, None if rows is None else rows.row_M)
        h_BLD = attn_in(self.norm1(x_BLD))
        if rows is None:
            a_BLD = self._attend(h_BLD, rope, mask, causal, at_BK, cached)
        else:
            a_BLD = self._attend_ragged(h_BLD, rope, rows, causal)
        if at_BK is not None:
            x_BLD = gather_positions(x_BLD, at_BK)
        if flat_N is not None:  # from here on no position sees another: [N, D] instead of [B, L, D]
            _, attn_gate, mlp_in, mlp_gate = self._modulators(c_BC, row_of(flat_N, x_BLD.shape[1], rows))
            a_BLD, x_BLD = (take_rows(t.flatten(0, -2), flat_N) for t in (a_BLD, x_BLD))
        x_BLD = x_BLD + attn_gate(self._drop(self.out(a_BLD)))
        m_BLD = self.mlp_out(F.gelu(self.mlp_in(mlp_in(self.norm2(x_BLD))), approximate="tanh"))
        return x_BLD + mlp_gate(self._drop(m_BLD))  # type: ignore[no-any-return]

    def _drop(self, x: Tensor) -> Tensor:
        if self.training and self.dropout and torch.compiler.is_compiling():
            return hashed_dropout(x, self.dropout)
        return F.dropout(x, self.dropout, self.training)

    def _modulators(self, c_BC: Tensor | None, row_N: Tensor | None = None):  # type: ignore[no-untyped-def]
        """How the two branches are shifted-and-scaled going in and gated coming out; plain blocks leave both alone."""
        if self.modulation is None or c_BC is None:
            return _same, _same, _same, _same
        parts = per_position(self.modulation(c_BC), row_N).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        return (
            lambda h: h * (1 + scale1) + shift1,
            lambda h: h * gate1,
            lambda h: h * (1 + scale2) + shift2,
            lambda h: h * gate2,
        )

    def _attend(
        self,
        h_BLD: Tensor,
        rope: Rope,
        mask: Tensor | None,
        causal: bool,
        at_BK: Tensor | None,
        cached: tuple[tuple[Tensor, Tensor], int, int] | None,
    ) -> Tensor:
        qkv_BLW = self.qkv(h_BLD) if at_BK is None else None
        if qkv_BLW is not None and cached is None and len(rope[0]) == 1 and kernels.fit(qkv_BLW):
            from unmask.kernels.split_rope import split_rope

            q, k, v = (self._split(y.view(h_BLD.shape)) for y in split_rope(qkv_BLW.flatten(0, 1), *tables(rope)))
            q, k = self.normed(q), self.normed(k)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
            return o.transpose(1, 2).flatten(2)
        if qkv_BLW is not None:
            q, k, v = (self._split(y) for y in qkv_BLW.chunk(3, dim=-1))
            q = rotate(q, rope)
        else:  # queries at the asked positions, keys and values everywhere
            assert at_BK is not None
            if causal:
                rows = torch.arange(h_BLD.shape[1], device=h_BLD.device)
                mask, causal = (rows[None, None, None, :] <= at_BK[:, None, :, None]), False
            D = h_BLD.shape[-1]
            w_q, w_kv = self.qkv.weight[:D], self.qkv.weight[D:]
            q = rotate(self._split(F.linear(gather_positions(h_BLD, at_BK), w_q)), rope_at(rope, at_BK))
            k, v = (self._split(y) for y in F.linear(h_BLD, w_kv).chunk(2, dim=-1))
        q, k = self.normed(q), self.normed(rotate(k, rope))
        if cached is not None:
            (keys, values), start, stop = cached
            keys[:, :, start:stop], values[:, :, start:stop] = k, v
            k, v = keys[:, :, :stop], values[:, :, :stop]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return o.transpose(1, 2).flatten(2)

    def _attend_ragged(self, h_MD: Tensor, rope: Rope, rows: Ragged, causal: bool) -> Tensor:
        qkv_MW = self.qkv(h_MD)
        if kernels.fit(qkv_MW):
            from unmask.kernels.split_rope import split_rope

            parts = split_rope(qkv_MW, rope[0].squeeze(1), rope[1].squeeze(1))
            q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in parts)
        else:
            q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in qkv_MW.chunk(3, dim=-1))
            q, k = rotate(q, rope), rotate(k, rope)
        return ragged_attention(self.normed(q), self.normed(k), v, rows, causal=causal).flatten(1)

    def normed(self, x_BHLK: Tensor) -> Tensor:
        """Queries or keys with qk_norm. A rotation keeps lengths, so it may as well come first, in a kernel."""
        return F.rms_norm(x_BHLK, x_BHLK.shape[-1:], eps=1e-6) if self.qk_norm else x_BHLK

    def _split(self, y_BLD: Tensor) -> Tensor:
        """[B, L, D] → [B, heads, L, head_dim]"""
        return y_BLD.view(*y_BLD.shape[:2], self.heads, -1).transpose(1, 2)


def per_position(m_BC: Tensor, row_N: Tensor | None) -> Tensor:
    """A row's modulation for each of its positions: broadcast over [B, L], or picked for a flat list."""
    if row_N is None:
        return m_BC.unsqueeze(1)
    return m_BC if len(m_BC) == 1 else m_BC[row_N]


def row_of(flat_N: Tensor, length: int, rows: Ragged | None) -> Tensor:
    return flat_N // length if rows is None else rows.row_M[flat_N]


def _same(h: Tensor) -> Tensor:
    return h
