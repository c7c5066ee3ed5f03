"""Gaussian states against quadrature: schedules, steps, bounds and their limits, the chain and its sampler."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from gaussian_worlds import (
    aggregate_divergence,
    chain_law,
    check_gamma,
    continuous_bound,
    crooked,
    hermite,
    log_p_of,
    step_bound,
)
from scipy import stats
from torch import Tensor

from unmask import objectives, samplers
from unmask.data.batch import Batch, make_batch
from unmask.denoisers.network import Network, as_denoiser
from unmask.errors import UsageError
from unmask.objectives.plaid import STEER
from unmask.processes.gamma import Cosine, Gamma, LearnedGamma, Sqrt
from unmask.processes.gaussian import Gaussian, alpha_of, sigma_of, snr_drop
from unmask.rng import normal, row_keys
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

ROWS = 20_000
OWN = objectives.DiffusionLM(dim=1)
PLAID = objectives.Plaid(dim=1, gamma_0=-2.0, gamma_1=2.0)


def bent() -> LearnedGamma:
    gamma = LearnedGamma(-2.0, 3.0)
    torch.nn.init.normal_(gamma.pieces_M, generator=torch.Generator().manual_seed(1))
    return gamma.double()


def of_signs(network: Network, objective: Any = PLAID) -> Network:
    """Two tokens, at -1 and 1."""
    objective.attach(network)
    made: Any = network.objective
    with torch.no_grad():
        made.embedding.weight.copy_(torch.tensor([[-1.0], [1.0], [1.0]]))
    network.objective = made.double()
    return network


# --- the noise ---


def test_normal_numbers_are_normal() -> None:
    draws = normal(row_keys(3, torch.arange(200))[:, None], 5, torch.arange(250))
    assert stats.kstest(draws.flatten().numpy(), "norm").pvalue > 1e-3
    assert abs(float((draws[:, 1:] * draws[:, :-1]).mean())) < 4.5 / math.sqrt(draws.numel())
    assert float(draws.abs().max()) > 3.5
    assert draws[7, :9].equal(normal(row_keys(3, torch.tensor(7)), 5, torch.arange(9)))  # whatever stands beside it
    assert bool(torch.isfinite(normal(torch.arange(100_000))).all())


@pytest.mark.parametrize("gamma", [Sqrt(), Cosine(), LearnedGamma(-3.0, 6.0).double()], ids=lambda g: type(g).__name__)
def test_a_schedule_rises_at_its_rate(gamma: Gamma) -> None:
    check_gamma(gamma)


def test_the_schedules_are_the_papers() -> None:
    t = torch.tensor([0.0, 0.3, 0.9], dtype=torch.float64)
    torch.testing.assert_close(torch.sigmoid(-Sqrt().gamma(t)), 1 - torch.sqrt(t + 1e-4))
    torch.testing.assert_close(torch.sigmoid(-Cosine().gamma(t)), torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2)
    end = torch.ones((), dtype=torch.float64)
    assert float(torch.sigmoid(-Sqrt().gamma(end))) == pytest.approx(2e-7, rel=1e-3)
    assert float(torch.sigmoid(-Cosine().gamma(end))) == pytest.approx(1e-10, rel=1e-3)
    gamma = bent()
    assert gamma.gamma(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([-2, 3])
    level = gamma.level(torch.linspace(0, 1, 500, dtype=torch.float64))
    assert bool((level.diff() > 0).all())


@pytest.mark.parametrize("gamma", [Sqrt(), Cosine(), bent()], ids=lambda g: type(g).__name__)
def test_the_posterior_chained_gives_the_marginal(gamma: Gamma) -> None:
    process = Gaussian(gamma, torch.tensor([[0.7], [-1.3], [0.0]], dtype=torch.float64), num_ids=3, mask_id=2)
    x_hat = process.points(torch.tensor([1]))
    times = torch.linspace(1, 0, 8, dtype=torch.float64)
    mean = alpha_of(gamma.gamma(times[0])) * x_hat
    variance = sigma_of(gamma.gamma(times[0])) ** 2
    for t, s in itertools.pairwise(times):
        zero, std = process.posterior(torch.zeros(1, 1, dtype=torch.float64), x_hat, s, t)
        slope = process.posterior(torch.ones(1, 1, dtype=torch.float64), x_hat, s, t)[0] - zero
        mean, variance = slope * mean + zero, slope**2 * variance + std**2
        torch.testing.assert_close(mean, alpha_of(gamma.gamma(s)) * x_hat)
        torch.testing.assert_close(variance, (sigma_of(gamma.gamma(s)) ** 2).expand_as(variance))


@pytest.mark.parametrize("gamma", [Sqrt(), Cosine(), bent()], ids=lambda g: type(g).__name__)
@pytest.mark.parametrize(("s", "t"), [(0.0, 0.1), (0.4, 0.41), (0.5, 1.0)])
def test_a_step_s_divergence_is_the_drop_of_the_snr(gamma: Gamma, s: float, t: float) -> None:
    e_IE = torch.tensor([[0.7, 2.0], [-1.3, 0.1], [0.0, 0.0]], dtype=torch.float64)
    process = Gaussian(gamma, e_IE, num_ids=3, mask_id=2)
    p_NI, x_N = torch.tensor([[0.3, 0.7, 0.0]], dtype=torch.float64), torch.tensor([0])
    s_, t_ = (torch.tensor(time, dtype=torch.float64) for time in (s, t))
    z = torch.tensor([[0.2, -0.4]], dtype=torch.float64)
    (q, std), (p, _) = (process.posterior(z, x, s_, t_) for x in (process.points(x_N), process.mean(p_NI)))
    kl = ((q - p) ** 2).sum() / (2 * std**2)
    found = snr_drop(gamma.gamma(s_), gamma.gamma(t_)) / 2 * process.squared_error(p_NI, x_N)
    torch.testing.assert_close(found, kl.flatten())


def test_states_follow_their_law() -> None:
    process = Gaussian(Sqrt(), torch.tensor([[0.7], [-1.3], [0.0]], dtype=torch.float64), num_ids=3, mask_id=2)
    x_BL, t_B = torch.ones(5_000, 2, dtype=torch.long), torch.full((5_000,), 0.4, dtype=torch.float64)
    open_BL, key_B = torch.tensor([True, False]).expand(5_000, 2), row_keys(0, torch.arange(5_000))
    z_N = process.corrupt(x_BL, t_B, key_B, open_BL).flatten()
    gamma = Sqrt().gamma(t_B[0])
    law = stats.norm(-1.3 * float(alpha_of(gamma)), float(sigma_of(gamma)))
    assert len(z_N) == 5_000
    assert stats.kstest(z_N.numpy(), law.cdf).pvalue > 1e-3
    assert stats.kstest(process.prior(key_B, open_BL, x_BL).flatten().numpy(), "norm").pvalue > 1e-3
    kl = torch.distributions.kl_divergence(
        torch.distributions.Normal(-1.3 * alpha_of(gamma_1 := Sqrt().gamma(torch.tensor(0.9))), sigma_of(gamma_1)),
        torch.distributions.Normal(0.0, 1.0),
    )
    process.gamma = Fixed(gamma_1)
    torch.testing.assert_close(process.prior_nats(torch.tensor([1]))[0].float(), kl, rtol=1e-4, atol=1e-6)


class Fixed(Gamma):
    def __init__(self, value: Tensor) -> None:
        self.value = value

    def gamma(self, t: Tensor) -> Tensor:
        return self.value.to(t)

    def rate(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)


# --- the bound ---


def test_the_best_denoiser_pays_the_entropy_and_the_prior() -> None:
    p_I = torch.tensor([0.3, 0.7], dtype=torch.float64)
    logits_I = torch.cat([p_I.log(), torch.zeros(1)])
    network = of_signs(as_denoiser(lambda z, level: logits_I.expand(*z.shape[:2], 3), vocab_size=2, mask_id=2))
    process = PLAID.process(network)
    log_p = log_p_of(PLAID, network, process)  # with the output prior these logits are p(x | z_t) itself
    with torch.no_grad():
        mean = sum(p * continuous_bound(process, log_p, x) for x, p in enumerate(p_I.tolist()))
    wanted = -float((p_I * p_I.log()).sum()) + aggregate_divergence(process, p_I)
    assert float(mean) == pytest.approx(wanted, abs=1e-5)


def assert_hits(network: Network, objective: Any, x: Tensor, truth: float) -> None:
    bound = objective.bound(network, x.expand(ROWS, -1), num_samples=1, seed=3)
    values = bound.draws_BS[:, 0]
    error = float(values.std()) / math.sqrt(ROWS)
    assert abs(float(values.mean()) - truth) < 4.5 * error
    assert error < 0.03 * truth


@pytest.mark.parametrize("gamma", [Sqrt(), Cosine(offset=0.1)], ids=lambda g: type(g).__name__)
@pytest.mark.parametrize("steps", [None, 7, 100])
def test_weights_have_the_mean_of_the_snr_s_drop(gamma: Gamma, steps: int | None) -> None:
    """Whichever way times are drawn, also where i / T x T is not i in floats."""
    u_B = (torch.arange(50_000, dtype=torch.float64) + 0.5) / 50_000
    snr = torch.exp(-gamma.gamma(torch.tensor([0.0, 1.0], dtype=torch.float64)))
    objective = dataclasses.replace(OWN, steps=steps)
    for times in (objective.times, objective.bound_times):
        weight_B = times(gamma, u_B).weight_B
        assert float(weight_B.mean()) == pytest.approx(float(snr[0] - snr[1]) / 2, rel=5e-3)


@pytest.mark.parametrize("steps", [None, 3])
def test_the_estimator_s_mean_is_the_quadrature(steps: int | None) -> None:
    objective = objectives.Plaid(dim=1, gamma_0=-2.0, gamma_1=2.0, steps=steps)
    network = of_signs(crooked(2, seed=1), objective)
    process = objective.process(network)
    log_p = log_p_of(objective, network, process)
    with torch.no_grad():
        truth = continuous_bound(process, log_p, 1) if steps is None else step_bound(process, log_p, 1, steps)
    assert_hits(network, objective, torch.tensor([[1]]), float(truth))


@torch.no_grad()
def test_steps_tend_to_continuous_time() -> None:
    network = of_signs(crooked(2, seed=2))
    process = PLAID.process(network)
    log_p = log_p_of(PLAID, network, process)
    limit = float(continuous_bound(process, log_p, 0))
    gaps = [abs(float(step_bound(process, log_p, 0, steps)) - limit) for steps in (4, 32, 256)]
    assert gaps[2] < 0.01 * limit
    assert gaps[2] < gaps[0] / 8


@pytest.mark.parametrize("seed", range(2))
def test_the_chain_is_a_law_below_its_bound(seed: int) -> None:
    network = of_signs(crooked(2, seed=seed))
    process = PLAID.process(network)
    log_p = log_p_of(PLAID, network, process)
    with torch.no_grad():
        for steps in (1, 2, 5):
            law = chain_law(process, log_p, steps)
            assert float(law.sum()) == pytest.approx(1, abs=1e-6)
            for x in (0, 1):
                assert float(step_bound(process, log_p, x, steps)) >= -math.log(law[x]) - 1e-6


# --- gamma is learned ---


@pytest.mark.parametrize("level", [False, True], ids=["ignores level", "sees level"])
def test_between_its_ends_gamma_does_not_matter_in_continuous_time(level: bool) -> None:
    network = of_signs(crooked(2, seed=3, level=level))
    process = PLAID.process(network)
    gamma: Any = process.gamma
    log_p = log_p_of(PLAID, network, process)
    bound = continuous_bound(process, log_p, 1)
    if not level:  # what the network is told of gamma has no gradient
        pieces_M, first_1 = torch.autograd.grad(bound, [gamma.pieces_M, gamma.first_1])
        assert float(pieces_M.abs().max()) < 1e-5
        assert float(first_1.abs()) > 1e-3
    with torch.no_grad():
        gamma.pieces_M.copy_(torch.linspace(-1, 1, 32))
        assert float(continuous_bound(process, log_p, 1)) == pytest.approx(float(bound), abs=1e-6)
        gamma.first_1 -= 0.1
        assert abs(float(continuous_bound(process, log_p, 1)) - float(bound)) > 1e-4


def test_gradients_of_gamma_are_the_loss_s_at_its_ends_and_the_square_s_between() -> None:
    network = of_signs(crooked(2, seed=4, level=False))
    made: Any = network.objective
    batch = make_batch(torch.tensor([[0, 1], [1, 1], [1, 0]]), seed=1, step=0)
    PLAID.loss(network, batch).nats.backward()

    def differences(p: Tensor, i: int, value: Any) -> float:
        found = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                p[i] += step
                found.append(float(value()))
                p[i] -= step
        return (found[0] - found[1]) / 2e-5

    for p in (made.gamma.first_1, made.gamma.log_width_1, made.embedding.weight[:, 0]):
        grad = made.embedding.weight.grad[:, 0] if p.ndim and len(p) == 3 else p.grad
        assert differences(p.detach(), 0, lambda: PLAID.loss(network, batch).nats) == pytest.approx(
            float(grad[0]), rel=1e-4, abs=1e-6
        )

    def squares() -> Tensor:  # z_0 and the prior know nothing of the curve
        return STEER * (diffusion_nats(network, batch).sum(dim=1) ** 2 / 2).sum()

    for i in (int(time * 32) for time in batch.time_B.tolist()):
        p = made.gamma.pieces_M
        assert differences(p.detach(), i, squares) == pytest.approx(float(p.grad[i]), rel=1e-4)


@torch.no_grad()
def diffusion_nats(network: Network, batch: Batch) -> Tensor:
    from unmask.objectives.chunked_loss import at_positions, token_nats

    process, lines = PLAID.process(network), PLAID.lines(network, batch)
    h_ND, term, _ = PLAID.diffusion(network, batch, process, lines, PLAID.times(process.gamma, batch.time_B))
    return at_positions(lines.where_BL, token_nats(network, h_ND, term))


# --- the sampler ---


def drawn(network: Network, objective: Any, sampler: Any, tokens: list[int], rows: int = ROWS) -> Tensor:
    canvas = Canvas.of(torch.tensor([tokens]).expand(rows, -1).clone(), mask_id=2, seed=5)
    return sample(network, canvas, sampler, objective=objective).tokens


def test_the_sampler_follows_the_chain_of_one_position() -> None:
    network = of_signs(crooked(2, seed=5))
    process = PLAID.process(network)
    with torch.no_grad():
        law = chain_law(process, log_p_of(PLAID, network, process), 3)[:2]
    counts = torch.bincount(drawn(network, PLAID, samplers.Gaussian(steps=3), [2])[:, 0], minlength=2)
    assert stats.chisquare(counts.numpy(), law.numpy() / float(law.sum()) * ROWS).pvalue > 1e-3
    assert 0.05 < float(law[0]) < 0.95


@pytest.mark.parametrize("fixed", [False, True])
@torch.no_grad()
def test_positions_that_see_each_other_follow_the_chain(fixed: bool) -> None:
    """One step of two positions, integrated over z_1 and z_0; or of one, where the other is a given token."""
    network = of_signs(crooked(2, seed=6))
    process = PLAID.process(network)
    node, w = hermite(24)
    num = 1 if fixed else 2
    eps = torch.tensor(list(itertools.product(node.tolist(), repeat=num)), dtype=torch.float64)
    w = torch.tensor(list(itertools.product(w.tolist(), repeat=num))).double().prod(dim=1)
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)

    def log_p(z_PL: Tensor, level: Tensor) -> Tensor:
        """[P, L, I] at the open positions."""
        P = len(z_PL)
        tokens = torch.tensor([[2, 1]]).expand(P, -1) if fixed else torch.full((P, 2), 2)
        row_N, at_N = (tokens == 2).nonzero(as_tuple=True)
        gamma_N = process.gamma.of_level(level).expand(len(row_N))
        read = PLAID.vectors(network, tokens, row_N, at_N, z_PL.reshape(-1, 1), gamma_N)
        logits = network(read, level.expand(P))[row_N, at_N]
        return PLAID.log_probs(process, logits, z_PL.reshape(-1, 1), gamma_N).view(P, num, 3)

    x_hat = process.mean(log_p(eps, process.level(one)).exp().view(-1, 3))
    mean, std = process.posterior(eps.reshape(-1, 1), x_hat, zero, one)
    z_0 = mean.view(-1, 1, num) + std[0, 0] * eps[None]
    p = log_p(z_0.view(-1, num), process.level(zero)).exp()[..., :2]
    joint = p[:, 0] if fixed else (p[:, 0, :, None] * p[:, 1, None, :]).flatten(1)
    law = ((w[:, None] * w[None]).flatten()[:, None] * joint).sum(dim=0)
    tokens = drawn(network, PLAID, samplers.Gaussian(steps=1), [2, 1] if fixed else [2, 2])
    found = tokens[:, 0] if fixed else tokens[:, 0] * 2 + tokens[:, 1]
    assert not fixed or bool((tokens[:, 1] == 1).all())
    counts = torch.bincount(found, minlength=len(law)).numpy()
    assert stats.chisquare(counts, (law / law.sum() * ROWS).numpy()).pvalue > 1e-3
    assert float(law.sum()) == pytest.approx(1, abs=1e-3)


def test_a_clamped_point_is_an_embedding() -> None:
    seen = []
    network = of_signs(crooked(2, seed=7))

    class Spy(Gaussian):
        def posterior(self, z_N: Tensor, x_hat: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(x_hat)
            return super().posterior(z_N, x_hat, s, t)

    made = PLAID.process(network)
    spy = Spy(made.gamma, made.e_IE.detach(), num_ids=3, mask_id=2, reads_z0=True)
    sampler = samplers.Gaussian(steps=4, clamp=True)
    object.__setattr__(sampler, "bind", lambda process: bound)
    bound = samplers.Gaussian(steps=4, clamp=True).bind(spy)
    drawn(network, PLAID, sampler, [2, 2], rows=5)
    assert len(seen) == 4
    assert bool((torch.cat(seen).abs() == 1).all())


# --- what makes no sense ---


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": -3}, "steps"),
        ({"dim": 0}, "dim"),
        ({"gamma_0": 7.0}, "gamma"),
        ({"gamma_1": float("nan")}, "gamma_1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        objectives.Plaid(**options)


@pytest.mark.parametrize("options", [{"steps": 0}, {"temperature_end": 0.5}, {"draw": "hybrid"}, {"temperature": -1.0}])
def test_samplers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        samplers.Gaussian(**options)
