"""The DiT's forward pass for use, not for training, on a GPU: the same numbers with about eight launches a block.

Between two matrix products stands one kernel. Biases, GELU and the residual sum ride along in the products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.denoisers._network import gather_positions
from unmask.kernels.residual_norm import residual_norm
from unmask.kernels.rope import rope_

if TYPE_CHECKING:
    from unmask.denoisers.dit import Block, DiTNetwork


def fused_trunk(
    net: DiTNetwork,
    ids_BL: Tensor,
    c_BC: Tensor | None,
    *,
    valid_BL: Tensor | None = None,
    at_BK: Tensor | None = None,
) -> Tensor:
    """h_BLD, or h_BKD at `at_BK`: there, the last block asks with those positions alone."""
    B, L = ids_BL.shape
    stream = Stream(net, F.embedding(ids_BL, net.embed.weight).flatten(0, 1), c_BC, L)
    cos, sin = net.rope_table(L)
    mask = None if valid_BL is None or net.causal else valid_BL[:, None, None, :]
    last = len(net.blocks) - 1
    for i, block in enumerate(net.blocks):
        h_MD = stream.norm(block.norm1.weight, i, 0)
        if i == last and at_BK is not None:
            o = _attend_at(net, block, h_MD, at_BK, mask, L)
            stream.keep(at_BK)
        else:
            qkv = F.linear(h_MD, block.qkv.weight)
            rope_(qkv, cos, sin, 2 * net.num_heads, length=L)
            q, k, v = (net.split_heads(y, B) for y in qkv.chunk(3, dim=-1))
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
    stream = Stream(net, F.embedding(ids_B, net.embed.weight), net.condition(ids_B, None), 1)
    cos, sin = net.rope_table(kv[0][0].shape[2])
    position_B = position_1.expand(B)
    mask = (torch.arange(stop, device=ids_B.device) <= position_1)[None, None, None]
    for i, (block, (keys, values)) in enumerate(zip(net.blocks, kv, strict=True)):
        qkv = F.linear(stream.norm(block.norm1.weight, i, 0), block.qkv.weight)
        rope_(qkv, cos, sin, 2 * net.num_heads, length=1, position_M=position_B)
        q, k, v = (net.split_heads(y, B) for y in qkv.chunk(3, dim=-1))
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


def _attend_at(net: DiTNetwork, block: Block, h_MD: Tensor, at_BK: Tensor, mask: Tensor | None, L: int) -> Tensor:
    """Queries at the asked positions, keys and values everywhere."""
    B, K = at_BK.shape
    D = h_MD.shape[1]
    cos, sin = net.rope_table(L)
    w_q, w_kv = block.qkv.weight[:D], block.qkv.weight[D:]
    q_MD = F.linear(gather_positions(h_MD.view(B, L, D), at_BK).view(B * K, D), w_q)
    rope_(q_MD, cos, sin, net.num_heads, length=L, position_M=at_BK.reshape(-1))
    kv = F.linear(h_MD, w_kv)
    rope_(kv, cos, sin, net.num_heads, length=L)
    k, v = (net.split_heads(y, B) for y in kv.chunk(2, dim=-1))
    if net.causal:
        rows = torch.arange(L, device=h_MD.device)
        mask = rows[None, None, None, :] <= at_BK[:, None, :, None]
    return F.scaled_dot_product_attention(net.split_heads(q_MD, B), k, v, attn_mask=mask)


class Stream:
    """The residual stream x_MD and what is still to be added to it.

    Without conditioning a product adds itself to x directly; its bias is the same for every row, so it is only
    remembered, and given to whoever reads x. With conditioning the next norm's kernel adds the gated output.
    """

    def __init__(self, net: DiTNetwork, x_MD: Tensor, c_BC: Tensor | None, rows_per_cond: int) -> None:
        self.x, self.c, self.rows_per_cond = x_MD, c_BC, rows_per_cond
        self.y: Tensor | None = None
        self.gate: Tensor | None = None
        self.bias: Tensor | None = None
        self.mod: list[tuple[Tensor, ...]] | None = None
        self.biases: Tensor | None = None
        if c_BC is None:
            # All prefix sums of the blocks' output biases at once.
            self.biases = torch.cumsum(torch.stack([b.mlp_out.bias for b in net.blocks]).float(), dim=0)
        else:
            weight = torch.stack([b.modulation.weight for b in net.blocks])
            bias = torch.stack([b.modulation.bias for b in net.blocks])
            mod_NC6D = torch.baddbmm(bias[:, None], c_BC.to(weight)[None].expand(len(weight), -1, -1), weight.mT)
            self.mod = [m.chunk(6, dim=-1) for m in mod_NC6D]

    def norm(self, weight: Tensor, i: int, half: int) -> Tensor:
        """What the first (0) or second (1) half of block i sees."""
        if self.mod is None:
            return residual_norm(self.x, weight, bias_D=self.bias)
        shift, scale, _ = self.mod[i][3 * half : 3 * half + 3]
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
        if self.mod is None:
            self.x.addmm_(h, weight.T)
            if bias is not None:
                assert self.biases is not None
                self.bias = self.biases[i]
            return
        self.y, self.bias, self.gate = h @ weight.T, bias, self.mod[i][3 * half + 2]

    def keep(self, at_BK: Tensor) -> None:
        """Go on with these positions alone; nothing is pending but a bias here, the norm before has added the rest."""
        B, K = at_BK.shape
        self.x = gather_positions(self.x.view(B, -1, self.x.shape[1]), at_BK).flatten(0, 1)
        self.rows_per_cond = K

    def finish(self, net: DiTNetwork) -> Tensor:
        if self.mod is None or self.c is None or net.modulation is None:
            return residual_norm(self.x, net.norm.weight, bias_D=self.bias)
        shift, scale = net.modulation(self.c).chunk(2, dim=-1)
        return residual_norm(
            self.x,
            net.norm.weight,
            bias_D=self.bias,
            y_MD=self.y,
            gate=self.gate,
            scale=scale,
            shift=shift,
            rows_per_cond=self.rows_per_cond,
        )
