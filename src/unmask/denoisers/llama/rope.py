"""The frequencies of the rotary positions, as Llama and its kin have them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unmask.errors import UsageError
from unmask.registry import check_fields


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Slower turns, for rows longer than those that a network was first trained on.

    linear: all frequencies by `factor`. llama3: those that turn fewer than `low` times in `length` positions by
    `factor`, those that turn more than `high` times not at all, and what lies between by a mixture.
    """

    kind: Literal["linear", "llama3"] = "llama3"
    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    length: int = 8192

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.factor > 0 or not 0 < self.low < self.high or self.length < 1:
            raise UsageError(
                "scaling needs factor > 0, 0 < low < high and length >= 1, "
                f"got {self.factor}, {self.low}, {self.high} and {self.length}"
            )


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """[head_dim/2] radians a position, in float32.

    >>> frequencies(4, 100.0, None, torch.device("cpu"))
    tensor([1.0000, 0.1000])
    >>> frequencies(4, 100.0, RopeScaling(kind="linear", factor=2.0), torch.device("cpu"))
    tensor([0.5000, 0.0500])
    """
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / theta**exponent
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    turns = scaling.length * inv_freq / (2 * math.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return inv_freq * ((1 - kept) / scaling.factor + kept)
