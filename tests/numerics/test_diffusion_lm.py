"""Diffusion-LM against quadrature: its bound in steps, its own loss, the chain with rounding, and its sampler."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from gaussian_worlds import (
    aggregate_divergence,
    chain_law,
    continuous_bound,
    crooked,
    ends,
    expected_errors,
    hermite,
    log_p_of,
    rounding,
    step_bound,
)
from scipy import stats
from torch import Tensor

from unmask import objectives, samplers
from unmask.data.batch import make_batch
from unmask.denoisers.network import Network, as_denoiser
from unmask.errors import UsageError
from unmask.processes.gamma import Sqrt
from unmask.processes.gaussian import alpha_of, sigma_of
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

ROWS = 20_000
E_I = [-1.2, 0.4, 1.5, 0.0]  # three tokens and the mask
OBJECTIVE = objectives.DiffusionLM(dim=1, steps=3)
FINE: Any = {"reach": 6.0, "points": 2001}


def in_line(network: Network) -> Network:
    OBJECTIVE.attach(network)
    made: Any = network.objective
    with torch.no_grad():
        made.embedding.weight.copy_(torch.tensor(E_I)[:, None])
    network.objective = made.double()
    return network


def test_its_defaults_are_the_paper_s() -> None:
    assert objectives.DiffusionLM().steps == 2000
    assert objectives.DiffusionLM().estimator(crooked(3)) == "T=2000"
    sampler = objectives.DiffusionLM().sampler()
    assert isinstance(sampler, samplers.Gaussian)
    assert sampler.clamp


@torch.no_grad()
def test_the_best_denoiser_pays_the_entropy_the_prior_and_the_rounding() -> None:
    """In continuous time, where rounding knows nothing of the data's law: E log[x_theta(z_0)[x] / p(x|z_0)] more."""
    p_I, e_I = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor(E_I, dtype=torch.float64)

    def best(z: Tensor, level: Tensor) -> Tensor:
        gamma = Sqrt().gamma(level.double())[:, None, None]  # it is told the time
        fit = -((z.double() - alpha_of(gamma) * e_I) ** 2) / (2 * sigma_of(gamma) ** 2)
        return fit + torch.cat([p_I.log(), torch.zeros(1)])

    network = in_line(as_denoiser(best, vocab_size=3, mask_id=3))
    process = OBJECTIVE.process(network)
    log_p = log_p_of(OBJECTIVE, network, process)
    eps_N, w_N = hermite(80)
    zero, more, mean = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for x, p in enumerate(p_I.tolist()):
        x_N = torch.full((80,), x)
        z_N1 = process.noised(x_N, process.gamma.gamma(zero).expand(80), eps_N[:, None])
        more += p * float((w_N * (log_p(z_N1, zero) - rounding(process, log_p, z_N1))[:, x]).sum())
        mean += p * float(continuous_bound(process, log_p, x, nodes=80, pieces=100, power=4))
    wanted = -float((p_I * p_I.log()).sum()) + aggregate_divergence(process, p_I) + more
    assert mean == pytest.approx(wanted, abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("steps", [3, 40, None])
def test_the_estimator_s_mean_is_the_quadrature(steps: int | None) -> None:
    network, objective = in_line(crooked(3, seed=1)), dataclasses.replace(OBJECTIVE, steps=steps)
    process = objective.process(network)
    log_p = log_p_of(objective, network, process)
    how: Any = {"nodes": 80}
    truth = float(
        step_bound(process, log_p, 1, steps, **how) if steps else continuous_bound(process, log_p, 1, power=4, **how)
    )
    values = objective.bound(network, torch.ones(ROWS, 1, dtype=torch.long), num_samples=1, seed=3).draws_BS[:, 0]
    error = float(values.std()) / math.sqrt(ROWS)
    assert abs(float(values.mean()) - truth) < 4.5 * error
    assert error < 0.06 * truth


@torch.no_grad()
def test_steps_tend_to_continuous_time() -> None:
    network = in_line(crooked(3, seed=2))
    process = OBJECTIVE.process(network)
    log_p = log_p_of(OBJECTIVE, network, process)
    limit = float(continuous_bound(process, log_p, 0, pieces=100, power=4))
    gaps = [abs(float(step_bound(process, log_p, 0, steps)) - limit) for steps in (20, 200, 2000, 20_000)]
    assert gaps[3] < 0.02 * limit
    assert gaps[3] < gaps[2] / 5 < gaps[0] / 10


@torch.no_grad()
def test_the_chain_is_a_law_below_its_bound_and_the_sampler_follows_it() -> None:
    network = in_line(crooked(3, seed=4))
    process = OBJECTIVE.process(network)
    log_p = log_p_of(OBJECTIVE, network, process)
    for steps in (1, 3):
        law = chain_law(process, log_p, steps, **FINE)
        assert float(law.sum()) == pytest.approx(1, abs=1e-4)
        for x in range(3):
            assert float(step_bound(process, log_p, x, steps, nodes=80)) >= -math.log(law[x]) - 1e-4
    canvas = Canvas.blank(num=ROWS, length=1, mask_id=3, seed=5)
    tokens = sample(network, canvas, samplers.Gaussian(steps=3), objective=OBJECTIVE).tokens[:, 0]
    counts = torch.bincount(tokens, minlength=3).numpy()
    assert stats.chisquare(counts, law[:3].numpy() / float(law.sum()) * ROWS).pvalue > 1e-3
    calls = samplers.Gaussian(steps=3)
    assert calls.max_calls(1) >= 3


@torch.no_grad()
def test_its_loss_is_the_mean_of_three_parts() -> None:
    network = in_line(crooked(3, seed=6))
    process = OBJECTIVE.process(network)
    log_p = log_p_of(OBJECTIVE, network, process)
    times = torch.tensor([1, 2, 3], dtype=torch.float64) / 3
    simple = float(expected_errors(process, log_p, 2, times, 80).mean())
    last = float(alpha_of(process.gamma.gamma(torch.ones(1, dtype=torch.float64)))) ** 2 * E_I[2] ** 2
    rounded = float(ends(process, log_p, 2, 80) - process.prior_nats(torch.tensor([2]))[0])
    batch = make_batch(torch.full((ROWS, 1), 2), seed=0, step=0)
    loss = OBJECTIVE.loss(network, batch)
    assert float(loss.nats) / ROWS == pytest.approx(simple + last + rounded, rel=0.02)
    assert simple > 0.1


def test_all_that_is_learned_gets_the_loss_s_gradient() -> None:
    network = in_line(crooked(3, seed=7))
    made: Any = network.objective
    batch = make_batch(torch.tensor([[0, 1], [2, 1]]), seed=1, step=0)
    OBJECTIVE.loss(network, batch).nats.backward()
    p = made.embedding.weight
    for i in (0, 1):
        found = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                p[i] += step
                found.append(float(OBJECTIVE.loss(network, batch).nats))
                p[i] -= step
        assert (found[0] - found[1]) / 2e-6 == pytest.approx(float(p.grad[i]), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": -1}, {"dim": 0}, {"dim": -4}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        objectives.DiffusionLM(**options)
