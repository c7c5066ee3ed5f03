"""Triton kernels, one file each, for what a GPU does badly one operation at a time.

Each is a drop-in for a few lines of plain torch, which every other device runs; the tests hold the two together.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def fit(x: Tensor) -> bool:
    """Can the kernels run on this tensor?"""
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
