"""The DiT's forward pass for use, not for training, on a GPU: the same numbers with about eight launches a block.

Between two matrix products stands one kernel. Biases, GELU and the residual sum ride along in the products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.kernels.residual_norm import residual_norm
from unmask.kernels.rope import rope_

if TYPE_CHECKING:
    from unmask.denoisers.dit import DiTNetwork
    from unmask.denoisers.dit.block import Block


def fused_trunk(
    net: DiTNetwork,
    ids_BL: Tensor,
    level_B: Tensor | None,
    *,
    valid_BL: Tensor | None = None,
    cond: Tensor | None = None,
    at_BK: Tensor | None = None,
) -> Tensor:
    """h_BLD, or h_BKD at `at_BK`: there, the last block asks with those positions alone."""
    B, L = ids_BL.shape
    stream = Stream(net.constants(ids_BL, level_B, cond), F.embedding(ids_BL, net.embed.weight).flatten(0, 1), L)
    cos, sin = net.rope_table(L)
    mask = None if valid_BL is None or net.causal else valid_BL[:, None, None, :]
    last = len(net.layers) - 1
    for i, block in enumerate(net.layers):
        h_MD = stream.norm(block.norm1.weight, i, 0)
        if i == last and at_BK is not None:
            offset = torch.arange(0, B * L, L, device=at_BK.device)[:, None]
            flat_M = (at_BK if B == 1 else at_BK + offset).reshape(-1)
            o = _attend_at(net, block, h_MD, flat_M, at_BK, mask, L)
            stream.keep(flat_M, at_BK.shape[1])
        else:
            qkv = F.linear(h_MD, block.qkv.weight)
            rope_(qkv, cos, sin, 2 * net.num_heads, length=L)
            q, k, v = (net.split_heads(y, B) for y in qkv.chunk(3, dim=-1))
            q, k = block.normed(q), block.normed(k)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=net.causal)
        stream.add(o.transpose(1, 2).reshape(len(stream.x), -1), block.out.weight, None, i, 0)
        mlp(stream, block, i)
    return stream.finish(net).view(B, -1, stream.x.shape[1])


def fused_decode(
    net: DiTNetwork, ids_B: Tensor, position_1: Tensor, kv: list[tuple[Tensor, Tensor]], stop: int
) -> Tensor:
    """h_BD of one position of a causal network, its number on the device; keys and values go into the cache.

    The cache is read up to `stop` and masked behind the position, so that one capture serves many positions.
    """
    B = len(ids_B)
    stream = Stream(net.constants(ids_B, None), F.embedding(ids_B, net.embed.weight), 1)
    cos, sin = net.rope_table(kv[0][0].shape[2])
    position_B = position_1.repeat(B)
    mask = (torch.arange(stop, device=ids_B.device) <= position_1)[None, None, None]
    for i, (block, (keys, values)) in enumerate(zip(net.layers, kv, strict=True)):
        qkv = F.linear(stream.norm(block.norm1.weight, i, 0), block.qkv.weight)
        rope_(qkv, cos, sin, 2 * net.num_heads, length=1, position_M=position_B)
        q, k, v = (net.split_heads(y, B) for y in qkv.chunk(3, dim=-1))
        q, k = block.normed(q), block.normed(k)
        keys.index_copy_(2, position_1, k)
        values.index_copy_(2, position_1, v)
        o = F.scaled_dot_product_attention(q, keys[:, :, :stop], values[:, :, :stop], attn_mask=mask)
        stream.add(o.reshape(B, -1), block.out.weight, None, i, 0)
        mlp(stream, block, i)
    return stream.finish(net)


def mlp(stream: Stream, block: Block, i: int) -> None:
    h_MD = stream.norm(block.norm2.weight, i, 1)
    # One product with bias and (tanh) GELU in it.
    g_MF = torch._addmm_activation(block.mlp_in.bias, h_MD, block.mlp_in.weight.T, use_gelu=True)
    stream.add(g_MF, block.mlp_out.weight, block.mlp_out.bias, i, 1)


def _attend_at(
    net: DiTNetwork, block: Block, h_MD: Tensor, flat_M: Tensor, at_BK: Tensor, mask: Tensor | None, L: int
) -> Tensor:
    """Queries at the asked positions, keys and values everywhere."""
    B, D = len(at_BK), h_MD.shape[1]
    cos, sin = net.rope_table(L)
    w_q, w_kv = block.qkv.weight[:D], block.qkv.weight[D:]
    q_MD = F.linear(h_MD.index_select(0, flat_M), w_q)
    rope_(q_MD, cos, sin, net.num_heads, length=L, position_M=at_BK.reshape(-1))
    kv = F.linear(h_MD, w_kv)
    rope_(kv, cos, sin, net.num_heads, length=L)
    k, v = (net.split_heads(y, B) for y in kv.chunk(2, dim=-1))
    if net.causal:
        rows = torch.arange(L, device=h_MD.device)
        mask = rows[None, None, None, :] <= at_BK[:, None, :, None]
    q, k = block.normed(net.split_heads(q_MD, B)), block.normed(k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Constants:
    """What of the forward pass depends on the weights and the condition alone, for all blocks at once.

    Without conditioning: the prefix sums of the blocks' output biases, [blocks, D]. With it: every block's shifts,
    scales and gates, [blocks, C, 6D], and the last norm's, [C, 2D].
    """

    def __init__(self, net: DiTNetwork, c_BC: Tensor | None) -> None:
        self.biases: Tensor | None = None
        self.mod: Tensor | None = None
        self.final: Tensor | None = None
        self.place = (net.embed.weight.device, net.embed.weight.dtype)
        blocks = net.layers
        if c_BC is None or net.modulation is None:
            self.biases = torch.cumsum(torch.stack([b.mlp_out.bias for b in blocks]).float(), dim=0)
            return
        modulations = [b.modulation for b in blocks if b.modulation is not None]
        weight = torch.stack([m.weight for m in modulations])
        bias = torch.stack([m.bias for m in modulations])
        c_BC = c_BC.to(weight)
        self.mod = torch.baddbmm(bias[:, None], c_BC[None].expand(len(weight), -1, -1), weight.mT)
        self.final = net.modulation(c_BC)

    def copy_(self, other: Constants) -> None:
        """Take over new values in the old place, where a captured graph reads them."""
        for mine, new in ((self.biases, other.biases), (self.mod, other.mod), (self.final, other.final)):
            if mine is not None and new is not None:
                mine.copy_(new)


class Stream:
    """The residual stream x_MD and what is still to be added to it.

    Without conditioning a product adds itself to x directly; its bias is the same for every row, so it is only
    remembered, and given to whoever reads x. With conditioning the next norm's kernel adds the gated output.
    """

    def __init__(self, constants: Constants, x_MD: Tensor, rows_per_cond: int) -> None:
        self.constants, self.x, self.rows_per_cond = constants, x_MD, rows_per_cond
        self.y: Tensor | None = None
        self.gate: Tensor | None = None
        self.bias: Tensor | None = None

    def norm(self, weight: Tensor, i: int, half: int) -> Tensor:
        """What the first (0) or second (1) half of block i sees."""
        if self.constants.mod is None:
            return residual_norm(self.x, weight, bias_D=self.bias)
        shift, scale, _ = self.constants.mod[i].chunk(6, dim=-1)[3 * half : 3 * half + 3]
        return self._modulated(weight, shift, scale)

    def _modulated(self, weight: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        h = residual_norm(
            self.x,
            weight,
            bias_D=self.bias,
            y_MD=self.y,
            gate=self.gate,
            scale=scale,
            shift=shift,
            rows_per_cond=self.rows_per_cond,
        )
        self.y = self.gate = self.bias = None
        return h

    def add(self, h: Tensor, weight: Tensor, bias: Tensor | None, i: int, half: int) -> None:
        """x += gate x (h @ weight.T + bias)."""
        if self.constants.mod is not None:
            gate = self.constants.mod[i].chunk(6, dim=-1)[3 * half + 2]
            self.y, self.bias, self.gate = h @ weight.T, bias, gate
            return
        self.x.addmm_(h, weight.T)
        if bias is not None and self.constants.biases is not None:
            self.bias = self.constants.biases[i]

    def keep(self, flat_M: Tensor, rows_per_cond: int) -> None:
        """Go on with these rows alone; what was pending the norm before has added, save a bias that all rows share."""
        self.x, self.rows_per_cond = self.x.index_select(0, flat_M), rows_per_cond

    def finish(self, net: DiTNetwork) -> Tensor:
        if self.constants.final is None:
            return residual_norm(self.x, net.norm.weight, bias_D=self.bias)
        return self._modulated(net.norm.weight, *self.constants.final.chunk(2, dim=-1))
