"""Embeddings that take what is embedded already."""

from __future__ import annotations

from torch import Tensor, nn

from unmask.errors import UsageError


class Embedding(nn.Embedding):
    """Ids [...] become vectors [..., E]; vectors of that width stay what they are, in the weights' precision."""

    def forward(self, z: Tensor) -> Tensor:
        if not z.is_floating_point():
            return super().forward(z)
        if z.shape[-1] != self.embedding_dim:
            raise UsageError(f"vectors must be as wide as the embedding, {self.embedding_dim}, got {z.shape[-1]}")
        return z.to(self.weight.dtype)
