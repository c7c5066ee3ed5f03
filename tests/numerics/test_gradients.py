"""The gradients of objectives other than MDLM: finite differences, and finite at both ends of time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unmask import objectives
from unmask.data.batch import Batch, make_batch
from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network
from unmask.objectives import Objective
from unmask.rng import row_keys

OBJECTIVES: list[Objective] = [
    objectives.SEDD(),
    objectives.SEDD(state="uniform"),
    objectives.UDLM(),
    objectives.UDLM(steps=4),
    objectives.UDLM(steps=1),
    objectives.TokenRates(rates="power", k=2.0),
    objectives.TokenRates(rates="power", k=0.5, steps=4),
    objectives.TokenRates(centre="sentence"),
    objectives.TokenRates(centre="sentence", steps=4),
    objectives.Plaid(dim=4),
    objectives.Plaid(dim=4, steps=4),
    objectives.DiffusionLM(dim=4),
    objectives.SSDLM(block=4),
]


def network(objective: Objective, num_ids: int = 7, dtype: torch.dtype = torch.float64) -> Network:
    torch.manual_seed(0)
    net = DiT(hidden=16, blocks=1, heads=2, conditioning="level").build(num_ids=num_ids, mask_id=num_ids - 1).to(dtype)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    objective.attach(net)
    if isinstance(objective, objectives.TokenRates) and objective.rates == "spindle":
        objective.prepare(net, lambda: np.arange(num_ids) ** 2)
    return net.to(dtype)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_they_are_those_of_the_loss(objective: Objective) -> None:
    net = network(objective)
    batch = make_batch(torch.randint(6, (8, 8), generator=torch.Generator().manual_seed(2)), seed=0, step=0)
    objective.loss(net, batch).nats.backward()
    for name in ("output.bias", "norm.weight"):
        p = net.get_parameter(name)
        assert p.grad is not None
        for i in (1, 4):
            nats = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    p[i] += step
                    nats.append(float(objective.loss(net, batch).nats))
                    p[i] -= step
            assert (nats[0] - nats[1]) / 2e-5 == pytest.approx(float(p.grad[i]), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("time", [1.0, 1 - 1e-9, 1 - 1e-6, 0.5, 1e-6, 1e-12])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_they_are_finite_at_both_ends_of_time(objective: Objective, time: float) -> None:
    """In float32 and with a large vocabulary."""
    net = network(objective, 5_000, torch.float32)
    x_BL = torch.randint(4_999, (2, 8), generator=torch.Generator().manual_seed(1))
    every, time_B = torch.ones_like(x_BL, dtype=torch.bool), torch.full((2,), time, dtype=torch.float64)
    batch = Batch(x_BL, None, every, row_keys(0, torch.arange(2)), time_B)
    loss = objective.loss(net, batch).nats
    assert torch.isfinite(loss)
    if loss.requires_grad:
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)
