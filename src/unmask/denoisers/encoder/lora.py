"""Low-rank adaptation (LoRA, arXiv 2106.09685): W stays, and B A of a small rank is learned beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from unmask.devices import widest

DOWN, UP = "lora_down", "lora_up"  # A and B of the paper


class LowRank(nn.Linear):
    """x W^T + b + scale (x A^T) B^T, where only A and B are learned; B begins at 0, so that nothing changes at first.

    W and b keep their names, so that weights without A and B fit.
    """

    def __init__(self, plain: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = plain.in_features, plain.out_features, scale
        self.weight, self.bias = plain.weight, plain.bias
        self.lora_down = nn.Parameter(plain.weight.new_empty(rank, plain.in_features))
        self.lora_up = nn.Parameter(plain.weight.new_zeros(plain.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.lora_down), self.lora_up)


def adapt(network: nn.Module, layers: Iterable[nn.Module], rank: int, scale: float) -> None:
    """Put `LowRank` in the place of every linear map in the layers; nothing else of the network is learned any more."""
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    for layer in layers:
        for module in list(layer.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, LowRank(child, rank, scale))


def merged(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of the same network without A and B: W + scale B A.

    >>> import torch
    >>> ones = torch.ones(2, 2)
    >>> merged({"a.weight": ones, "a.lora_down": ones[:1], "a.lora_up": ones[:, :1]}, 0.5)
    {'a.weight': tensor([[1.5000, 1.5000],
            [1.5000, 1.5000]])}
    """
    whole = {name: t for name, t in weights.items() if not is_low_rank(name)}
    for name, up in weights.items():
        stem, _, last = name.rpartition(".")
        if last == UP:
            weight = whole[f"{stem}.weight"]
            wide = widest(weight.device)
            change = scale * (up.to(wide) @ weights[f"{stem}.{DOWN}"].to(wide))
            whole[f"{stem}.weight"] = (weight.to(wide) + change).to(weight.dtype)
    return whole


def is_low_rank(name: str) -> bool:
    return name.rpartition(".")[2] in (DOWN, UP)
