"""Every system of the paper's tables with a small network, for tests that need no conftest."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask.config import load_config
from unmask.data.batch import Batch
from unmask.denoisers.network import Network
from unmask.objectives import Objective

FOLDER = Path(__file__).parents[2] / "benchmarks" / "systems"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "common")


def made(name: str, vocabulary: int, *, hidden: int, blocks: int) -> tuple[Objective, Network]:
    config = load_config(FOLDER / f"{name}.toml")
    small: dict[str, Any] = {"hidden": hidden, "blocks": blocks, "heads": 2, "dropout": 0.0, "zero_init": False}
    torch.manual_seed(0)
    network = replace(config.denoiser, **small).build(num_ids=vocabulary + 1, mask_id=vocabulary)  # type: ignore[type-var]
    config.objective.attach(network)
    config.objective.prepare(network, lambda: np.arange(1, vocabulary + 2))
    return config.objective, network


def loss_and_gradient(
    objective: Objective, network: Network, batch: Batch, *, precision: AbstractContextManager[object] | None = None
) -> tuple[float, Tensor]:
    """Nats per token, and all gradients end to end, on the CPU. precision: of the forward pass."""
    network.zero_grad(set_to_none=True)
    with precision or nullcontext():
        found = objective.loss(network, batch)
    (found.nats / found.tokens).backward()  # type: ignore[no-untyped-call]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]
    return float(found.nats.detach() / found.tokens), torch.cat([g.flatten().float().cpu() for g in gradients])
