"""The DiT with one change each. Blocks leave each other notes, so that a change needs no loop of its own.

Every change passes on what it is handed to the next class in line (`super()`), so that several can be put together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.denoisers.dit.attention import QKV, Attention, First, Full
from unmask.denoisers.dit.block import Block, PlainStream, run_block
from unmask.denoisers.dit.lines import Keep, Lines
from unmask.denoisers.dit.norm import Norm
from unmask.denoisers.dit.rotary import Rope
from unmask.errors import UsageError


@dataclass
class Notes:
    """What a forward pass tells its later blocks."""

    x: Tensor | None = None  # the stream that entered the first block
    token_v_BLD: Tensor | None = None  # the tokens' own values
    skips: list[Tensor] = field(default_factory=list)  # what the first half's blocks gave


class WayBlock(Block):
    """A block that knows its place; subclasses change what enters, how it looks and how the stream is driven."""

    stream: type[PlainStream] = PlainStream
    index = 0
    num_blocks = 1
    notes = Notes()

    def forward(self, x: Tensor, c: Tensor | None, see: Attention) -> Tensor:
        stream = self.stream(self, self.enter(x), c, see.lines)
        run_block(self, stream, self.seeing(see))
        return stream.x

    def enter(self, x: Tensor) -> Tensor:
        return x

    def seeing(self, see: Attention) -> Attention:
        return see


class WayNetwork(DiTNetwork):
    """A DiT of other blocks. What they share with the plain ones starts as it does there, number by number."""

    block: type[WayBlock] = WayBlock

    def __init__(self, config: DiT, *, num_ids: int, mask_id: int) -> None:
        super().__init__(config, num_ids=num_ids, mask_id=mask_id)
        hidden, num_blocks, heads = config.dims
        self.notes = Notes()
        plain, self.blocks = self.blocks, nn.ModuleList()
        for i, old in enumerate(plain):
            new = self.block(hidden, heads, 0, config.dropout, config.qk_norm, cast(Block, old).values)
            new.index, new.num_blocks, new.notes = i, num_blocks, self.notes
            take_over(new, old)
            self.blocks.append(new)

    def can_fuse(self) -> bool:
        """Never: the fused pass computes the plain block."""
        return False


@torch.no_grad()
def take_over(new: nn.Module, old: nn.Module) -> None:
    """Parameters of the same name and shape."""
    own = dict(new.named_parameters())
    for name, p in old.named_parameters():
        if name in own and own[name].shape == p.shape:
            own[name].copy_(p)


def scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


# --- the MLP and the norms --------------------------------------------------------------------------------------------


class SquaredStream(PlainStream):
    def hidden(self, linear: nn.Linear, h: Tensor) -> Tensor:
        return F.relu(linear(h)).square()


class SquaredBlock(WayBlock):
    stream = SquaredStream


class SquaredRelu(WayNetwork):
    """relu(x)² in place of GELU."""

    block = SquaredBlock


class GatedStream(PlainStream):
    def hidden(self, linear: nn.Linear, h: Tensor) -> Tensor:
        gate, up = linear(h).chunk(2, dim=-1)
        gated: Tensor = F.silu(gate) * up
        return gated


class GatedBlock(WayBlock):
    stream = GatedStream

    def __init__(self, hidden: int, *args: Any) -> None:
        super().__init__(hidden, *args)
        inner = 8 * hidden // 3 // 8 * 8  # three maps of two thirds of the width: not more than two of the whole
        self.mlp_in = nn.Linear(hidden, 2 * inner, bias=False)
        self.mlp_out = nn.Linear(inner, hidden)
        nn.init.normal_(self.mlp_in.weight, std=0.02)
        nn.init.zeros_(self.mlp_out.weight)
        nn.init.zeros_(self.mlp_out.bias)


class SwiGLU(WayNetwork):
    """silu(W x) * (V x) at two thirds of the width: the parameters of the plain MLP."""

    block = GatedBlock

    def matrices(self) -> dict[str, int]:
        return {name: 2 if name.endswith("mlp_in.weight") else n for name, n in super().matrices().items()}


class RmsNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-5)


class RmsNormed(WayNetwork):
    """RMSNorm in place of LayerNorm."""

    def __init__(self, config: DiT, *, num_ids: int, mask_id: int) -> None:
        super().__init__(config, num_ids=num_ids, mask_id=mask_id)
        self.norm = RmsNorm(self.width)
        for block in self.layers:
            block.norm1, block.norm2 = RmsNorm(self.width), RmsNorm(self.width)


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass
class ChangedValues:
    """An attention whose values pass through a function first."""

    see: Attention
    change: Callable[[Tensor], Tensor]

    @property
    def lines(self) -> Lines:
        return self.see.lines

    @property
    def keep(self) -> Keep | None:
        return self.see.keep

    @property
    def first(self) -> First:
        return self.see.first

    def project(self, block: Block, h: Tensor) -> QKV:
        q, k, v = self.see.project(block, h)
        return q, k, self.change(v)

    def look(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.see.look(q, k, v)


class TokenValueBlock(WayBlock):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.value_gain = scalar(1.0)

    def seeing(self, see: Attention) -> Attention:
        see, outer = super().seeing(see), self.index < 2 or self.index >= self.num_blocks - 2
        return ChangedValues(see, self._with_tokens) if outer else see

    def _with_tokens(self, v: Tensor) -> Tensor:
        assert self.notes.token_v_BLD is not None
        return v + self.value_gain.to(v.dtype) * self.split_heads(self.notes.token_v_BLD.to(v.dtype))


class ValueEmbedding(WayNetwork):
    """A second embedding of the tokens, added to the values of the first two and the last two blocks."""

    block = TokenValueBlock

    def __init__(self, config: DiT, *, num_ids: int, mask_id: int) -> None:
        super().__init__(config, num_ids=num_ids, mask_id=mask_id)
        self.value_embed = nn.Embedding(num_ids, self.width)
        nn.init.normal_(self.value_embed.weight, std=0.02)
        self.embed.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: tuple[Tensor], embedded: Tensor) -> None:
        self.notes.token_v_BLD = self.value_embed(args[0])


class GainBlock(WayBlock):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attention_gain = scalar(1.0)

    def normed(self, q: Tensor, k: Tensor, v: Tensor) -> QKV:
        q, k, v = super().normed(q, k, v)
        gain = self.attention_gain.to(q.dtype)
        return q * gain, k * gain, v


class AttentionGain(WayNetwork):
    """qk_norm holds the attention's logits within the root of the head's width; a learned gain lets them grow."""

    block = GainBlock


class HalfRotaryBlock(WayBlock):
    def seeing(self, see: Attention) -> Attention:
        assert isinstance(see, Full)
        return super().seeing(replace(see, rope=half_rotary(see.rope)))


def half_rotary(rope: Rope) -> Rope:
    """Every second frequency, from the fastest to the slowest; the other half of the head is not rotated.

    >>> cos, sin = half_rotary((torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.5, 0.6, 0.7, 0.8])))
    >>> cos, sin
    (tensor([0.1000, 0.3000, 1.0000, 1.0000]), tensor([0.5000, 0.7000, 0.0000, 0.0000]))
    """
    cos, sin = (table[..., ::2] for table in rope)
    still = rope[0].shape[-1] - cos.shape[-1]
    return F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))


class HalfRotary(WayNetwork):
    """Half of each head carries no position."""

    block = HalfRotaryBlock


# --- the stream -------------------------------------------------------------------------------------------------------


class SkipBlock(WayBlock):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.skip_gain = scalar(1.0)

    def enter(self, x: Tensor) -> Tensor:
        x = super().enter(x)
        if self.index < self.num_blocks - self.num_blocks // 2:
            return x
        return x + self.skip_gain.to(x.dtype) * self.notes.skips[self.num_blocks - 1 - self.index]

    def forward(self, x: Tensor, c: Tensor | None, see: Attention) -> Tensor:
        y = super().forward(x, c, see)
        if self.index == 0:
            self.notes.skips.clear()
        if self.index < self.num_blocks // 2:
            self.notes.skips.append(y)
        return y


class Skips(WayNetwork):
    """What block i gives enters its mirror image in the second half, too, times a learned number that starts at 1."""

    block = SkipBlock


class EmbeddingMixBlock(WayBlock):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.of_stream, self.of_embedding = scalar(1.0), scalar(0.0)

    def enter(self, x: Tensor) -> Tensor:
        x = super().enter(x)
        if self.index == 0:
            self.notes.x = x
            return x
        assert self.notes.x is not None
        return self.of_stream.to(x.dtype) * x + self.of_embedding.to(x.dtype) * self.notes.x


class EmbeddingMix(WayNetwork):
    """Each block sees the embedding again, by learned numbers that start as nothing."""

    block = EmbeddingMixBlock


class NormedEmbeddingBlock(WayBlock):
    def enter(self, x: Tensor) -> Tensor:
        x = super().enter(x)
        return F.rms_norm(x, x.shape[-1:], eps=1e-6).to(x.dtype) if self.index == 0 else x


class NormedEmbedding(WayNetwork):
    """The embedding enters with root mean square 1, so that early blocks do not drown it."""

    block = NormedEmbeddingBlock


# --- head and order ---------------------------------------------------------------------------------------------------


class SoftCap(WayNetwork):
    """Logits within ±cap: cap x tanh(logits / cap). The loss then takes the general way, which is slower."""

    cap = 15.0

    def head(self, h_ND: Tensor) -> Tensor:
        return self.cap * torch.tanh(self.output(h_ND) / self.cap)

    def head_linear(self) -> None:  # type: ignore[override]
        return None


class SoftCap30(SoftCap):
    cap = 30.0


class Unshifted(WayNetwork):
    """Tokens enter at their own position also while the network is causal: see `ways.objectives.NextToken`."""

    unshifted = True

    def shift(self, z: Tensor) -> Tensor:
        return z


def together(classes: Sequence[type[DiTNetwork]]) -> type[DiTNetwork]:
    """One network with the changes of several.

    >>> together([SquaredRelu, Skips]).block.__mro__[1:3] == (SquaredBlock, SkipBlock)
    True
    """
    changed = [one for one in dict.fromkeys(classes) if issubclass(one, WayNetwork)]
    if len(changed) < 2:
        return changed[0] if changed else DiTNetwork
    blocks = tuple(dict.fromkeys(one.block for one in changed if one.block is not WayBlock))
    for kind in (SoftCap, SquaredRelu | SwiGLU):
        if sum(issubclass(one, kind) for one in changed) > 1:
            raise UsageError("two caps of the logits, or two kinds of MLP, do not go together: leave out one")
    name = "And".join(one.__name__ for one in changed)
    block = type(f"{name}Block", blocks, {}) if blocks else WayBlock
    return type(name, tuple(changed), {"block": block})
