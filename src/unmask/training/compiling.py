"""The parts of a network that training calls, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unmask.denoisers.network import Network


def compile_trunk(network: Network) -> None:
    """Compile the parts of the network that training calls. How many positions it asks for differs from step to step,
    and how many there are where rows stand without padding."""
    network.trunk_at = _compiled(network.trunk_at)  # type: ignore[method-assign]
    network.trunk_ragged = _compiled(network.trunk_ragged)  # type: ignore[method-assign]


def _compiled(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    compiled = torch.compile(plain)

    def call(z: Tensor, level_B: Tensor | None, *lists: Any, **options: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():  # a validation's shapes are others, and too few calls to compile for
            return plain(z, level_B, *lists, **options)
        *rows, flat_N = lists
        for t in (flat_N, *([z, *rows[0][:3]] if rows else [])):
            torch._dynamo.mark_dynamic(t, 0)
        return compiled(z, level_B, *lists, **options)

    return call
