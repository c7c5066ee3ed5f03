"""Mamba's mixer (arXiv 2312.00752, section 3.4), read in one direction or in both (arXiv 2403.03234, section 3.1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.denoisers.recurrent.scan import scan_step, selective_scan

STEPS = (1e-3, 1e-1)  # at first, a step is as long as something between these


class MixerSizes(NamedTuple):
    """hidden D, expand x hidden channels E, states N of each, taps of the short convolution, rank of the steps."""

    hidden: int
    expand: int
    states: int
    taps: int
    rank: int

    @property
    def channels(self) -> int:
        return self.expand * self.hidden


class State(NamedTuple):
    """What a direction has read: the last inputs of its convolution, [B, taps - 1, E], and the scan's state."""

    inputs_BKE: Tensor
    scan_BNE: Tensor


def short_conv(x_BLE: Tensor, weight_EK: Tensor, bias_E: Tensor | None, *, reverse: bool = False) -> Tensor:
    """Each channel's own taps over what stands before a position and at it; with reverse, over what follows.

    >>> short_conv(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[10.0, 1.0]]), None).flatten().tolist()
    [1.0, 12.0, 23.0]
    """
    L, K = x_BLE.shape[1], weight_EK.shape[1]
    x_BME = F.pad(x_BLE, (0, 0, 0, K - 1) if reverse else (0, 0, K - 1, 0))
    weight_EK = (weight_EK.flip(1) if reverse else weight_EK).to(torch.promote_types(x_BLE.dtype, torch.float32))
    # Tap by tap: as fast as a convolution on a CPU, and a compiler fuses it with what stands around it.
    y_BLE = weight_EK[:, 0] * x_BME[:, :L] if bias_E is None else torch.addcmul(bias_E, weight_EK[:, 0], x_BME[:, :L])
    for k in range(1, K):
        y_BLE = torch.addcmul(y_BLE, weight_EK[:, k], x_BME[:, k : k + L])
    return y_BLE.to(x_BLE.dtype)


class Direction(nn.Module):
    """What one direction does between the mixer's projections: a short convolution, SiLU, the selective scan."""

    def __init__(self, sizes: MixerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        E, N, R = sizes.channels, sizes.states, sizes.rank
        self.conv_weight = nn.Parameter(torch.empty(E, sizes.taps))
        self.conv_bias = nn.Parameter(torch.empty(E))
        self.select = nn.Linear(E, R + 2 * N, bias=False)  # the step's low rank, B, C
        self.step_weight = nn.Parameter(torch.empty(E, R))
        self.step_bias = nn.Parameter(torch.empty(E))
        # One axis, though it is [E, N]: rates are no matrix, and no weight decay pulls them to 1.
        self.log_rates = nn.Parameter(torch.arange(1, N + 1, dtype=torch.float32).log().repeat(E))
        self.skip = nn.Parameter(torch.ones(E))
        for p in (self.conv_weight, self.conv_bias):
            nn.init.uniform_(p, -(sizes.taps**-0.5), sizes.taps**-0.5)
        nn.init.uniform_(self.step_weight, -(R**-0.5), R**-0.5)
        nn.init.uniform_(self.step_bias, math.log(STEPS[0]), math.log(STEPS[1]))
        with torch.no_grad():  # the softplus of the bias is the step
            step = self.step_bias.exp()
            self.step_bias.copy_(step + torch.log(-torch.expm1(-step)))

    def forward(
        self, x_BLE: Tensor, *, valid_BL: Tensor | None = None, reverse: bool = False, state: State | None = None
    ) -> tuple[Tensor, State]:
        """What it reads at each position, and what it keeps for those that follow."""
        taps = self.sizes.taps
        if valid_BL is not None and reverse:
            x_BLE = x_BLE * valid_BL.unsqueeze(-1)  # a row begins at its last token, and nothing stands before
        before_BKE = x_BLE.new_zeros(len(x_BLE), taps - 1, x_BLE.shape[2]) if state is None else state.inputs_BKE
        if state is None:
            v_BLE = short_conv(x_BLE, self.conv_weight, self.conv_bias, reverse=reverse)
        else:
            both_BME = torch.cat([before_BKE.to(x_BLE.dtype), x_BLE], dim=1)
            v_BLE = short_conv(both_BME, self.conv_weight, self.conv_bias)[:, taps - 1 :]
        v_BLE = F.silu(v_BLE)
        step_BLE, B_BLN, C_BLN = self.selected(v_BLE)
        y_BLE, after_BNE = selective_scan(
            v_BLE,
            step_BLE,
            self.rates(),
            B_BLN,
            C_BLN,
            self.skip,
            state_BNE=None if state is None else state.scan_BNE,
            valid_BL=valid_BL,
            reverse=reverse,
        )
        kept_BKE = torch.cat([before_BKE.to(x_BLE.dtype), x_BLE], dim=1)[:, x_BLE.shape[1] :]
        return y_BLE, State(kept_BKE, after_BNE)

    def step(self, x_BE: Tensor, state: State) -> tuple[Tensor, State]:
        """One position on."""
        window_BKE = torch.cat([state.inputs_BKE.to(x_BE.dtype), x_BE.unsqueeze(1)], dim=1)
        v_BE = F.silu((window_BKE * self.conv_weight.T).sum(dim=1) + self.conv_bias)
        step_BE, B_BN, C_BN = self.selected(v_BE)
        y_BE, after_BNE = scan_step(v_BE, step_BE, self.rates(), B_BN, C_BN, self.skip, state.scan_BNE)
        return y_BE.to(v_BE.dtype), State(window_BKE[:, 1:], after_BNE)

    def selected(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The step in float32, B and C, of each position."""
        N, R = self.sizes.states, self.sizes.rank
        low, B, C = self.select(v).split([R, N, N], dim=-1)
        wide = torch.promote_types(low.dtype, torch.float32)
        return F.softplus(F.linear(low, self.step_weight).to(wide) + self.step_bias.to(wide)), B, C

    def rates(self) -> Tensor:
        """A_EN, negative."""
        wide = torch.promote_types(self.log_rates.dtype, torch.float32)
        return -self.log_rates.to(wide).exp().view(-1, self.sizes.states)


class Mixer(nn.Module):
    """out((read(x)) x silu(gate)); with `both`, a second direction reads backwards between the same projections."""

    def __init__(self, sizes: MixerSizes, *, both: bool, depth: int) -> None:
        super().__init__()
        self.into = nn.Linear(sizes.hidden, 2 * sizes.channels, bias=False)
        self.into.stacks = 2  # type: ignore[assignment]
        self.ahead = Direction(sizes)
        self.back = Direction(sizes) if both else None
        self.out = nn.Linear(sizes.channels, sizes.hidden, bias=False)
        bound = sizes.channels**-0.5 / math.sqrt(depth)  # added to the residual stream, once a block
        nn.init.uniform_(self.out.weight, -bound, bound)

    def forward(self, h_BLD: Tensor, valid_BL: Tensor | None) -> Tensor:
        x_BLE, gate_BLE = self.into(h_BLD).chunk(2, dim=-1)
        # Padding stands at the end: what reads ahead has left the row before it comes there.
        y_BLE, _ = self.ahead(x_BLE)
        if self.back is not None:
            y_BLE = y_BLE + self.back(x_BLE, valid_BL=valid_BL, reverse=True)[0]
        y: Tensor = self.out(y_BLE * F.silu(gate_BLE))
        return y

    def read_on(self, h_BLD: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Positions that follow those of the state."""
        x_BLE, gate_BLE = self.into(h_BLD).chunk(2, dim=-1)
        y_BLE, after = self.ahead(x_BLE, state=state)
        return self.out(y_BLE * F.silu(gate_BLE)), after

    def step(self, h_BD: Tensor, state: State) -> tuple[Tensor, State]:
        x_BE, gate_BE = self.into(h_BD).chunk(2, dim=-1)
        y_BE, after = self.ahead.step(x_BE, state)
        return self.out(y_BE * F.silu(gate_BE)), after
