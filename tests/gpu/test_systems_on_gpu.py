"""Every system of the paper's tables on a GPU: loss and gradient in bf16 as in float32, at all times; its sampler.
Skipped without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unmask.config import load_config
from unmask.data.batch import Batch, make_batch
from unmask.denoisers.network import Network
from unmask.denoisers.recorded import FIRST, Recorder
from unmask.devices import fast_attention
from unmask.objectives import Objective
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the systems are not tested on one")

DEVICE, V, L = "cuda", 300, 64
FOLDER = Path(__file__).parents[2] / "benchmarks" / "systems"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "common")


def made(name: str) -> tuple[Objective, Network]:
    config = load_config(FOLDER / f"{name}.toml")
    small: dict[str, Any] = {"hidden": 128, "blocks": 2, "heads": 2, "dropout": 0.0, "zero_init": False}
    torch.manual_seed(0)
    network = replace(config.denoiser, **small).build(num_ids=V + 1, mask_id=V)  # type: ignore[type-var]
    config.objective.attach(network)
    config.objective.prepare(network, lambda: np.arange(1, V + 2))
    return config.objective, network.to(DEVICE).train()


def loss(objective: Objective, network: Network, batch: Batch, *, bf16: bool) -> tuple[float, Tensor]:
    network.zero_grad(set_to_none=True)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16), fast_attention():
        found = objective.loss(network, batch)
    (found.nats / found.tokens).backward()  # type: ignore[no-untyped-call]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]
    return float(found.nats.detach() / found.tokens), torch.cat([g.flatten().float() for g in gradients])


@pytest.mark.parametrize("name", RECIPES)
def test_bf16_is_near_float32_at_all_times(name: str) -> None:
    objective, network = made(name)
    batch = make_batch(torch.randint(V, (8, L)), seed=0, step=0)
    for time in (1e-6, 0.03, 0.5, 0.97, 1.0):
        at_once = replace(batch, time_B=torch.full((8,), time, dtype=torch.float64))
        (nats, grad), (nats_bf16, grad_bf16) = (loss(objective, network, at_once, bf16=bf16) for bf16 in (False, True))
        assert nats_bf16 == pytest.approx(nats, rel=0.02, abs=1e-3), time
        assert float((grad_bf16 - grad).norm()) <= 0.1 * float(grad.norm()), time


@pytest.mark.parametrize("name", RECIPES)
def test_recorded_passes_are_those_that_are_written(name: str) -> None:
    """Also of the systems that read a batch twice."""
    objective, network = made(name)
    batch = make_batch(torch.randint(V, (8, L)), seed=0, step=0)
    nats, grad = loss(objective, network, batch, bf16=True)
    network.recorder = Recorder()
    for _ in range(FIRST + 3):
        nats_again, grad_again = loss(objective, network, batch, bf16=True)
        assert nats_again == pytest.approx(nats, rel=1e-5)
        # Of a batch that is read twice, autocast adds the two gradients of a weight in bf16 and recordings in float32.
        assert float((grad_again - grad).norm()) < 3e-3 * float(grad.norm())


@pytest.mark.parametrize("name", RECIPES)
@torch.no_grad()
def test_its_bound_and_its_sampler(name: str) -> None:
    objective, network = made(name)
    network.eval()
    bound = objective.bound(network, torch.randint(V, (4, L)).to(DEVICE), num_samples=2)
    assert 0 < bound.nats < float("inf")
    canvas = Canvas.blank(num=4, length=16, mask_id=V, seed=1).to(DEVICE)
    sampler = objective.sampler()
    sampler = replace(sampler, steps=4) if getattr(sampler, "steps", None) else sampler  # type: ignore[type-var]
    tokens = sample(network, canvas, sampler, objective=objective).tokens
    assert tokens.shape == (4, 16)
    assert bool((tokens < V).all())
