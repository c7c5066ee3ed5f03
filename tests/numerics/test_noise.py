"""Schedules: exact ends, derivative, inverse; and the posterior chained over steps gives the marginal (MATH 6.2)."""

from __future__ import annotations

import pytest
import torch

from unmask import noise
from unmask.noise import Noise
from unmask.processes.absorbing import stays_masked
from unmask.processes.base import q_marginal, q_posterior

SCHEDULES = [
    noise.LogLinear(),
    noise.Cosine(),
    noise.CosineSquared(),
    noise.Linear(),
    noise.Linear(sigma_min=0.5, sigma_max=3.0),
    noise.Linear(sigma_min=800.0, sigma_max=900.0),
    noise.Geometric(),
    noise.Polynomial(power=0.5),
    noise.Polynomial(power=3.0),
]
T = torch.linspace(0, 1, 1001, dtype=torch.float64)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)


@each_schedule
def test_ends_are_exact_and_alpha_falls(schedule: Noise) -> None:
    alpha = schedule.alpha(T)
    assert alpha[0] == 1
    assert alpha[-1] == 0
    assert schedule.level(T)[0] == 0
    assert schedule.level(T)[-1].item() == pytest.approx(1, abs=1e-15)
    assert (alpha.diff() < 0).all()


@each_schedule
def test_derivative_and_level_and_inverse(schedule: Noise) -> None:
    t, h = T[1:-1], 1e-6
    by_difference = (schedule.alpha(t + h) - schedule.alpha(t - h)) / (2 * h)
    torch.testing.assert_close(schedule.dalpha(t), by_difference, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(schedule.level(t), 1 - schedule.alpha(t), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(schedule.inverse(schedule.alpha(T)), T, rtol=0, atol=1e-7)
    torch.testing.assert_close(schedule.weight(t), -schedule.dalpha(t) / schedule.level(t))


@each_schedule
def test_level_keeps_its_digits_in_float32(schedule: Noise) -> None:
    t = torch.logspace(-6, 0, 50, dtype=torch.float64)
    torch.testing.assert_close(schedule.level(t.float()).double(), schedule.level(t), rtol=1e-3, atol=0)


@each_schedule
@pytest.mark.parametrize("prior", ["mask", "uniform"])
def test_posterior_chained_over_steps_gives_the_marginal(schedule: Noise, prior: str) -> None:
    """Start from q(z_1|x) and apply q(z_s|z_t,x) step by step: at every time the law is q(z_s|x)."""
    num_ids, x = 4, 1
    pi = torch.tensor([0.0, 0.0, 0.0, 1.0]) if prior == "mask" else torch.tensor([0.25] * 4)
    pi = pi.double()
    clean = torch.nn.functional.one_hot(torch.tensor([x] * num_ids), num_ids).double()
    times = torch.linspace(1, 0, 9, dtype=torch.float64)
    alpha = schedule.alpha(times)
    law = q_marginal(clean[:1], alpha[:1], pi)[0]
    for s, t in zip(alpha[1:], alpha[:-1], strict=True):
        # A state of probability 0 (a visible token that is not x) has no posterior; it carries no mass either.
        rows = q_posterior(torch.arange(num_ids), clean, s.expand(num_ids), t.expand(num_ids), pi)
        law = law @ torch.nan_to_num(rows)
        torch.testing.assert_close(law, q_marginal(clean[:1], s[None], pi)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(law, clean[0])


def test_masked_posterior_in_closed_form() -> None:
    """A visible token stays; a masked one opens by (alpha_s - alpha_t)/(1 - alpha_t); a predicted mask keeps it."""
    pi = torch.tensor([0.0, 0.0, 1.0]).double()
    alpha_s, alpha_t = torch.tensor([0.7]).double(), torch.tensor([0.2]).double()
    x_theta = torch.tensor([[0.5, 0.2, 0.3]]).double()  # with 0.3 on the mask, as D3PM may have
    visible = q_posterior(torch.tensor([0]), x_theta, alpha_s, alpha_t, pi)
    torch.testing.assert_close(visible, torch.tensor([[1.0, 0.0, 0.0]]).double())
    masked = q_posterior(torch.tensor([2]), x_theta, alpha_s, alpha_t, pi)
    torch.testing.assert_close(masked[0, 2], stays_masked(x_theta[0, 2], alpha_s, alpha_t)[0])
    torch.testing.assert_close(masked[0, 0] / masked[0, 1], x_theta[0, 0] / x_theta[0, 1])
    torch.testing.assert_close(
        1 - stays_masked(torch.tensor(0.0), alpha_s, alpha_t), (alpha_s - alpha_t) / (1 - alpha_t)
    )
