"""The module of `pooled`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unmask.heads.pooled import Pool


def chosen(valid_BL: Tensor, text_BL: Tensor, pool: Pool) -> Tensor:
    """The positions to average: all of each row's text, the row's first, or the text's last.

    >>> text = torch.tensor([[False, True, True, False]])
    >>> chosen(torch.ones_like(text), text, "last").int().tolist()
    [[0, 0, 1, 0]]
    """
    if pool == "mean":
        return text_BL
    if pool == "first":
        return valid_BL & (torch.arange(valid_BL.shape[1], device=valid_BL.device) == 0)
    counted_BL = text_BL.cumsum(dim=1)
    return text_BL & (counted_BL == counted_BL[:, -1:])


class Pooling(nn.Module):
    """Maps the mean of the wanted vectors to out_BK."""

    def __init__(self, width: int, outputs: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)  # a trunk's vectors may have any scale: its norm is in its own head
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.output = nn.Linear(width, outputs)
        for linear in (*self.hidden, self.output):
            assert isinstance(linear, nn.Linear)
            nn.init.normal_(linear.weight, std=0.02 if linear is self.output else width**-0.5)
            nn.init.zeros_(linear.bias)

    def forward(self, h_BLD: Tensor, wanted_BL: Tensor) -> Tensor:
        h_BLD = self.norm(h_BLD) * wanted_BL.unsqueeze(-1)
        h_BD = h_BLD.sum(dim=1) / wanted_BL.sum(dim=1, keepdim=True).clamp(min=1)
        h_BD = self.dropout(h_BD)
        for linear in self.hidden:
            h_BD = self.dropout(torch.nn.functional.gelu(linear(h_BD)))
        out_BK: Tensor = self.output(h_BD)
        return out_BK
