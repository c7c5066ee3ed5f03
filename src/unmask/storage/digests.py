"""Hashes of weights: the same for the same content, wherever it lies and on whatever device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_digest(tensors: Mapping[str, Tensor], begin: bytes = b"") -> str:
    """A hash that changes exactly when a tensor, its name, dtype or shape does. begin: hashed before them.

    >>> weights_digest({"a": torch.zeros(2)}) == weights_digest({"a": torch.zeros(1, 2)})
    False
    """
    digest = hashlib.sha256(begin)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
