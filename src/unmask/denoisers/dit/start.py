"""What a DiT's weights start as."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from unmask.denoisers.dit import DiTNetwork


def start_weights(net: DiTNetwork) -> None:
    for name, p in net.named_parameters():
        if name.endswith("bias") or "modulation" in name or name == "output.weight":
            nn.init.zeros_(p)  # adaLN starts as the identity, the head as the uniform law
        elif p.ndim > 1:
            nn.init.normal_(p, std=1.0 if name == "label.weight" else 0.02)  # a class is no small hint
        if name.startswith("blocks.") and name.endswith("out.weight"):  # added to the residual stream, 2 a block
            # adaLN's gate is zero already: a second zero after it, and neither would ever have a gradient.
            identity = net.config.zero_init and net.modulation is None
            nn.init.normal_(p, std=0.0 if identity else 0.02 / math.sqrt(2 * len(net.blocks)))
