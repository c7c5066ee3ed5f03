"""Every system of the paper's tables on a device without float64, as Apple's GPUs are: pretended, see `no_float64`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from no_float64 import MPS, Pretended, move, there
from unmask.data.batch import make_batch
from unmask.denoisers.encoder import lora
from unmask.denoisers.network import Network
from unmask.devices import widest
from unmask.evaluation.explain import mean_position_nats
from unmask.objectives import Objective
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample
from unmask.server.batching import answer

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import small_systems
from small_systems import RECIPES, loss_and_gradient

V, L = 40, 24


def made(name: str) -> tuple[Objective, Network]:
    objective, network = small_systems.made(name, V, hidden=32, blocks=1)
    with torch.no_grad():
        for p in network.parameters():  # what starts at zero would hide what is not read
            p.add_(torch.randn_like(p) * 0.05)
    return objective, network


def bound(objective: Objective, network: Network, x_BL: Tensor) -> float:
    with torch.no_grad():
        return objective.bound(network.eval(), x_BL, num_samples=4).nats


def told(objective: Objective, network: Network, x_BL: Tensor) -> float:
    """The sum of the bound's parts, token by token."""
    all_BL = torch.ones_like(x_BL, dtype=torch.bool)
    with torch.no_grad():
        how: dict[str, Any] = {"scored_BL": all_BL, "seed": 0, "first_row": 0, "num_samples": 4, "estimator": None}
        return float(mean_position_nats(objective, network.eval(), x_BL, None, **how).sum())


def score(objective: Objective, network: Network, x_1L: Tensor) -> float:
    """As a server scores a row: from queries that are made on the host."""
    batch = make_batch(x_1L, seed=0, step=0)
    parts = objective.score_queries(network.eval(), batch, num_samples=2)
    if parts is None:
        return 0.0
    predictor, device, nats = objective.predictor(network), network.device_for(x_1L), 0.0
    for part in parts:
        [log_p_NI] = answer(predictor, [part.query], device, padded=network.takes_padding)
        nats += part.share * float(part.nats(log_p_NI).sum())
    return nats


def text(objective: Objective, network: Network, canvas: Canvas) -> list[list[int]]:
    sampler: Any = objective.sampler()
    sampler = replace(sampler, steps=6) if getattr(sampler, "steps", None) else sampler
    found: list[list[int]] = sample(network.eval(), canvas, sampler, objective=objective).tokens.tolist()
    return found


def test_the_widest_type() -> None:
    assert widest(MPS) == torch.float32
    assert widest(torch.device("cpu")) == widest(torch.device("cuda")) == torch.float64


def test_what_is_pretended_is_as_strict_as_the_device() -> None:
    with Pretended():
        t = torch.ones(2, device=MPS)
        assert (t + 1).device == MPS
        assert t.cpu().double().dtype == torch.float64
        with pytest.raises(TypeError, match="float64"):
            t.double()
        with pytest.raises(TypeError, match="float64"):
            torch.ones(2, dtype=torch.float64, device=MPS)
        with pytest.raises(AssertionError, match="on cpu"):
            t + torch.ones(2)


@pytest.mark.parametrize("name", RECIPES)
def test_training_there_is_training_here(name: str) -> None:
    objective, network = made(name)
    batch = make_batch(torch.randint(V, (4, L)), seed=0, step=0)
    times = [torch.full((4,), time, dtype=torch.float64) for time in (1e-3, 0.03, 0.5, 0.97, 1.0)]
    batches = [batch, *(replace(batch, time_B=time_B) for time_B in times)]
    here = [loss_and_gradient(objective, network, at) for at in batches]
    with Pretended():
        move(network)
        for at, (nats, grad) in zip(batches, here, strict=True):
            nats_there, grad_there = loss_and_gradient(objective, network, at)
            assert nats_there == pytest.approx(nats, rel=1e-3), at.time_B[0]
            assert float((grad_there - grad).norm()) <= 1e-3 * float(grad.norm()), at.time_B[0]


@pytest.mark.parametrize("name", RECIPES)
def test_bounds_and_texts_there_are_those_here(name: str) -> None:
    objective, network = made(name)
    x_BL = torch.randint(V, (4, L))
    canvas = Canvas.blank(num=2, length=12, mask_id=V, seed=1)
    want, written = bound(objective, network, x_BL), text(objective, network, canvas)
    scored = score(objective, network, x_BL[:1])
    with Pretended():
        move(network)
        assert bound(objective, network, there(x_BL)) == pytest.approx(want, rel=1e-3)
        assert told(objective, network, there(x_BL)) == pytest.approx(want, rel=1e-3)
        assert score(objective, network, x_BL[:1]) == pytest.approx(scored, rel=1e-3)
        assert text(objective, network, canvas.to(MPS)) == written


def test_low_rank_changes_are_merged_there() -> None:
    weights = {"a.weight": torch.randn(6, 4), f"a.{lora.DOWN}": torch.randn(2, 4), f"a.{lora.UP}": torch.randn(6, 2)}
    want = lora.merged(weights, 0.5)["a.weight"]
    with Pretended():
        found = lora.merged({name: there(t) for name, t in weights.items()}, 0.5)["a.weight"].cpu()
    torch.testing.assert_close(found, want)
