"""One vector per text (the mean, or the first or last token), then a linear map or a small network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unmask.errors import UsageError
from unmask.heads.base import Head
from unmask.registry import check_fields

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unmask.denoisers.network import Network

MAX_LAYERS = 8
Pool = Literal["mean", "first", "last"]


@dataclass(frozen=True, kw_only=True)
class Pooled(Head):
    """Vectors are normalised, pooled and, after `layers` hidden layers of their width, mapped to the outputs.

    pool: mean: of the text's vectors. first: of the row, a token before the text if rows have one, such as [CLS]. last:
    of the text, its end-of-text. auto: the mean if positions see both sides; in a causal network the last one, which
    has read the whole text.
    """

    pool: Literal["auto", "mean", "first", "last"] = "auto"
    layers: int = 1
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.layers <= MAX_LAYERS:
            raise UsageError(f"layers must lie in 0..{MAX_LAYERS}, got {self.layers}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout must lie in [0, 1), got {self.dropout}")

    def pool_of(self, causal: bool) -> Pool:
        """What `auto` selects for a network.

        >>> Pooled().pool_of(causal=False), Pooled().pool_of(causal=True)
        ('mean', 'last')
        """
        if self.pool != "auto":
            return self.pool
        return "last" if causal else "mean"

    def check(self, network: Network) -> None:
        if network.causal and self.pool == "first":
            raise UsageError(
                "the first position of a causal network has read nothing: set head.pool = last, mean or auto"
            )

    def wanted(self, valid_BL: Tensor, text_BL: Tensor, *, causal: bool) -> Tensor:
        from unmask.heads._pooling import chosen

        return chosen(valid_BL, text_BL, self.pool_of(causal))

    def build(self, *, width: int, outputs: int, causal: bool) -> nn.Module:
        from unmask.heads._pooling import Pooling

        return Pooling(width, outputs, self.layers, self.dropout)
