"""Hyena: causal long convolutions with filters from a small network, and products between them (HyenaDNA)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.denoisers import Denoiser
from unmask.denoisers.recurrent.layers import MLP, Block, Branch, Layered, Sizes, check_begin, check_sizes
from unmask.denoisers.recurrent.mixer import short_conv
from unmask.devices import widest
from unmask.errors import UsageError
from unmask.registry import check_fields

# How far a filter reaches at most and at least, in lengths: what is left of it after so much of the length is TARGET.
FAST, SLOW, TARGET = 0.3, 1.5, 1e-2


@dataclass(frozen=True, kw_only=True)
class Hyena(Denoiser):
    """Blocks of a Hyena operator of order 2 and an MLP, causal; 128 x 2 is HyenaDNA's smallest.

    length: the rows' length, to which the filters' reach and waves are scaled; longer rows go on along the same curves.
    filter_width: of the network that writes the filters. waves: how many pairs of sine and cosine it sees of a place.
    frequency: of its sine activations, at first. floor: what is left of a filter however far away, of what it is near.
    begin: the id that stands before a text; none: the mask.
    """

    hidden: int = 128
    blocks: int = 2
    length: int = 1024
    taps: int = 3
    filter_width: int = 64
    waves: int = 2
    frequency: float = 10.0
    floor: float = 0.05
    tied: bool = True
    begin: int | None = None

    causal = True
    uses_level = False

    def __post_init__(self) -> None:
        check_fields(self)
        own = {"hidden": self.hidden, "blocks": self.blocks, "taps": self.taps, "filter_width": self.filter_width}
        own |= {"waves": self.waves}
        check_sizes(conditioning="none", cond_dim=1, classes=0, label_dropout=0.0, **own)
        if self.length < 2 or not self.frequency > 0:
            raise UsageError(f"length must be at least 2 and frequency above 0, got {self.length} and {self.frequency}")
        if self.floor < 0:
            raise UsageError(f"floor must be 0 or more, got {self.floor}")

    def build(self, *, num_ids: int, mask_id: int) -> HyenaNetwork:
        return HyenaNetwork(self, num_ids=num_ids, mask_id=mask_id)


class HyenaNetwork(Layered):
    causal = True

    def __init__(self, config: Hyena, *, num_ids: int, mask_id: int) -> None:
        D = config.hidden
        blocks = [
            Block(Branch(nn.LayerNorm(D), Operator(config), D, 0), Branch(nn.LayerNorm(D), MLP(D), D, 0))
            for _ in range(config.blocks)
        ]
        begin = check_begin(config.begin, num_ids)
        super().__init__("hyena", Sizes(num_ids, mask_id, D, config.tied, begin=begin), blocks, nn.LayerNorm(D))
        self.config = config


class Operator(nn.Module):
    """out(a x conv(b x v)), with a, b and v from one projection and a short convolution (arXiv 2302.10866)."""

    def __init__(self, config: Hyena) -> None:
        super().__init__()
        D, K = config.hidden, config.taps
        self.into = nn.Linear(D, 3 * D)
        self.into.stacks = 3  # type: ignore[assignment]
        self.conv_weight = nn.Parameter(torch.empty(3 * D, K))
        self.conv_bias = nn.Parameter(torch.empty(3 * D))
        for p in (self.conv_weight, self.conv_bias):
            nn.init.uniform_(p, -(K**-0.5), K**-0.5)
        self.filter = Filter(config)
        self.out = nn.Linear(D, D)
        bound = D**-0.5 / math.sqrt(2 * config.blocks)  # added to the residual stream, as is the MLP
        nn.init.uniform_(self.out.weight, -bound, bound)

    def forward(self, h_BLD: Tensor, valid_BL: Tensor | None) -> Tensor:
        # Padding stands at the end, where no earlier position sees it.
        a_BLD, b_BLD, v_BLD = short_conv(self.into(h_BLD), self.conv_weight, self.conv_bias).chunk(3, dim=-1)
        u_BLD = v_BLD * b_BLD
        y_BLD = causal_conv(u_BLD, self.filter(h_BLD.shape[1])) + u_BLD * self.filter.skip.to(u_BLD.dtype)
        y: Tensor = self.out(y_BLD * a_BLD)
        return y


def causal_conv(u_BLD: Tensor, filter_LD: Tensor) -> Tensor:
    """Each channel's own filter over all that stands before a position and at it, by FFT; twice the length, so that
    nothing comes around.

    >>> causal_conv(torch.tensor([[[1.0], [2.0], [0.0]]]), torch.tensor([[1.0], [0.5], [0.0]])).flatten()
    tensor([1.0000, 2.5000, 1.0000])
    """
    L, wide = u_BLD.shape[1], torch.promote_types(u_BLD.dtype, torch.float32)
    with torch.autocast(u_BLD.device.type, enabled=False):
        u, kernel = (torch.fft.rfft(t.to(wide), n=2 * L, dim=-2) for t in (u_BLD, filter_LD))
        y_BLD: Tensor = torch.fft.irfft(u * kernel, n=2 * L, dim=-2)
        return y_BLD[:, :L].to(u_BLD.dtype)


class Filter(nn.Module):
    """Filters of any length: a network with sine activations on each place's waves, dying away at a channel's rate."""

    def __init__(self, config: Hyena) -> None:
        super().__init__()
        D, W = config.hidden, config.filter_width
        self.length, self.waves, self.floor = config.length, config.waves, config.floor
        self.into = nn.Linear(1 + 2 * config.waves, W)
        self.inner = nn.ModuleList([nn.Linear(W, W) for _ in range(2)])
        self.out = nn.Linear(W, D, bias=False)
        self.frequency = nn.Parameter(torch.full((W,), config.frequency))
        self.skip = nn.Parameter(torch.empty(D))
        nn.init.normal_(self.skip)

    def forward(self, length: int) -> Tensor:
        """[L, D] in float32 or what is wider, whatever the weights are: 16 bits do not count to 1,000."""
        t_L1, h = self.places(length)
        with torch.autocast(h.device.type, enabled=False):
            for linear in (self.into, *self.inner):
                assert isinstance(linear, nn.Linear)
                h = torch.sin(self.frequency.to(h) * F.linear(h, linear.weight.to(h), linear.bias.to(h)))
            return F.linear(h, self.out.weight.to(h)) * (torch.exp(-t_L1 * self.rates().to(h)) + self.floor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Its weights stay as they are where others become 16 bits: each sine multiplies their error by `frequency`."""

        def wide(t: Tensor) -> Tensor:
            made = fn(t)
            return t.to(made.device) if made.is_floating_point() and made.itemsize < t.itemsize == 4 else made

        super()._apply(wide, recurse)  # type: ignore[no-untyped-call]
        return self

    def places(self, length: int) -> tuple[Tensor, Tensor]:
        """Each place as a part of the configured length, and beside it its waves."""
        weight = self.into.weight
        how: dict[str, Any] = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
        at_L1 = torch.arange(length, **how).unsqueeze(1)
        angle_LF = 2 * math.pi / self.length * at_L1 * torch.linspace(1e-4, self.waves - 1, self.waves, **how)
        t_L1 = at_L1 / (self.length - 1)
        return t_L1, torch.cat([t_L1, angle_LF.cos(), -angle_LF.sin()], dim=-1)

    def rates(self) -> Tensor:
        """How soon each channel's filter dies away, [D]."""
        ends = (-math.log(TARGET) / SLOW, -math.log(TARGET) / FAST)
        device = self.skip.device
        return torch.linspace(*ends, len(self.skip), device=device, dtype=widest(device))
