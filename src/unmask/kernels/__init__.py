"""Triton kernels, one file each, for what a GPU does badly one operation at a time.

Each is a drop-in for a few lines of plain torch, which every other device runs; the tests hold the two together.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def fit(x: Tensor) -> bool:
    """Can the kernels run on this tensor?"""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and has_triton()
