"""An exponential moving average of the weights, with the ramp of the paper's code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from unmask.denoisers.network import Network
from unmask.distributed.parallel import like
from unmask.errors import ModelFolderError


class Ema:
    """The average of the weights, with decay_n = min(decay, (1 + n) / (10 + n)), which soon forgets initial weights.

    >>> round(Ema.decay_at(0.9999, 1), 4)  # the first update
    0.1818
    """

    def __init__(self, network: Network, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(network.named_parameters())
        self.shadow = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.num_updates = 0

    @staticmethod
    def decay_at(decay: float, num_updates: int) -> float:
        return min(decay, (1 + num_updates) / (10 + num_updates))

    def advance(self) -> float:
        """Count one more update; return the fraction by which the average moves towards the weights."""
        self.num_updates += 1
        return 1 - self.decay_at(self.decay, self.num_updates)

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self.shadow.values()), list(self.parameters.values()), self.advance())

    def load(self, shadow: dict[str, Tensor], num_updates: int) -> None:
        if {k: v.shape for k, v in shadow.items()} != {k: v.shape for k, v in self.shadow.items()}:
            raise ModelFolderError("the saved average is of other weights: its names or shapes are not the network's")
        for name, tensor in shadow.items():
            self.shadow[name].copy_(like(tensor, self.shadow[name]))
        self.num_updates = num_updates

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged weights in the network inside the block; restore its own weights afterwards."""
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(self.shadow[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self.parameters.items():
                    p.copy_(own[name])
