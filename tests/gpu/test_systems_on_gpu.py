"""Every system of the paper's tables on a GPU: loss and gradient in bf16 as in float32, at all times; its sampler.
Skipped without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_systems
import torch
from small_systems import RECIPES, loss_and_gradient
from torch import Tensor

from unmask.data.batch import Batch, make_batch
from unmask.denoisers.network import Network
from unmask.denoisers.recorded import FIRST, Recorder
from unmask.devices import fast_attention
from unmask.objectives import Objective
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the systems are not tested on one")

DEVICE, V, L = "cuda", 300, 64
# Some gradients differ by a step of bf16: presumably autocast adds those of a weight's two readings in bf16, and
# recordings add them in float32.
READ_TWICE = {"d3pm", "table8_no_carry_over", "table8_no_zero_masking"}


def made(name: str) -> tuple[Objective, Network]:
    objective, network = small_systems.made(name, V, hidden=128, blocks=2)
    return objective, network.to(DEVICE).train()


def loss(objective: Objective, network: Network, batch: Batch, *, bf16: bool) -> tuple[float, Tensor]:
    with fast_attention():
        precision = torch.autocast(DEVICE, torch.bfloat16, enabled=bf16)
        return loss_and_gradient(objective, network, batch, precision=precision)


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
        if name in READ_TWICE:
            assert float((grad_again - grad).norm()) < 3e-3 * float(grad.norm())
        else:
            torch.testing.assert_close(grad_again, grad, rtol=1e-3, atol=1e-5)


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
