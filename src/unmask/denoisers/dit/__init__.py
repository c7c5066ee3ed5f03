"""Transformer with rotary positions and optional adaLN time conditioning (the paper's backbone)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask import kernels
from unmask.denoisers import Denoiser
from unmask.denoisers.dit.attention import AtPositions, Attention, Full, InRows
from unmask.denoisers.dit.block import Block, whose_values
from unmask.denoisers.dit.cache import KVCache, cached_trunk, step_rows
from unmask.denoisers.dit.embedding import Embedding
from unmask.denoisers.dit.lines import Keep, Lines
from unmask.denoisers.dit.norm import Norm
from unmask.denoisers.dit.rotary import rope_of, rotary
from unmask.denoisers.dit.start import start_weights
from unmask.denoisers.dit.time import TimeEmbedding, signal_of
from unmask.denoisers.network import (
    Attend,
    Network,
    attending,
    check_labels,
    level_column,
    refuse_options,
)
from unmask.denoisers.ragged import Ragged
from unmask.errors import UsageError
from unmask.registry import came_later, check_fields

if TYPE_CHECKING:
    from unmask.denoisers.dit.fused import Constants

# name: (hidden, blocks, heads). The last three are the paper's, the first three are for CPUs.
SIZES = {
    "nano": (128, 4, 4),
    "micro": (192, 6, 6),
    "mini": (256, 4, 4),
    "tiny": (512, 8, 8),
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
}


@dataclass(frozen=True, kw_only=True)
class DiT(Denoiser):
    """A pre-norm transformer; `conditioning` chooses what the adaLN branch sees.

    none: no adaLN branch. level: 1 - alpha. sigma: -log alpha, as published time-conditioned nets.
    constant: the branch exists and always sees 0, as published nets without time conditioning.
    qk_norm: queries and keys have root mean square 1, which bounds the attention's logits and allows larger learning
    rates. zero_init: every block starts as the identity, as with adaLN, but without its branch.
    value_residual: attention mixes a learned share of the first block's values into the values of later blocks.
    classes: the number of labels, which the branch sees as well; in training a share `label_dropout` of the rows loses
    its label, so that the network also learns to generate without one, as guidance needs.
    """

    size: Literal["nano", "micro", "mini", "tiny", "small", "medium"] = "tiny"
    hidden: int | None = None  # these three override the size
    blocks: int | None = None
    heads: int | None = None
    conditioning: Literal["none", "constant", "level", "sigma"] = "none"
    cond_dim: int = 128
    tied: bool = False
    dropout: float = 0.0
    causal: bool = False
    qk_norm: bool = came_later(True, before=False)
    zero_init: bool = came_later(True, before=False)
    value_residual: bool = False
    classes: int = 0
    label_dropout: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        hidden, blocks, heads = self.dims
        if min(hidden, blocks, heads, self.cond_dim) < 1 or hidden % heads or (hidden // heads) % 2:
            raise UsageError(f"hidden ({hidden}) must be a multiple of 2 x heads ({heads}); all sizes at least 1")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.classes < 0 or not 0 <= self.label_dropout < 1:
            raise UsageError(
                f"classes must be 0 or more and label_dropout in [0, 1), got {self.classes} and {self.label_dropout}"
            )
        if self.causal and self.classes:
            raise UsageError("classes are for denoisers that see both sides: leave out classes or causal")
        if self.causal and self.conditioning in ("level", "sigma"):
            raise UsageError("a causal denoiser sees no noise, so it cannot be conditioned on its level")

    @property
    def dims(self) -> tuple[int, int, int]:
        hidden, blocks, heads = SIZES[self.size]
        return (
            hidden if self.hidden is None else self.hidden,
            blocks if self.blocks is None else self.blocks,
            heads if self.heads is None else self.heads,
        )

    @property
    def uses_level(self) -> bool:
        return self.conditioning in ("level", "sigma")

    def build(self, *, num_ids: int, mask_id: int) -> DiTNetwork:
        return DiTNetwork(self, num_ids=num_ids, mask_id=mask_id)


class DiTNetwork(Network):
    capturable = True
    looks_back = True
    embed: Embedding

    def __init__(self, config: DiT, *, num_ids: int, mask_id: int) -> None:
        super().__init__()
        self.config = config
        self.num_ids, self.mask_id = num_ids, mask_id
        self.causal, self.uses_level = config.causal, config.uses_level
        hidden, blocks, self.num_heads = config.dims
        self.width, self.dropout = hidden, config.dropout
        self.embed = Embedding(num_ids, hidden)
        timed = config.conditioning != "none"
        cond_dim = config.cond_dim if timed or config.classes else 0
        self.time = TimeEmbedding(cond_dim) if timed else None
        self.num_classes, self.label_dropout = config.classes, config.label_dropout
        self.label = nn.Embedding(config.classes + 1, cond_dim) if config.classes else None  # the last: no class
        self.blocks = nn.ModuleList(
            Block(hidden, self.num_heads, cond_dim, config.dropout, config.qk_norm, values)
            for values in whose_values(config.value_residual, blocks)
        )
        self.norm = Norm(hidden)
        self.modulation = nn.Linear(cond_dim, 2 * hidden) if cond_dim else None
        self.output = nn.Linear(hidden, num_ids)
        self._rope_tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._kept: Constants | None = None
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
            refuse_options("dit with a cache", positions_BL=positions_BL, at_BK=at_BK, cond=cond, attend=attend)
            return cached_trunk(self, z, cache, span or (0, z.shape[1]))
        refuse_options("dit without a cache", span=span)
        mask, causal = self._mask(attending(attend, valid_BL), z)
        shifted = self.shift(z) if self.causal else z
        level_per_position = level is not None and level.ndim > 1 and self.uses_level
        if positions_BL is None and not level_per_position and self.can_fuse():
            from unmask.denoisers.dit.fused import fused_trunk

            return fused_trunk(self, shifted, level, mask=mask, causal=causal, cond=cond, at_BK=at_BK)
        return self._blocks(shifted, level, mask, positions_BL, at_BK, causal=causal, cond=cond)

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
        """After the last block's attention only the requested positions are computed; a loss needs about half."""
        if self.can_fuse():
            return super().trunk_at(z, level, flat_N, valid_BL=valid_BL, attend=attend, cond=cond)
        told, shifted = attending(attend, valid_BL), self.shift(z) if self.causal else z
        if self.can_fuse_training() and (level is None or level.ndim == 1 or not self.uses_level):
            from unmask.denoisers.dit.fused_training import fused_training_trunk

            c, back = self.condition(z, level, cond), told.back if told.unmasked else 0
            mask, causal = self._mask(told._replace(back=told.back - back), z)
            return fused_training_trunk(self, shifted, flat_N, c, mask=mask, causal=causal, back=back)
        mask, causal = self._mask(told, z)
        return self._blocks(shifted, level, mask, flat_N=flat_N, causal=causal, cond=cond)

    def takes_ragged(self) -> bool:
        # a row's shift, scale and gate would be copied to each of its positions, which costs more than padding
        return not self.uses_level and not self.num_classes and not self.can_fuse()

    def trunk_ragged(
        self, z_M: Tensor, level_B: Tensor | None, rows: Ragged, flat_N: Tensor, *, cond: Tensor | None = None
    ) -> Tensor:
        ids_M = torch.where(rows.position_M == 0, self.mask_id, z_M.roll(1)) if self.causal else z_M
        causal = self.causal or rows.causal
        if self.can_fuse_training():
            from unmask.denoisers.dit.fused_training import fused_training_trunk

            c = self.condition(z_M, level_B, cond)
            return fused_training_trunk(self, ids_M, flat_N, c, causal=causal, rows=rows)
        return self._blocks(ids_M, level_B, None, flat_N=flat_N, causal=causal, cond=cond, rows=rows)

    def _mask(self, attend: Attend, z: Tensor) -> tuple[Tensor | None, bool]:
        """The arguments of attention: a mask, or causal = True."""
        plain = attend.mask is None and attend.blocks is None
        if self.causal and not plain:
            raise UsageError("a causal denoiser sees what stands before a position: give it no mask and no blocks")
        if plain and (self.causal or attend.causal):
            return None, True  # padding is at the end of a row, so no real position sees it
        mask = attend.allowed((z.shape[0], z.shape[1]))
        return None if mask is None else mask.to(z.device), False

    def _blocks(
        self,
        z: Tensor,
        level: Tensor | None,
        mask: Tensor | None,
        positions_BL: Tensor | None = None,
        at_BK: Tensor | None = None,
        flat_N: Tensor | None = None,
        *,
        causal: bool,
        cond: Tensor | None = None,
        rows: Ragged | None = None,
    ) -> Tensor:
        """All blocks in plain torch, the last only at the requested positions; with `rows`, tensors are [M, D]."""
        c = self.condition(z, level, cond)
        x = self.embed(z)
        if torch.is_autocast_enabled(x.device.type):
            # The residual stream in the products' precision: half the traffic, and the products see no difference.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        length = z.shape[1] if rows is None else rows.shape[1]
        rope = rotary(self.head_dim, positions_BL, length, x.device, x.dtype)
        see: Attention
        last: Attention
        if rows is None:
            see = last = Full(rope, mask, causal)
            if flat_N is not None:
                last = replace(see, keep=Keep(Lines(row_N=flat_N // length, flat_N=flat_N), flat_N))
            elif at_BK is not None:
                last = AtPositions(rope, mask, causal, at_BK, see.first)
        else:
            assert flat_N is not None
            rope, lines = rope_of(rope, rows.position_M), Lines(row_N=rows.row_M, flat_N=rows.at_M)
            see = InRows(rope, rows, causal, None, lines)
            keep = Keep(Lines(row_N=rows.row_M[flat_N], flat_N=rows.at_M[flat_N]), flat_N)
            last = replace(see, keep=keep)
        for i, block in enumerate(self.blocks):
            now = last if i == len(self.blocks) - 1 else see
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, c, now, use_reentrant=False)
            else:
                x = block(x, c, now)
        return self.final(x, c, see.lines if last.keep is None else last.keep.lines)

    def head(self, h_ND: Tensor) -> Tensor:
        return self.output(h_ND)  # type: ignore[no-any-return]

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.output.parameters())

    def head_linear(self) -> nn.Linear:
        return self.output

    def parts(self) -> list[nn.Module]:
        return list(self.blocks)

    def matrices(self) -> dict[str, int]:
        """The blocks' matrices, except those of adaLN.

        Embeddings and head are left to AdamW: their rows are tokens, with gradients of very different sizes.
        """
        inside = [
            name
            for name, p in self.named_parameters()
            if p.ndim == 2 and name.startswith("blocks.") and "modulation" not in name
        ]
        return {name: 3 if name.endswith("qkv.weight") else 1 for name in inside}

    @property
    def layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    def can_fuse(self) -> bool:
        """Whether the forward pass in fused.py applies: inference on a GPU."""
        training = torch.is_grad_enabled() or self.training or torch.is_autocast_enabled("cuda")
        return not training and self._fits_kernels()

    def can_fuse_training(self) -> bool:
        """Whether the pass in fused_training.py applies: training on a GPU, or validation during training."""
        return (torch.is_grad_enabled() or torch.is_autocast_enabled("cuda")) and self._fits_kernels()

    def _fits_kernels(self) -> bool:
        # A subclass of a plug-in runs as it is written, and a hook is called.
        ours = all(type(block) is Block and not block._forward_hooks for block in self.blocks)
        return ours and not self.sharded and not torch.compiler.is_compiling() and kernels.fit(self.embed.weight)

    def can_decode(self) -> bool:
        return self.causal and self.can_fuse()

    def decode(self, ids_B: Tensor, position_1: Tensor, cache: KVCache, stop: int) -> Tensor:
        from unmask.denoisers.dit.fused import fused_decode

        return fused_decode(self, ids_B, position_1, cache, stop)

    def can_step_rows(self) -> bool:
        return self.causal and not self.sharded

    def step_rows(self, ids_M: Tensor, caches: Sequence[KVCache], at: Sequence[int]) -> Tensor:
        return step_rows(self, ids_M, caches, at)

    def constants(self, z: Tensor, level_B: Tensor | None, cond: Tensor | None = None) -> Constants:
        """What adaLN computes; without a level, captured graphs read a copy that `before_replay` updates."""
        from unmask.denoisers.dit.fused import Constants

        if self._kept is not None and not self.uses_level and torch.cuda.is_current_stream_capturing():
            return self._kept
        return Constants(self, self.condition(z, level_B, cond))

    def before_replay(self) -> None:
        from unmask.denoisers.dit.fused import Constants

        if self.uses_level:
            return
        fresh = Constants(self, self.condition(self.embed.weight, None))
        if self._kept is None or self._kept.place != fresh.place:
            self._kept = fresh
        else:
            self._kept.copy_(fresh)

    def rope_table(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [L, head_dim/2] in float32; never freed, since captured graphs keep reading them."""
        device = self.embed.weight.device
        if (length, device) not in self._rope_tables:
            cos, sin = rotary(self.head_dim, None, length, device, torch.float32)
            self._rope_tables[length, device] = cos[0, 0], sin[0, 0]
        return self._rope_tables[length, device]

    def new_cache(self, batch: int, length: int) -> KVCache | None:
        """Keys and values of every block; None if every position sees every other."""
        if not self.causal:
            return None
        weight = self.embed.weight
        shape = (batch, self.num_heads, length, self.head_dim)
        # zeros: what is masked out is still multiplied by 0, and 0 x uninitialised memory may be NaN
        return [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.blocks]

    @property
    def head_dim(self) -> int:
        return int(self.embed.embedding_dim // self.num_heads)

    def shift(self, z: Tensor) -> Tensor:
        """Shift z so that position l is predicted from the previous ones; the first input is the mask."""
        if not z.is_floating_point():
            return F.pad(z[:, :-1], (1, 0), value=self.mask_id)
        first_B1E = self.embed(torch.full((len(z), 1), self.mask_id, device=z.device))
        return torch.cat([first_B1E.to(z.dtype), z[:, :-1]], dim=1)

    def condition(self, z: Tensor, level: Tensor | None, label_B: Tensor | None = None) -> Tensor | None:
        """The input of adaLN: [B or 1, C], or [B, L, C] if each position has its own level."""
        time, label = self._time(z, level), self._label(z, label_B)
        if time is None or label is None:
            one = label if time is None else time
            return None if one is None else F.silu(one)
        return F.silu(time + (label if time.ndim == 2 else label.unsqueeze(1)))

    def _label(self, z_BL: Tensor, label_B: Tensor | None) -> Tensor | None:
        label_B = check_labels(label_B, self.num_classes)
        if self.label is None:
            return None
        if label_B is None:  # one row serves the whole batch
            label_B = torch.full((1,), -1, device=z_BL.device)
        return cast(Tensor, self.label(torch.where(label_B < 0, self.num_classes, label_B)))

    def _time(self, z: Tensor, level: Tensor | None) -> Tensor | None:
        if self.time is None:
            return None
        level = level_column(level, z, self.uses_level, torch.float32)
        if level is None:  # constant: one row serves the whole batch
            signal = torch.zeros(1, device=z.device)
        else:
            signal = signal_of(self.config.conditioning, level)
        return cast(Tensor, self.time(signal))

    def final(self, x: Tensor, c: Tensor | None, lines: Lines) -> Tensor:
        """The last norm, modulated."""
        h: Tensor = self.norm(x)
        if self.modulation is None or c is None:
            return h
        shift, scale = lines.spread(self.modulation(c)).chunk(2, dim=-1)
        return torch.addcmul(shift, h, 1 + scale)
