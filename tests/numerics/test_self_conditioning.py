"""A network that reads its own estimate: bounds by quadrature, the law of its chain, and what is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gaussian_worlds import chain_law, continuous_bound, crooked, log_p_of, step_bound
from scipy import stats
from torch import Tensor

from unmask import objectives, samplers
from unmask.data.batch import Batch, make_batch
from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network
from unmask.errors import UsageError
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

ROWS = 20_000
PLAID = objectives.Plaid(dim=1, gamma_0=-2.0, gamma_1=2.0, self_conditioning=0.5)


def world(seed: int, objective: Any = PLAID) -> Network:
    """Two tokens, at -1 and 1."""
    network = crooked(2, seed=seed)
    objective.attach(network)
    made: Any = network.objective
    with torch.no_grad():
        made.embedding.weight.copy_(torch.tensor([[-1.0], [1.0], [1.0]]))
    network.objective = made.double()
    return network


@pytest.mark.parametrize("steps", [None, 3])
def test_the_estimator_s_mean_is_the_quadrature_of_both_passes(steps: int | None) -> None:
    objective = objectives.Plaid(dim=1, gamma_0=-2.0, gamma_1=2.0, steps=steps, self_conditioning=0.5)
    network = world(1, objective)
    process = objective.process(network)
    log_p = log_p_of(objective, network, process)
    with torch.no_grad():
        truth = continuous_bound(process, log_p, 1) if steps is None else step_bound(process, log_p, 1, steps)
        once = log_p_of(objectives.Plaid(dim=1), crooked_alone(network), process)
        assert abs(float(continuous_bound(process, once, 1)) - float(truth)) > 0.02  # the second pass matters
    x_BL = torch.ones(ROWS, 1, dtype=torch.long)
    values = objective.bound(network, x_BL, num_samples=1, seed=3).draws_BS[:, 0]
    error = float(values.std()) / math.sqrt(ROWS)
    assert abs(float(values.mean()) - float(truth)) < 4.5 * error
    assert error < 0.03 * float(truth)


def crooked_alone(network: Network) -> Network:
    """The same network, that reads no estimate."""
    alone = crooked(2, seed=1)
    alone.objective = network.objective
    return alone


@torch.no_grad()
def test_its_chain_is_a_law_below_its_bound_and_the_sampler_follows_it() -> None:
    network = world(5)
    process = PLAID.process(network)
    log_p = log_p_of(PLAID, network, process)
    law = chain_law(process, log_p, 3)
    assert float(law.sum()) == pytest.approx(1, abs=1e-6)
    for x in (0, 1):
        assert float(step_bound(process, log_p, x, 3)) >= -math.log(law[x]) - 1e-6
    canvas = Canvas.of(torch.full((ROWS, 1), 2), mask_id=2, seed=5)
    found = sample(network, canvas, samplers.Gaussian(steps=3), objective=PLAID).tokens
    counts = torch.bincount(found[:, 0], minlength=2).numpy()
    assert stats.chisquare(counts, (law[:2] / law.sum() * ROWS).numpy()).pvalue > 1e-3
    assert 0.05 < float(law[0]) < 0.95


# --- training ---


def trained(self_conditioning: float, objective: Callable[..., Any] = objectives.Plaid) -> tuple[Any, Network, Batch]:
    torch.manual_seed(0)
    made = objective(dim=4, self_conditioning=self_conditioning)
    network = DiT(hidden=16, blocks=1, heads=2, conditioning="level").build(num_ids=9, mask_id=8)
    made.attach(network)
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return made, network, make_batch(torch.randint(8, (6, 10)), seed=0, step=0)


def loss(objective: Any, network: Network, batch: Batch) -> float:
    nats: Tensor = objective.loss(network, batch).nats
    return float(nats.detach())


@pytest.mark.parametrize("objective", [objectives.Plaid, objectives.DiffusionLM])
def test_the_share_of_the_rows_is_read_twice_in_training_and_all_in_evaluation(objective: Any) -> None:
    half, network, batch = trained(0.5, objective)
    always, never = objective(dim=4, self_conditioning=1.0), objective(dim=4, self_conditioning=1e-9)
    rows = [batch.rows(i, i + 1) for i in range(6)]
    once, twice, mixed = ([loss(one, network, row) for row in rows] for one in (never, always, half))
    chosen = [abs(a - b) < abs(a - c) for a, b, c in zip(mixed, twice, once, strict=True)]
    assert 0 < sum(chosen) < 6
    assert mixed == pytest.approx([b if yes else c for yes, b, c in zip(chosen, twice, once, strict=True)], abs=0)
    assert all(abs(a - b) > 1e-4 for a, b in zip(once, twice, strict=True))
    with torch.no_grad():
        assert [loss(half, network, row) for row in rows] == pytest.approx(twice, rel=1e-5)


def test_the_estimate_is_a_constant_and_autocast_keeps_the_gradient() -> None:
    """Weights that autocast converts in a pass without gradients must not serve the next pass (torch before 2.13)."""
    objective, network, batch = trained(1.0)
    gradients = []
    for bf16 in (False, True):
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            nats = objective.loss(network, batch).nats
        nats.backward()
        named = [(name, p.grad) for name, p in network.named_parameters() if "embed" not in name.split(".")[0]]
        assert [name for name, grad in named if grad is None] == []
        gradients.append(torch.cat([grad.flatten() for _, grad in named if grad is not None]))
    assert float((gradients[1] - gradients[0]).norm()) < 0.05 * float(gradients[0].norm())


def test_rows_of_which_nothing_is_noised_cost_nothing() -> None:
    objective, network, _ = trained(1.0)
    batch = make_batch(torch.zeros(2, 4, dtype=torch.long), prefix_len_B=torch.tensor([4, 2]), seed=0, step=0)
    assert loss(objective, network, batch.rows(0, 1)) == 0
    assert loss(objective, network, batch) == pytest.approx(loss(objective, network, batch.rows(1, 2)), rel=1e-5)


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="share of training rows"):
        objectives.Plaid(self_conditioning=1.5)
