"""The parts of a network that training calls, compiled where they have no kernels of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unmask.denoisers.network import Network


def compile_trunk(network: Network, *, padding: bool = True) -> None:
    """Compile the parts of the network that training calls. How many positions it asks for differs from step to step,
    and how many there are where rows stand without padding.

    padding: whether batches hold rows of different lengths as a rule. Where it is one row of the whole corpus, the step
    that meets it runs as it is written: to compile for it would take longer than all such steps.
    """
    if network.can_fuse_training():
        return
    network.trunk_at = _compiled(network.trunk_at, padding)  # type: ignore[method-assign]
    if padding:
        network.trunk_ragged = _compiled(network.trunk_ragged, padding)  # type: ignore[method-assign]


def _compiled(plain: Callable[..., Tensor], padding: bool) -> Callable[..., Tensor]:
    compiled = torch.compile(plain)

    def call(z: Tensor, level_B: Tensor | None, *lists: Any, **options: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():  # a validation's shapes are others, and too few calls to compile for
            return plain(z, level_B, *lists, **options)
        if options.get("valid_BL") is not None and not padding:
            return plain(z, level_B, *lists, **options)
        *rows, flat_N = lists
        for t in (flat_N, *([z, *rows[0][:3]] if rows else [])):
            torch._dynamo.mark_dynamic(t, 0)
        return compiled(z, level_B, *lists, **options)

    return call
