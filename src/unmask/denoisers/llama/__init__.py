"""Transformer of the Llama family (RMSNorm, SwiGLU, grouped keys and values); accepts pretrained weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.denoisers import Denoiser
from unmask.denoisers.dit import SIZES
from unmask.denoisers.dit.embedding import Embedding
from unmask.denoisers.dit.rotary import Rope, rope_of, turned
from unmask.denoisers.llama.attention import AtPositions, Attention, Full, InRows
from unmask.denoisers.llama.block import Block, Dims
from unmask.denoisers.llama.cache import KVCache, cached_trunk, decode, step_rows
from unmask.denoisers.llama.norm import RMSNorm
from unmask.denoisers.llama.reading import ragged_with_begin, with_begin
from unmask.denoisers.llama.rope import RopeScaling, frequencies
from unmask.denoisers.network import Attend, Network, attending, check_labels, refuse_options
from unmask.denoisers.ragged import Ragged
from unmask.errors import UsageError
from unmask.registry import check_fields


@dataclass(frozen=True, kw_only=True)
class Llama(Denoiser):
    """A pre-norm transformer as Llama, SmolLM2, Qwen2 and Qwen3 have it; it does not look at the noise level.

    size and what overrides it are the DiT's. groups: heads of keys and values, each shared by heads / groups queries;
    None: as many as heads. head_dim: None: hidden / heads. inner: of SwiGLU; None: 8/3 hidden, which is as many
    parameters as a plain MLP of 4 hidden. theta, scaling: of the rotary positions. qkv_bias: as Qwen2; out_bias,
    mlp_bias: as some Llamas; qk_norm: queries and keys are normed with a weight, as Qwen3's. tied: the head is the
    embedding.

    causal: position l sees what stands before it, and is read off position l - 1's vector, as in all autoregression.
    shifted: so is it where both sides are seen, as Dream (arXiv 2508.15487) and DiffuLLaMA (2410.17891) go on from
    autoregressive weights; off: position l is read off its own vector, as LLaDA (2502.09992) is trained. begin: the id
    that stands before a causal or shifted network's first position; None: the mask.
    """

    chosen_by_recipe: ClassVar[tuple[str, ...]] = ("causal", "shifted")  # whatever the weights were trained for

    size: Literal["nano", "micro", "mini", "tiny", "small", "medium"] = "tiny"
    hidden: int | None = None  # these three override the size
    blocks: int | None = None
    heads: int | None = None
    groups: int | None = None
    head_dim: int | None = None
    inner: int | None = None
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    eps: float = 1e-5
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    causal: bool = False
    shifted: bool = False
    begin: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        dims = self.dims
        if min(vars(dims).values()) < 1 or dims.head_dim % 2 or dims.heads % dims.groups:
            raise UsageError(
                f"all sizes must be at least 1, head_dim ({dims.head_dim}) even and heads ({dims.heads}) a multiple of "
                f"groups ({dims.groups})"
            )
        if self.head_dim is None and dims.hidden % dims.heads:
            raise UsageError(f"hidden ({dims.hidden}) must be a multiple of heads ({dims.heads}), or head_dim be set")
        if not self.theta > 1 or not self.eps > 0:
            raise UsageError(f"theta must be above 1 and eps above 0, got {self.theta} and {self.eps}")

    @property
    def dims(self) -> Dims:
        """
        >>> Llama(hidden=576, blocks=30, heads=9, groups=3).dims
        Dims(hidden=576, blocks=30, heads=9, groups=3, head_dim=64, inner=1536)
        """
        hidden, blocks, heads = (
            of_size if own is None else own
            for own, of_size in zip((self.hidden, self.blocks, self.heads), SIZES[self.size], strict=True)
        )
        head_dim = hidden // max(1, heads) if self.head_dim is None else self.head_dim
        inner = -(-8 * hidden // 3 // 64) * 64 if self.inner is None else self.inner
        return Dims(hidden, blocks, heads, heads if self.groups is None else self.groups, head_dim, inner)

    @property
    def uses_level(self) -> bool:
        return False

    def build(self, *, num_ids: int, mask_id: int) -> LlamaNetwork:
        return LlamaNetwork(self, num_ids=num_ids, mask_id=mask_id)


class LlamaNetwork(Network):
    capturable = True
    looks_back = True
    embed: Embedding

    def __init__(self, config: Llama, *, num_ids: int, mask_id: int) -> None:
        super().__init__()
        self.config, dims = config, config.dims
        self.num_ids, self.mask_id = num_ids, mask_id
        self.causal, self.shifted = config.causal, config.causal or config.shifted
        self.begin_id = mask_id if config.begin is None else config.begin
        if not 0 <= self.begin_id < num_ids:
            raise UsageError(f"begin must be one of the {num_ids} ids of the tokenizer, got {self.begin_id}")
        self.width, self.dims = dims.hidden, dims
        self.embed = Embedding(num_ids, dims.hidden)
        self.blocks = nn.ModuleList(
            Block(
                dims,
                eps=config.eps,
                qkv_bias=config.qkv_bias,
                out_bias=config.out_bias,
                mlp_bias=config.mlp_bias,
                qk_norm=config.qk_norm,
            )
            for _ in range(dims.blocks)
        )
        self.norm = RMSNorm(dims.hidden, config.eps)
        self.output = nn.Linear(dims.hidden, num_ids, bias=False)
        start_weights(self)
        if config.tied:
            self.output.weight = self.embed.weight

    def trunk(
        self,
        z: Tensor,
        level: Tensor | None = None,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        positions_BL: Tensor | None = None,
        cond: Tensor | None = None,
        cache: KVCache | None = None,
        span: tuple[int, int] | None = None,
        at_BK: Tensor | None = None,
    ) -> Tensor:
        if cache is not None:
            if not self.causal:
                raise UsageError("a key-value cache needs a causal denoiser: here every position sees every other")
            refuse_options("llama with a cache", positions_BL=positions_BL, at_BK=at_BK, cond=cond, attend=attend)
            return cached_trunk(self, z, cache, span or (0, z.shape[1]))
        refuse_options("llama without a cache", span=span)
        check_labels(cond, 0)
        see = self._full(attending(attend, valid_BL), z, positions_BL)
        if at_BK is not None:
            return self._blocks(self.read(z), see, AtPositions(see.rope, self._unsplit(see, z), see.causal, at_BK))
        return self._blocks(self.read(z), see, see)[:, : z.shape[1]]

    def trunk_at(
        self,
        z: Tensor,
        level: Tensor | None,
        flat_N: Tensor,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        cond: Tensor | None = None,
    ) -> Tensor:
        """After the last block's attention only the asked positions go on: a loss looks at half of them."""
        check_labels(cond, 0)
        see, read = self._full(attending(attend, valid_BL), z, None), self.read(z)
        flat_N = flat_N + flat_N // z.shape[1] * (read.shape[1] - z.shape[1])
        return self._blocks(read, see, replace(see, flat_N=flat_N))

    def takes_ragged(self) -> bool:
        return True

    def trunk_ragged(
        self, z_M: Tensor, level_B: Tensor | None, rows: Ragged, flat_N: Tensor, *, cond: Tensor | None = None
    ) -> Tensor:
        check_labels(cond, 0)
        if self.causal:
            z_M = torch.where(rows.position_M == 0, self.begin_id, z_M.roll(1))
        elif self.shifted:
            z_M, rows, flat_N = ragged_with_begin(z_M, rows, flat_N, self.begin_id)
        rope = rope_of(self.rope(None, rows.shape[1], self.embed.weight), rows.position_M)
        see = InRows(rope, rows, self.causal or rows.causal)
        return self._blocks(z_M, see, replace(see, flat_N=flat_N))

    def read(self, z: Tensor) -> Tensor:
        """What the blocks read: z; of a shifted network the begin and z, of which a causal one leaves out the last."""
        if not self.shifted:
            return z
        rest = z[:, :-1] if self.causal else z
        if not z.is_floating_point():
            return F.pad(rest, (1, 0), value=self.begin_id)
        first_B1E = self.embed(torch.full((len(z), 1), self.begin_id, device=z.device))
        return torch.cat([first_B1E.to(z.dtype), rest], dim=1)

    def rope(self, positions_BL: Tensor | None, length: int, like: Tensor) -> Rope:
        inv_freq = frequencies(self.dims.head_dim, self.config.theta, self.config.scaling, like.device)
        return turned(inv_freq, positions_BL, length, like.dtype)

    def _full(self, told: Attend, z: Tensor, positions_BL: Tensor | None) -> Full:
        """All positions at once, as they are told to see each other."""
        plain = told.mask is None and told.blocks is None
        if self.causal and not plain:
            raise UsageError("a causal denoiser sees what stands before a position: give it no mask and no blocks")
        longer = self.shifted and not self.causal
        if positions_BL is not None and longer:
            positions_BL = torch.cat([positions_BL, positions_BL[:, -1:] + 1], dim=1)
        rope = self.rope(positions_BL, z.shape[1] + longer, self.embed.weight)
        if plain and (self.causal or told.causal):
            return Full(rope, None, True)  # padding stands at the end of a row, so no real position sees it
        if told.unmasked:
            return Full(rope, None, False, back=told.back)
        mask = told.allowed((z.shape[0], z.shape[1]))
        assert mask is not None
        mask = with_begin(mask, padding=plain and not told.back) if longer else mask
        return Full(rope, mask.to(z.device), False)

    def _unsplit(self, see: Full, z: Tensor) -> Tensor | None:
        """The mask for some positions of each row, where those that look back are not told by one."""
        if not see.back:
            return see.mask
        mask = Attend(back=see.back).allowed((z.shape[0], z.shape[1]))
        assert mask is not None
        return (with_begin(mask, padding=False) if self.shifted else mask).to(z.device)

    def _blocks(self, z: Tensor, see: Attention, last: Attention) -> Tensor:
        """All blocks; the last one only where somebody looks."""
        x = self.embed(z)
        if torch.is_autocast_enabled(x.device.type):
            # The residual stream in the products' own precision: half the traffic, and nothing the products would see.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for i, block in enumerate(self.blocks):
            now = last if i == len(self.blocks) - 1 else see
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, now, use_reentrant=False)
            else:
                x = block(x, now)
        return self.norm(x)  # type: ignore[no-any-return]

    def head(self, h_ND: Tensor) -> Tensor:
        return self.output(h_ND)  # type: ignore[no-any-return]

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.output.parameters())

    def head_linear(self) -> nn.Linear:
        return self.output

    def parts(self) -> list[nn.Module]:
        return list(self.blocks)

    def matrices(self) -> dict[str, int]:
        """The blocks' matrices. Embeddings and head are none: their rows are words, each with a gradient of its own
        size."""
        inside = [name for name, p in self.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]
        return {name: 2 if name.endswith(("kv.weight", "gate_up.weight")) else 1 for name in inside}

    def new_cache(self, batch: int, length: int) -> KVCache | None:
        """Keys and values of every block; None where every position sees every other."""
        if not self.causal:
            return None
        shape = (batch, self.dims.groups, length, self.dims.head_dim)
        weight = self.embed.weight
        # zeros: what is masked out is still multiplied by 0, and 0 x garbage may be NaN
        return [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.blocks]

    def can_decode(self) -> bool:
        used = not (torch.is_grad_enabled() or self.training or torch.is_autocast_enabled("cuda"))
        return self.causal and used and not self.sharded and self.embed.weight.is_cuda

    def decode(self, ids_B: Tensor, position_1: Tensor, cache: KVCache, stop: int) -> Tensor:
        return decode(self, ids_B, position_1, cache, stop)

    def can_step_rows(self) -> bool:
        return self.causal and not self.sharded

    def step_rows(self, ids_M: Tensor, caches: Sequence[KVCache], at: Sequence[int]) -> Tensor:
        return step_rows(self, ids_M, caches, at)


def start_weights(net: LlamaNetwork) -> None:
    """Small normal numbers, smaller where a branch is added to the stream; the head as the uniform law, unless it is
    the embedding."""
    for name, p in net.named_parameters():
        if name.endswith("bias") or name == "output.weight":
            nn.init.zeros_(p)
        elif p.ndim > 1:
            added = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(p, std=0.02 / math.sqrt(2 * len(net.blocks)) if added else 0.02)
