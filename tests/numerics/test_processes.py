"""Forward processes: what `corrupt` and `prior` draw follows q(z_t | x) and pi, and posteriors chain to marginals."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from unmask import noise
from unmask.noise import Noise
from unmask.processes.absorbing import Absorbing
from unmask.processes.base import CategoricalProcess, q_marginal
from unmask.processes.uniform import Uniform
from unmask.rng import row_keys

PROCESSES = [Absorbing, Uniform]
SCHEDULES = [noise.LogLinear(), noise.Cosine(), noise.Geometric()]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("cls", PROCESSES)
def test_posteriors_chain_to_the_marginal(cls: type[CategoricalProcess], schedule: Noise) -> None:
    """From z_1 ~ pi, the posteriors given x at times 1 > 0.7 > 0.2 > 0 give q(z_t | x) at each of them, and x."""
    process = cls(schedule, num_ids=4, mask_id=1)
    x_1I = torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    law_I = process.pi(x_1I)
    times = torch.tensor([1.0, 0.7, 0.2, 0.0], dtype=torch.float64)
    for t, s in itertools.pairwise(times):
        step_II = process.posterior(torch.arange(4), x_1I.expand(4, -1), s, t)
        law_I = torch.where(law_I[:, None] > 0, law_I[:, None] * step_II, 0.0).sum(dim=0)
        wanted_I = q_marginal(x_1I, process.alpha(s)[None], process.pi(x_1I))[0]
        torch.testing.assert_close(law_I, wanted_I, rtol=1e-9, atol=1e-12)
    assert law_I.tolist() == pytest.approx([0, 0, 1, 0])


@pytest.mark.parametrize("cls", PROCESSES)
def test_what_is_drawn_follows_the_marginal(cls: type[CategoricalProcess]) -> None:
    """chi-square over 20,000 rows, at a time for each row and at a time for each position."""
    process = cls(noise.Cosine(), num_ids=5, mask_id=2)
    rows, x = 20_000, torch.tensor([0, 4, 3])
    x_BL, key_B = x.expand(rows, -1), row_keys(3, torch.arange(rows))
    open_BL = torch.tensor([True, True, False]).expand(rows, -1)
    t_L = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    z_BL = process.corrupt(x_BL, t_L.expand(rows, -1), key_B, open_BL)
    assert bool((z_BL[:, 2] == 3).all())  # not open: as it was
    same_BL = process.corrupt(x_BL, torch.full((rows,), 0.6, dtype=torch.float64), key_B, open_BL)
    for column, t, found_BL in ((0, 0.3, z_BL), (1, 0.6, z_BL), (0, 0.6, same_BL)):
        one_hot_1I = torch.nn.functional.one_hot(x[column : column + 1], 5).double()
        law_I = q_marginal(one_hot_1I, process.alpha(torch.tensor([t], dtype=torch.float64)), process.pi(one_hot_1I))[0]
        counts_I = torch.bincount(found_BL[:, column], minlength=5)
        there_I = law_I > 0
        assert int(counts_I[~there_I].sum()) == 0
        assert stats.chisquare(counts_I[there_I], law_I[there_I] * rows).pvalue > 1e-3


def test_the_uniform_prior_has_no_mask_and_every_token() -> None:
    process = Uniform(noise.LogLinear(), num_ids=6, mask_id=3)
    tokens_BL = torch.full((6_000, 2), 3)
    open_BL = torch.tensor([True, False]).expand(6_000, -1)
    z_BL = process.prior(row_keys(0, torch.arange(6_000)), open_BL, tokens_BL)
    assert bool((z_BL[:, 1] == 3).all())
    counts_I = torch.bincount(z_BL[:, 0], minlength=6)
    assert counts_I[3] == 0
    assert stats.chisquare(counts_I[counts_I > 0]).pvalue > 1e-3


def test_noise_at_one_position_does_not_depend_on_the_others() -> None:
    process = Uniform(noise.LogLinear(), num_ids=9, mask_id=8)
    key_B, t_B = row_keys(1, torch.arange(4)), torch.full((4,), 0.5, dtype=torch.float64)
    x_BL = torch.arange(8).expand(4, -1)
    every = process.corrupt(x_BL, t_B, key_B, torch.ones(4, 8, dtype=torch.bool))
    some_BL = torch.arange(8).expand(4, -1) >= 4
    part = process.corrupt(x_BL, t_B, key_B, some_BL)
    assert part[:, 4:].equal(every[:, 4:])
    assert part[:, :4].equal(x_BL[:, :4])
