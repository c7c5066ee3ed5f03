"""Transformer with rotary positions and optional adaLN time conditioning (the paper's backbone)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask import kernels
from unmask.denoisers import Denoiser
from unmask.denoisers.dit.block import Block, per_position, row_of
from unmask.denoisers.dit.norm import Norm
from unmask.denoisers.dit.rotary import rope_of, rotary
from unmask.denoisers.dit.rows import step_rows
from unmask.denoisers.dit.time import TimeEmbedding
from unmask.denoisers.network import (
    KVCache,
    Network,
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
    qk_norm: queries and keys have root mean square 1, which bounds the attention's logits and bears larger rates.
    zero_init: every block starts as the identity, as adaLN's do, without its branch.
    classes: so many labels, which the branch sees as well; `label_dropout` of the rows lose theirs in training, so that
    the network learns to write without one, too, as guidance needs.
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
        given = (self.hidden, self.blocks, self.heads)
        hidden, blocks, heads = (p if g is None else g for p, g in zip((hidden, blocks, heads), given, strict=True))
        return hidden, blocks, heads

    @property
    def uses_level(self) -> bool:
        return self.conditioning in ("level", "sigma")

    def build(self, *, num_ids: int, mask_id: int) -> DiTNetwork:
        return DiTNetwork(self, num_ids=num_ids, mask_id=mask_id)


class DiTNetwork(Network):
    capturable = True

    def __init__(self, config: DiT, *, num_ids: int, mask_id: int) -> None:
        super().__init__()
        self.config = config
        self.num_ids, self.mask_id = num_ids, mask_id
        self.causal, self.uses_level = config.causal, config.uses_level
        hidden, blocks, self.num_heads = config.dims
        self.width = hidden
        self.embed = nn.Embedding(num_ids, hidden)
        timed = config.conditioning != "none"
        cond_dim = config.cond_dim if timed or config.classes else 0
        self.time = TimeEmbedding(cond_dim) if timed else None
        self.num_classes, self.label_dropout = config.classes, config.label_dropout
        self.label = nn.Embedding(config.classes + 1, cond_dim) if config.classes else None  # the last: no class
        self.blocks = nn.ModuleList(
            Block(hidden, self.num_heads, cond_dim, config.dropout, config.qk_norm) for _ in range(blocks)
        )
        self.norm = Norm(hidden)
        self.modulation = nn.Linear(cond_dim, 2 * hidden) if cond_dim else None
        self.output = nn.Linear(hidden, num_ids)
        self._rope_tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._kept: Constants | None = None
        self._init_weights()
        if config.tied:
            self.output.weight = self.embed.weight

    def _init_weights(self) -> None:
        for name, p in self.named_parameters():
            if name.endswith("bias") or "modulation" in name or name == "output.weight":
                nn.init.zeros_(p)  # adaLN starts as the identity, the head as the uniform law
            elif p.ndim > 1:
                nn.init.normal_(p, std=1.0 if name == "label.weight" else 0.02)  # a class is no small hint
            if name.startswith("blocks.") and name.endswith("out.weight"):  # added to the residual stream, 2 a block
                # adaLN's gate is zero already: a second zero behind it, and neither would ever have a gradient.
                identity = self.config.zero_init and self.modulation is None
                nn.init.normal_(p, std=0.0 if identity else 0.02 / math.sqrt(2 * len(self.blocks)))

    def trunk(
        self,
        z_BL: Tensor,
        level_B: Tensor | None = None,
        *,
        valid_BL: Tensor | None = None,
        positions_BL: Tensor | None = None,
        cond: Tensor | None = None,
        cache: KVCache | None = None,
        at_BK: Tensor | None = None,
    ) -> Tensor:
        if cache is not None:
            if not self.causal:
                raise UsageError("a key-value cache needs a causal denoiser: here every position sees every other")
            refuse_options("dit with a cache", positions_BL=positions_BL, at_BK=at_BK, cond=cond)
            return self._trunk_cached(z_BL, cache)
        ids_BL = self._shift(z_BL) if self.causal else z_BL
        if positions_BL is None and self.can_fuse():
            from unmask.denoisers.dit.fused import fused_trunk

            return fused_trunk(self, ids_BL, level_B, valid_BL=valid_BL, cond=cond, at_BK=at_BK)
        return self._blocks(ids_BL, level_B, valid_BL, positions_BL, at_BK, cond=cond)

    def trunk_at(
        self,
        z_BL: Tensor,
        level_B: Tensor | None,
        flat_N: Tensor,
        *,
        valid_BL: Tensor | None = None,
        cond: Tensor | None = None,
    ) -> Tensor:
        """Behind the last block's attention only the asked positions go on: a loss looks at half of them."""
        if self.can_fuse():
            return super().trunk_at(z_BL, level_B, flat_N, valid_BL=valid_BL, cond=cond)
        ids_BL = self._shift(z_BL) if self.causal else z_BL
        return self._blocks(ids_BL, level_B, valid_BL, flat_N=flat_N, cond=cond)

    def takes_ragged(self) -> bool:
        # a row's own shift, scale and gate would be copied to each of its positions, which costs more than padding
        return not self.uses_level and not self.num_classes and not self.can_fuse()

    def trunk_ragged(
        self, z_M: Tensor, level_B: Tensor | None, rows: Ragged, flat_N: Tensor, *, cond: Tensor | None = None
    ) -> Tensor:
        ids_M = torch.where(rows.position_M == 0, self.mask_id, z_M.roll(1)) if self.causal else z_M
        return self._blocks(ids_M, level_B, None, flat_N=flat_N, cond=cond, rows=rows)

    def _blocks(
        self,
        ids_BL: Tensor,
        level_B: Tensor | None,
        valid_BL: Tensor | None,
        positions_BL: Tensor | None = None,
        at_BK: Tensor | None = None,
        flat_N: Tensor | None = None,
        cond: Tensor | None = None,
        rows: Ragged | None = None,
    ) -> Tensor:
        c_BC = self.condition(ids_BL, level_B, cond)
        x_BLD = self.embed(ids_BL)
        if torch.is_autocast_enabled(x_BLD.device.type):
            # The residual stream in the products' own precision: half the traffic, and nothing the products would see.
            x_BLD = x_BLD.to(torch.get_autocast_dtype(x_BLD.device.type))
        length = ids_BL.shape[1] if rows is None else rows.shape[1]
        rope = rotary(self._head_dim, positions_BL, length, x_BLD.device, x_BLD.dtype)
        if rows is not None:
            rope = rope_of(rope, rows.position_M)
        # Padding stands at the end of a row, so a causal mask already hides it from every real position.
        mask = None if valid_BL is None or self.causal else valid_BL[:, None, None, :]
        for i, block in enumerate(self.blocks):
            # the last block only where somebody looks
            at, flat = (at_BK, flat_N) if i == len(self.blocks) - 1 else (None, None)
            if self.checkpoint_activations and torch.is_grad_enabled():
                x_BLD = checkpoint(
                    block, x_BLD, c_BC, rope, mask, self.causal, at, None, flat, rows, use_reentrant=False
                )
            else:
                x_BLD = block(x_BLD, c_BC, rope, mask, self.causal, at, None, flat, rows)
        return self._final(x_BLD, c_BC, None if flat_N is None else row_of(flat_N, length, rows))

    def head(self, h_ND: Tensor) -> Tensor:
        return self.output(h_ND)  # type: ignore[no-any-return]

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.output.parameters())

    def head_linear(self) -> nn.Linear:
        return self.output

    def parts(self) -> list[nn.Module]:
        return list(self.blocks)

    @property
    def layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    def can_fuse(self) -> bool:
        """Used, not trained, on a GPU: the forward pass in _dit_fused.py applies."""
        training = torch.is_grad_enabled() or self.training or torch.is_autocast_enabled("cuda")
        plain = not training and not self.sharded and not torch.compiler.is_compiling()
        return plain and kernels.fit(self.embed.weight)

    def can_decode(self) -> bool:
        return self.causal and self.can_fuse()

    def decode(self, ids_B: Tensor, position_1: Tensor, kv: list[tuple[Tensor, Tensor]], stop: int) -> Tensor:
        from unmask.denoisers.dit.fused import fused_decode

        return fused_decode(self, ids_B, position_1, kv, stop)

    def can_step_rows(self) -> bool:
        return self.causal and not self.sharded

    def step_rows(self, ids_M: Tensor, caches: Sequence[KVCache]) -> Tensor:
        return step_rows(self, ids_M, caches)

    def constants(self, z: Tensor, level_B: Tensor | None, cond: Tensor | None = None) -> Constants:
        """A captured graph reads those that `before_replay` keeps fresh, save where the level decides them."""
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
        """cos and sin [L, head_dim/2] in float32; kept, since a captured graph goes on reading them."""
        device = self.embed.weight.device
        if (length, device) not in self._rope_tables:
            cos, sin = rotary(self._head_dim, None, length, device, torch.float32)
            self._rope_tables[length, device] = cos[0, 0], sin[0, 0]
        return self._rope_tables[length, device]

    def split_heads(self, y_MD: Tensor, batch: int) -> Tensor:
        """[B x L, D] → [B, heads, L, head_dim]"""
        return y_MD.view(batch, -1, self.num_heads, self._head_dim).transpose(1, 2)

    def empty_cache(self, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Room for the keys and values of every block."""
        weight = self.embed.weight
        shape = (batch, self.num_heads, length, self._head_dim)
        # zeros: what is masked out is still multiplied by 0, and 0 x garbage may be NaN
        return [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.blocks]

    @property
    def _head_dim(self) -> int:
        return int(self.embed.embedding_dim // self.num_heads)

    def _shift(self, z_BL: Tensor) -> Tensor:
        """Position l is predicted from what stands before it; before the first stands the mask, which no text holds."""
        return F.pad(z_BL[:, :-1], (1, 0), value=self.mask_id)

    def condition(self, z_BL: Tensor, level_B: Tensor | None, label_B: Tensor | None = None) -> Tensor | None:
        said = [c for c in (self._time(z_BL, level_B), self._label(z_BL, label_B)) if c is not None]
        return F.silu(sum(said[1:], said[0])) if said else None

    def _label(self, z_BL: Tensor, label_B: Tensor | None) -> Tensor | None:
        label_B = check_labels(label_B, self.num_classes)
        if self.label is None:
            return None
        if label_B is None:  # one row serves the whole batch
            label_B = torch.full((1,), -1, device=z_BL.device)
        embedded: Tensor = self.label(torch.where(label_B < 0, self.num_classes, label_B))
        return embedded

    def _time(self, z_BL: Tensor, level_B: Tensor | None) -> Tensor | None:
        if self.time is None:
            return None
        level = level_column(level_B, z_BL, self.uses_level, torch.float32)
        if level is None:  # constant: one row serves the whole batch
            signal = torch.zeros(1, device=z_BL.device)
        elif self.config.conditioning == "sigma":
            # Published nets were trained with alpha(1) = 1e-3, so sigma never exceeded -log 1e-3.
            signal = -torch.log1p(-level.clamp(max=1 - 1e-3))
        else:
            signal = 1000 * level
        embedded: Tensor = self.time(signal)
        return embedded

    def _final(self, x_BLD: Tensor, c_BC: Tensor | None, row_N: Tensor | None = None) -> Tensor:
        h_BLD: Tensor = self.norm(x_BLD)
        if self.modulation is None or c_BC is None:
            return h_BLD
        shift, scale = per_position(self.modulation(c_BC), row_N).chunk(2, dim=-1)
        return torch.addcmul(shift, h_BLD, 1 + scale)

    def _trunk_cached(self, z_BL: Tensor, cache: KVCache) -> Tensor:
        """Positions cache.length..cache.stop-1 of every row, in lockstep."""
        start, stop = cache.length, cache.stop
        B, L = z_BL.shape
        if not 0 <= start < stop <= L:
            raise UsageError(f"the cache holds {start} positions and was asked for {stop} of {L}")
        x_BND = self.embed(self._shift(z_BL)[:, start:stop])
        if not cache.blocks:
            cache.blocks = self.empty_cache(B, L)
        cos, sin = rotary(self._head_dim, None, stop, x_BND.device, x_BND.dtype)
        mask = None
        if start > 0 and stop - start > 1:
            steps = torch.arange(stop, device=z_BL.device)
            mask = steps[None, :] <= steps[start:, None]
        c_BC = self.condition(z_BL, None)
        for block, kv in zip(self.blocks, cache.blocks, strict=True):
            causal = start == 0 and stop > 1
            x_BND = block(
                x_BND, c_BC, (cos[..., start:, :], sin[..., start:, :]), mask, causal, None, (kv, start, stop)
            )
        cache.length = stop
        return self._final(x_BND, c_BC)
