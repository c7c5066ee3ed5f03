"""Compiles the parts of a network that training calls, if they have no kernels of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unmask.denoisers.network import Network


def compile_trunk(network: Network, *, padding: bool = True) -> None:
    """Compile the parts of the network that training calls.

    The number of requested positions differs from step to step, and so does the total number of positions if rows are
    not padded. padding: whether batches usually contain rows of different lengths. If only one row of the corpus is
    shorter, its step runs uncompiled, since compiling for it would take longer than all such steps.
    """
    if network.can_fuse_training():
        return
    # Of Hyena's FFT. Once and for all: whoever changes filters and puts them back, at every step and while other
    # threads run, makes each other warning of the process be shown again, at every step.
    warnings.filterwarnings("ignore", "Torchinductor does not support code generation for complex")
    network.trunk_at = _compiled(network.trunk_at, padding)  # type: ignore[method-assign]
    if padding:
        network.trunk_ragged = _compiled(network.trunk_ragged, padding)  # type: ignore[method-assign]


def _compiled(plain: Callable[..., Tensor], padding: bool) -> Callable[..., Tensor]:
    compiled = torch.compile(plain)

    def call(z: Tensor, level_B: Tensor | None, *lists: Any, **options: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():  # validation has other shapes, and too few calls to compile for
            return plain(z, level_B, *lists, **options)
        if options.get("valid_BL") is not None and not padding:
            return plain(z, level_B, *lists, **options)
        *rows, flat_N = lists
        for t in (flat_N, *([z, *rows[0][:3]] if rows else [])):
            torch._dynamo.mark_dynamic(t, 0)
        return compiled(z, level_B, *lists, **options)

    return call
