"""SSD-LM against quadrature over its three-dimensional simplex: the bound block by block, its loss, its decoding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from gaussian_worlds import hermite
from scipy import stats
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from unmask import objectives, samplers
from unmask.data.batch import Batch, make_batch
from unmask.denoisers.network import Network, as_denoiser
from unmask.errors import UsageError
from unmask.processes.gamma import Cosine
from unmask.processes.gaussian import Gaussian, Simplex, alpha_of, sigma_of, snr_drop
from unmask.rng import row_keys
from unmask.samplers import State
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample, steps

ROWS = 20_000
K = 1.5
OBJECTIVE = objectives.SSDLM(scale=K, block=1, steps=3, offset=0.2)
NODES = 12


def looking_back(seed: int = 0) -> Network:
    """Two tokens and the mask: logits from the probabilities at a position, at those beside it, and the level."""
    g = torch.Generator().manual_seed(seed)
    a, b = 2 * torch.randn(2, 3, 3, generator=g, dtype=torch.float64)
    d = torch.randn(3, generator=g, dtype=torch.float64)

    def f(p_BLI: Tensor, level_B: Tensor) -> Tensor:
        p_BLI = p_BLI.double()
        return p_BLI @ a + (p_BLI.sum(dim=1, keepdim=True) - p_BLI) @ b + d * level_B.double()[:, None, None]

    return as_denoiser(f, vocab_size=2, mask_id=2)


def cube() -> tuple[Tensor, Tensor]:
    """Points and weights of three standard normal numbers."""
    x, w = hermite(NODES)
    points = torch.tensor(list(itertools.product(x.tolist(), repeat=3)), dtype=torch.float64)
    return points, torch.tensor(list(itertools.product(w.tolist(), repeat=3)), dtype=torch.float64).prod(dim=1)


def log_x_theta(network: Network, before: list[int], z_NE: Tensor, t: float) -> Tensor:
    """[N, I] at the one noised position after these tokens."""
    one_hot = torch.nn.functional.one_hot(torch.tensor(before, dtype=torch.long), 3).double()
    p_NLI = torch.cat([one_hot.expand(len(z_NE), -1, -1), torch.softmax(z_NE.double(), dim=1)[:, None]], dim=1)
    logits = network(p_NLI, torch.full((len(z_NE),), t, dtype=torch.float64))[:, -1].clone()
    logits[:, 2] = -torch.inf
    return logits.log_softmax(dim=1)


def corner(x: int) -> Tensor:
    return K * (2 * torch.nn.functional.one_hot(torch.tensor([x]), 3).double() - 1)


def state(x: int, t: float) -> tuple[Tensor, Tensor]:
    """z_t of a token at all points, and their weights."""
    eps, w = cube()
    gamma = Cosine(offset=0.2).gamma(torch.tensor(t, dtype=torch.float64))
    return alpha_of(gamma) * corner(x) + sigma_of(gamma) * K * eps, w


def true_bound(network: Network, text: list[int]) -> float:
    """Block by block, with nothing of the process but alpha, sigma and K."""
    gamma_T = Cosine(offset=0.2).gamma(torch.arange(4, dtype=torch.float64) / 3)
    total = 0.0
    for l, x in enumerate(text):  # noqa: E741
        a, s = alpha_of(gamma_T[3]), sigma_of(gamma_T[3])
        prior = kl_divergence(Normal(a * corner(x), s * K), Normal(torch.tensor(0.0, dtype=torch.float64), K))
        z_NE, w_N = state(x, 0.0)
        a, s = alpha_of(gamma_T[0]), sigma_of(gamma_T[0])
        fit = torch.stack([Normal(a * corner(v), s * K).log_prob(z_NE).sum(dim=1) for v in (0, 1)], dim=1)
        total += float(prior.sum() - w_N @ fit.log_softmax(dim=1)[:, x])
        for i in (1, 2, 3):
            z_NE, w_N = state(x, i / 3)
            x_hat = K * (2 * log_x_theta(network, text[:l], z_NE, i / 3).exp() - 1)
            error = w_N @ ((corner(x) - x_hat) ** 2).sum(dim=1) / K**2
            total += float(snr_drop(gamma_T[i - 1], gamma_T[i]) / 2 * error)
    return total


def test_a_corner_s_distance_is_four_k_squared_times_the_simplex_s() -> None:
    process = OBJECTIVE.process(looking_back())
    p_NI, x_N = torch.tensor([[0.1, 0.9, 0.0], [0.6, 0.4, 0.0]]), torch.tensor([0, 0])
    distance = (process.points(x_N) - process.mean(p_NI)).square().sum(dim=1)
    on_simplex = (torch.nn.functional.one_hot(x_N, 3) - p_NI).square().sum(dim=1)
    torch.testing.assert_close(distance, 4 * K**2 * on_simplex)
    torch.testing.assert_close(process.squared_error(p_NI, x_N), distance / K**2)


def test_a_corner_is_an_embedding_like_any_other() -> None:
    """In units of the noise it is the Gaussian process with a table of corners."""
    like = torch.zeros(0, dtype=torch.float64)
    simplex = Simplex(Cosine(), like, scale=K, block=5, num_ids=4, mask_id=3)
    table = Gaussian(Cosine(), 2 * torch.eye(4, dtype=torch.float64) - 1, num_ids=4, mask_id=3)
    g = torch.Generator().manual_seed(0)
    z_NE = torch.randn(6, 4, generator=g, dtype=torch.float64)
    gamma_N, x_N = torch.linspace(-3, 3, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    ours, theirs = simplex.log_likelihood(K * z_NE, gamma_N), table.log_likelihood(z_NE, gamma_N)
    torch.testing.assert_close(ours.log_softmax(dim=1), theirs.log_softmax(dim=1))
    torch.testing.assert_close(simplex.prior_nats(x_N), table.prior_nats(x_N))
    p_NI = torch.softmax(z_NE, dim=1)
    torch.testing.assert_close(simplex.squared_error(p_NI, x_N), table.squared_error(p_NI, x_N))
    s, t = torch.tensor([0.2, 0.6], dtype=torch.float64)
    ours, std = simplex.posterior(K * z_NE, simplex.mean(p_NI), s, t)
    theirs, unit = table.posterior(z_NE, table.mean(p_NI), s, t)
    torch.testing.assert_close((ours, std), (K * theirs, K * unit))


@torch.no_grad()
def test_the_estimator_s_mean_is_the_sum_over_blocks() -> None:
    network, text = looking_back(1), [1, 0]
    truth = true_bound(network, text)
    bound = OBJECTIVE.bound(network, torch.tensor([text]).expand(ROWS, -1), num_samples=1, seed=3)
    values = bound.draws_BS[:, 0]
    error = float(values.std()) / math.sqrt(ROWS)
    assert abs(float(values.mean()) - truth) < 4.5 * error
    assert error < 0.03 * truth


@torch.no_grad()
def test_its_loss_is_the_cross_entropy_of_a_block() -> None:
    network, text = looking_back(2), [0, 1]
    truth = 0.0
    for l, x in enumerate(text):  # noqa: E741
        for i in (1, 2, 3):
            z_NE, w_N = state(x, i / 3)
            truth -= float(w_N @ log_x_theta(network, text[:l], z_NE, i / 3)[:, x]) / 3
    batch = make_batch(torch.tensor([text]).expand(ROWS, -1), seed=1, step=0)
    loss = OBJECTIVE.loss(network, batch)
    assert float(loss.nats) / ROWS == pytest.approx(truth, rel=0.03)
    assert int(loss.tokens) == 2 * ROWS


def test_a_block_is_among_those_that_are_scored() -> None:
    objective, x_BL = objectives.SSDLM(block=3), torch.zeros(400, 10, dtype=torch.long)
    scored_BL = (torch.arange(10) >= 4).expand(400, 10)
    batch = Batch(x_BL, None, scored_BL, row_keys(0, torch.arange(400)), torch.ones(400, dtype=torch.float64))
    lines = objective.lines(looking_back(), batch)
    first = lines.where_BL.int().argmax(dim=1)
    assert set(first.tolist()) == {4, 6, 9}
    assert lines.times_N is not None
    assert bool((lines.times_N == 3).all())
    assert lines.valid_BL is not None
    ends = lines.valid_BL.sum(dim=1)
    assert {int(f): int(e) for f, e in zip(first, ends, strict=True)} == {4: 6, 6: 9, 9: 10}
    counts = torch.bincount(first, minlength=10)[[4, 6, 9]].numpy()
    assert stats.chisquare(counts).pvalue > 1e-3


# --- decoding ---


@torch.no_grad()
@pytest.mark.parametrize("num", [1, 2])
def test_sampled_projections_are_drawn_and_noised_anew(num: int) -> None:
    """One block of one position: w from x_theta(noise), and in a second step from x_theta of w's corner, noised."""
    network = looking_back(3)
    eps, w_N = cube()
    law = w_N @ log_x_theta(network, [], K * eps, 1.0).exp()
    if num == 2:
        after = [state(x, 0.5) for x in (0, 1)]
        law = sum(law[x] * (w @ log_x_theta(network, [], z, 0.5).exp()) for x, (z, w) in enumerate(after))
    canvas = Canvas.blank(num=ROWS, length=1, mask_id=2, seed=5)
    tokens = sample(network, canvas, samplers.Simplex(steps=num), objective=OBJECTIVE).tokens[:, 0]
    assert stats.chisquare(torch.bincount(tokens, minlength=2).numpy(), law[:2].numpy() * ROWS).pvalue > 1e-3


@pytest.mark.parametrize("how", [{}, {"projection": "argmax"}, {"projection": "multi_hot", "top_p": 0.8}])
def test_blocks_are_written_from_left_to_right(how: dict[str, Any]) -> None:
    objective = objectives.SSDLM(block=3)
    canvas = Canvas.of(torch.tensor([[0, 2, 2, 2, 1, 2, 2, 2], [2, 1, 1, 1, 1, 1, 1, 1]]), mask_id=2)
    made = list(steps(looking_back(4), canvas, samplers.Simplex(steps=4, **how), objective=objective))
    assert len(made) == 12
    assert [sorted(set(step.position_N.tolist())) for step in made if len(step.token_N)] == [[0, 1, 2], [3, 5], [6, 7]]
    tokens = made[-1].tokens_BL
    assert bool((tokens < 2).all())
    assert bool((tokens == canvas.tokens)[~canvas.open_BL].all())
    sampler = samplers.Simplex(steps=4).bind(objective.process(looking_back()))
    assert sampler.max_calls(8) == 12


def test_nothing_after_a_block_is_seen() -> None:
    sampler = samplers.Simplex(steps=2).bind(objectives.SSDLM(block=3).process(looking_back()))
    asked: State = sampler.start(Canvas.blank(num=1, length=8, mask_id=2))
    query = sampler.ask(asked)
    assert query is not None
    assert query.tokens_BL.shape == (1, 3)
    assert query.latent_NE is not None
    assert query.latent_NE.shape == (3, 3)


def test_the_cuts_corner_is_multi_hot() -> None:
    sampler: Any = samplers.Simplex(steps=2, projection="multi_hot", top_p=0.8).bind(OBJECTIVE.process(looking_back()))
    begun = sampler.start(Canvas.blank(num=1, length=1, mask_id=2))
    noise = sampler.ask(begun).latent_NE
    assert float(noise.abs().max()) > 0
    sampler.tell(begun, torch.tensor([[0.6, 0.4, 0.0]]).log())  # both are left
    gamma = Cosine(offset=0.2).gamma(torch.tensor(0.5, dtype=torch.float64))
    fresh = sampler.fresh_noise(begun, 1)
    wanted = alpha_of(gamma) * K * torch.tensor([[1.0, 1.0, -1.0]]) + sigma_of(gamma) * fresh
    torch.testing.assert_close(begun.z_NE, wanted.to(begun.z_NE))


@pytest.mark.parametrize(
    "options",
    [{"steps": 0}, {"block": 0}, {"block": -1}, {"scale": 0.0}, {"scale": -5.0}, {"scale": math.nan}, {"offset": 0.0}],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        objectives.SSDLM(**options)


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"projection": "multi_hot"}, {"projection": "none"}, {"draw": "hybrid"}]
)
def test_samplers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        samplers.Simplex(**options)
