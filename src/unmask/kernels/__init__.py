"""Triton kernels, one file each, for computations that are slow on a GPU as separate operations.

Each is a drop-in for a few lines of plain torch, which all other devices run; tests check that both agree.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from unmask.devices import is_current

HAS_TRITON = importlib.util.find_spec("triton") is not None


def fit(x: Tensor) -> bool:
    """Whether the kernels can run on this tensor. They run on the current GPU and cannot read another."""
    if not (HAS_TRITON and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)):
        return False
    return torch.compiler.is_compiling() or is_current(x.device)  # no compiled graph asks which one is current
