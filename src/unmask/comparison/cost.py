"""The cost of a training run, whatever the implementation: parameters, network passes, and FLOP by
`unmask.bench.flops`.

Passes are counted where they happen, in the loss itself: an objective that calls the network twice (D3PM without
carry-over, which also reads the clean row) pays for both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.bench import flops
from unmask.config import RunConfig
from unmask.data.batch import batch_of
from unmask.data.loader import Loader
from unmask.denoisers.network import Network
from unmask.denoisers.ragged import FEW_SIZES, Ragged
from unmask.devices import pick_precision

PROBES, PROBE_ROWS = 4, 32  # steps of a run to probe, because a loss may change during training, and rows of each
PASSES = ("trunk", "trunk_at", "trunk_ragged")


@dataclass
class Counted:
    """The work of a network: passes over rows, tokens read, positions that went to the head.

    A pass includes its backward pass, which costs twice as much; one without a gradient counts as a third.
    """

    rows: float = 0.0
    tokens: float = 0.0
    positions: float = 0.0


class Counting:
    """Counts the passes of a network within the block; nested calls count once.

    >>> import unmask
    >>> net = unmask.denoisers.DiT(hidden=8, blocks=1, heads=2).build(num_ids=5, mask_id=4)
    >>> with Counting(net) as counted:
    ...     _ = net.trunk_at(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2), torch.tensor([0, 4]))
    >>> counted
    Counted(rows=2.0, tokens=6.0, positions=2.0)
    """

    def __init__(self, network: Network) -> None:
        self.network, self.counted, self.inside = network, Counted(), False

    def __enter__(self) -> Counted:
        for name in PASSES:
            setattr(self.network, name, self._counting(getattr(self.network, name), ragged=name == "trunk_ragged"))
        return self.counted

    def __exit__(self, *_: object) -> None:
        for name in PASSES:
            delattr(self.network, name)  # restores the class's method

    def _counting(self, call: Callable[..., Tensor], *, ragged: bool) -> Callable[..., Tensor]:
        names = list(inspect.signature(call).parameters)

        def counting(*args: Any, **kwargs: Any) -> Tensor:
            outermost, self.inside = not self.inside, True
            try:
                h = call(*args, **kwargs)
            finally:
                self.inside = not outermost
            if outermost:
                given = dict(zip(names, args, strict=False)) | kwargs
                shape = given[names[0]].shape  # z
                rows, tokens = _without_filling(given["rows"]) if ragged else (shape[0], shape[0] * shape[1])
                weight = 1.0 if torch.is_grad_enabled() else 1 / 3
                self.counted.rows += weight * rows
                self.counted.tokens += weight * tokens
                self.counted.positions += weight * h[..., 0].numel()
            return h

        return counting


def _without_filling(rows: Ragged) -> tuple[int, int]:
    """Rows and tokens of a batch without padding, and without the filler that reduces the number of shapes on a GPU."""
    B, L = rows.shape
    B -= -(-(FEW_SIZES - 1) // L) if rows.starts.is_cuda else 0
    return B, int(rows.starts[B])


def training_cost(network: Network, config: RunConfig, loader: Loader) -> tuple[float, float]:
    """Network passes per training row, and FLOP of the whole training.

    The network's state is left unchanged.
    """
    rows, was_training = 0, network.training
    network.train()
    device = network.device_for(torch.empty(0))
    bf16 = pick_precision(config.precision, device) == "bf16"
    precision = torch.autocast(device.type, torch.bfloat16, bf16)
    with Counting(network) as counted, precision, torch.random.fork_rng(devices=[]):
        for probe in range(PROBES):
            done = (probe + 0.5) / PROBES
            step = int(done * config.steps)
            part = loader.fetch(step, 0, min(config.micro_batch or config.batch, PROBE_ROWS))
            epoch = loader.epoch(step)
            batch = batch_of(part, seed=config.seed, step=step, num_rows=len(part), done=done, epoch=epoch)
            config.objective.loss(network, batch)
            rows += len(part)
    network.train(was_training)
    share = config.steps * config.batch / rows
    return counted.rows / rows, share * _flops(network, counted, config.data.length)


def _flops(network: Network, counted: Counted, length: int) -> float:
    if network.parts() and network.attends:  # blocks of a transformer
        sizes = {"length": length, "hidden": network.width, "blocks": len(network.parts()), "vocab": network.num_ids}
        return flops.train(tokens=counted.tokens, masked=counted.positions, **sizes)
    weights = parameters(network)[1]  # each is used once per token, and per strand where vectors are of both
    strands = network.width // (network.strand_width or network.width)
    return 6.0 * weights * strands * counted.tokens + 6.0 * network.width * network.num_ids * counted.positions


def parameters(network: Network) -> tuple[int, int]:
    """The number of all parameters, and of those outside per-token tables: embeddings, a head, rates of tokens.

    >>> import unmask
    >>> whole, inner = parameters(unmask.denoisers.DiT(hidden=8, blocks=1, heads=2).build(num_ids=50, mask_id=49))
    >>> whole - inner  # an embedding, a head and its biases
    850
    """
    every = list(network.parameters())
    inner = [p for p in every if not (p.ndim and p.shape[0] == network.num_ids)]
    return sum(p.numel() for p in every), sum(p.numel() for p in inner)
