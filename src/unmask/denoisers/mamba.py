"""Mamba: a selective state space, read from left to right; a token costs the same in a text of any length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from unmask.denoisers import Denoiser
from unmask.denoisers.flat_rows import gather_positions
from unmask.denoisers.network import Attend, refuse_options
from unmask.denoisers.recurrent.cache import RecurrentCache, States
from unmask.denoisers.recurrent.layers import Block, Branch, Layered, RMSNorm, Sizes, check_begin, check_sizes
from unmask.denoisers.recurrent.mixer import Mixer, MixerSizes
from unmask.errors import UsageError
from unmask.registry import check_fields


@dataclass(frozen=True, kw_only=True)
class Mamba(Denoiser):
    """Blocks x + mixer(norm(x)), causal; 128 x 4 is the DNA experiments' size.

    expand: channels of a mixer, in widths. states: numbers that each channel remembers. taps: of the short convolution.
    rank: of the map that makes the steps; 0 is hidden / 16. begin: the id that stands before a text; none: the mask.
    """

    hidden: int = 128
    blocks: int = 4
    expand: int = 2
    states: int = 16
    taps: int = 4
    rank: int = 0
    tied: bool = True
    begin: int | None = None

    causal = True
    uses_level = False

    def __post_init__(self) -> None:
        check_fields(self)
        own = {"hidden": self.hidden, "blocks": self.blocks, "expand": self.expand, "states": self.states}
        check_sizes(conditioning="none", cond_dim=1, classes=0, label_dropout=0.0, taps=self.taps, **own)
        if self.rank < 0:
            raise UsageError(f"rank must be at least 1, or 0 for hidden / 16; got {self.rank}")

    def build(self, *, num_ids: int, mask_id: int) -> MambaNetwork:
        return MambaNetwork(self, num_ids=num_ids, mask_id=mask_id)


def mixer_sizes(*, hidden: int, expand: int, states: int, taps: int, rank: int) -> MixerSizes:
    return MixerSizes(hidden, expand, states, taps, rank or math.ceil(hidden / 16))


class MambaNetwork(Layered):
    causal = True

    def __init__(self, config: Mamba, *, num_ids: int, mask_id: int) -> None:
        self.mixer_sizes = mixer_sizes(
            hidden=config.hidden, expand=config.expand, states=config.states, taps=config.taps, rank=config.rank
        )
        D = config.hidden
        mixers = (Mixer(self.mixer_sizes, both=False, depth=config.blocks) for _ in range(config.blocks))
        blocks = [Block(Branch(RMSNorm(D), mixer, D, 0)) for mixer in mixers]
        begin = check_begin(config.begin, num_ids)
        super().__init__("mamba", Sizes(num_ids, mask_id, D, config.tied, begin=begin), blocks, RMSNorm(D))
        self.config = config

    def trunk(
        self,
        z: Tensor,
        level: Tensor | None = None,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        cache: RecurrentCache | None = None,
        span: tuple[int, int] | None = None,
        at_BK: Tensor | None = None,
        cond: Tensor | None = None,
        **other: Any,
    ) -> Tensor:
        if cache is None:
            return super().trunk(z, level, valid_BL=valid_BL, attend=attend, cond=cond, at_BK=at_BK, span=span, **other)
        refuse_options("mamba with a cache", attend=attend, cond=cond, **other)
        start, stop = span or (0, z.shape[1])
        if not 0 <= start < stop <= z.shape[1]:
            raise UsageError(f"a cache was asked for the positions from {start} to {stop} of {z.shape[1]}")
        x_BND = self.embed(self.shift(z)[:, start:stop])
        if stop - start == 1:
            x_BD, after = self._step(x_BND[:, 0], cache.before(start))
            x_BND = x_BD.unsqueeze(1)
        else:
            x_BND, after = self._read_on(x_BND, cache.before(start))
        cache.moved(start, stop, after)
        return self.final(x_BND if at_BK is None else gather_positions(x_BND, at_BK))

    def new_cache(self, batch: int, length: int) -> RecurrentCache | None:
        """The same for any length; None where the weights are shared out, so that only whole blocks can be called."""
        if self.sharded:
            return None
        sizes, weight = self.mixer_sizes, self.embed.weight
        inputs = weight.new_zeros(len(self.blocks), batch, sizes.taps - 1, sizes.channels)
        wide = torch.promote_types(weight.dtype, torch.float32)
        scans = weight.new_zeros(len(self.blocks), batch, sizes.states, sizes.channels, dtype=wide)
        return RecurrentCache(States(inputs, scans))

    def can_step_rows(self) -> bool:
        return not self.sharded

    def step_rows(self, ids_M: Tensor, caches: Sequence[RecurrentCache], at: Sequence[int]) -> Tensor:
        """All rows together."""
        states = States.rows([cache.before(position) for cache, position in zip(caches, at, strict=True)], len(ids_M))
        x_MD, after = self._step(self.embed(ids_M), states)
        for b, (cache, position) in enumerate(zip(caches, at, strict=True)):
            cache.moved(position, position + 1, after.row(b))
        return self.final(x_MD)

    def can_decode(self) -> bool:
        training = torch.is_grad_enabled() or self.training or torch.is_autocast_enabled("cuda")
        return self.embed.weight.is_cuda and not training and not self.sharded

    def decode(self, ids_B: Tensor, position_1: Tensor, cache: RecurrentCache, stop: int) -> Tensor:
        now = cache.in_place()
        begun = position_1 > 0
        x_BD, after = self._step(self.embed(ids_B), States(*(t * begun.to(t.dtype) for t in now)))
        for kept, new in zip(now, after, strict=True):
            kept.copy_(new)
        return self.final(x_BD)

    def _step(self, x_BD: Tensor, states: States) -> tuple[Tensor, States]:
        """All blocks, one position on."""
        return self._through(x_BD, states, "step")

    def _read_on(self, x_BND: Tensor, states: States) -> tuple[Tensor, States]:
        """All blocks, several positions on."""
        return self._through(x_BND, states, "read_on")

    def _through(self, x: Tensor, states: States, way: str) -> tuple[Tensor, States]:
        after = []
        for i, block in enumerate(self.blocks):
            [branch] = cast(Block, block).branches

            def layer(h: Tensor, i: int = i, mixer: Any = branch.layer) -> Tensor:
                y, state = getattr(mixer, way)(h, states.of(i))
                after.append(state)
                return cast(Tensor, y)

            x = cast(Branch, branch).around(x, None, layer)
        return x, States.stack(after)
