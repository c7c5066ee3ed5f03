"""The masked language model: what is masked, that its bound is MDLM's, and a pseudo-likelihood that bounds nothing."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import World, data_world
from scipy import stats
from torch import Tensor

import unmask
from resuming import whole_and_resumed
from unmask import objectives
from unmask.data.batch import Batch, make_batch
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network
from unmask.errors import UsageError
from unmask.model import Model
from unmask.objectives.mlm import MLM

V, L = 5, 20
P_MIN = 1e-4


def network(**options: Any) -> Network:
    torch.manual_seed(0)
    net = DiT(hidden=16, blocks=1, heads=2, **options).build(num_ids=V + 1, mask_id=V)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return net.double()


def rows(num: int = 6, length: int = L) -> Tensor:
    return torch.randint(0, V, (num, length), generator=torch.Generator().manual_seed(1))


# --- what is predicted, and how it is hidden ---


def test_so_many_are_predicted_and_each_set_alike() -> None:
    """15% of what is scored, one at least; of two in twelve every pair is as likely as any other."""
    for length, wanted in ((1, 1), (3, 1), (10, 2), (20, 3), (100, 15)):
        batch = make_batch(rows(8, length), seed=0, step=0)
        assert (MLM().corrupted(batch, V + 1, V)[1].sum(dim=1) == wanted).all()
    batch = make_batch(rows(20_000, 7), torch.full((20_000,), 6), torch.full((20_000,), 1), seed=2, step=1)
    _, predicted_BL = MLM(rate=0.4).corrupted(batch, V + 1, V)  # 2 of the 5 that are scored
    assert not (predicted_BL & ~batch.scored_BL).any()
    pairs = torch.tensor(list(itertools.combinations(range(1, 6), 2)))
    counts = [int((predicted_BL[:, a] & predicted_BL[:, b]).sum()) for a, b in pairs.tolist()]
    assert sum(counts) == len(batch.x_BL)
    assert stats.chisquare(counts).pvalue > P_MIN


@pytest.mark.parametrize("mask_id", [V, 2])
def test_masks_replacements_and_tokens_left_as_they_are(mask_id: int) -> None:
    """Chi-square against 80/10/10, with a replacement uniform over all tokens, so that one in V is the token itself."""
    token = 3
    batch = make_batch(torch.full((4000, 40), token), seed=4, step=0)
    z_BL, predicted_BL = MLM().corrupted(batch, V + 1, mask_id)
    assert (z_BL[~predicted_BL] == token).all()
    found = torch.bincount(z_BL[predicted_BL], minlength=V + 1).double()
    law = torch.full((V + 1,), 0.1 / V, dtype=torch.float64)
    law[mask_id], law[token] = 0.8, 0.1 + 0.1 / V
    assert stats.chisquare(found, law * found.sum()).pvalue > P_MIN
    masks = (z_BL == mask_id).sum(dim=1).double()
    assert float(masks.var()) == pytest.approx(6 * 0.8 * 0.2, rel=0.1)  # each for itself: binomial in a row of six


def test_everything_random_is_the_rows_key() -> None:
    whole = make_batch(rows(8), seed=1, step=2)
    z_BL, predicted_BL = MLM().corrupted(whole, V + 1, V)
    for lo in range(0, 8, 2):
        part = MLM().corrupted(whole.rows(lo, lo + 2), V + 1, V)
        assert part[0].equal(z_BL[lo : lo + 2])
        assert part[1].equal(predicted_BL[lo : lo + 2])
    assert not MLM().corrupted(make_batch(rows(8), seed=1, step=3), V + 1, V)[1].equal(predicted_BL)


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_the_mean_of_what_is_predicted_in_a_row(padded: bool) -> None:
    net = network()
    lengths = torch.tensor([20, 13, 5, 7, 20, 2]) if padded else None
    batch = make_batch(rows(), lengths, seed=3, step=1)
    z_BL, predicted_BL = MLM().corrupted(batch, V + 1, V)
    logits = net.head(net.trunk(z_BL, valid_BL=batch.valid_BL).flatten(0, 1))[:, :V].view(*z_BL.shape, V)
    nats_BL = -logits.log_softmax(-1).gather(2, batch.x_BL[..., None]).squeeze(2)
    mean_B = (nats_BL * predicted_BL).sum(dim=1) / predicted_BL.sum(dim=1)
    loss = MLM().loss(net, batch)
    torch.testing.assert_close(loss.nats, (mean_B * batch.scored_BL.sum(dim=1)).sum(), rtol=1e-9, atol=0)
    assert loss.tokens == batch.num_tokens


# --- the bound, and the number that is none ---


def test_its_bound_is_the_count_form_of_the_same_network() -> None:
    net, x_BL = network().eval(), rows()
    how: dict[str, Any] = {"seed": 5, "num_samples": 8}
    bound = MLM().bound(net, x_BL, **how)
    assert bound.draws_BS.equal(objectives.MDLM().bound(net, x_BL, estimator="count", **how).draws_BS)
    assert (bound.kind, bound.ppl_name) == ("upper bound", "perplexity")
    world = World.random(seed=3)
    for x in world.texts[:2]:
        many = MLM().bound(world.denoiser(), x.expand(20_000, -1), num_samples=1).draws_BS[:, 0]
        assert abs(float(many.mean()) - world.count_bound(x)) < 4.5 * float(many.std()) / math.sqrt(20_000)


def left_out(world: World, x: Tensor) -> float:
    return sum(world.masked_loss(x, (position,), 1 / world.L) for position in range(world.L))


def test_the_pseudo_likelihood_by_enumeration() -> None:
    world = World.random(V=3, L=3, seed=2)
    pseudo = MLM().bound(world.denoiser(), world.texts, estimator="pseudo", num_samples=8)
    assert pseudo.draws_BS.shape == (27, 1)  # nothing is drawn: read once
    wanted = torch.tensor([left_out(world, x) for x in world.texts], dtype=torch.float64)
    torch.testing.assert_close(pseudo.nats_B, wanted, rtol=1e-9, atol=0)
    assert (pseudo.kind, pseudo.ppl_name) == ("pseudo", "pseudo-perplexity")
    assert "pseudo-perplexity ≈" in repr(pseudo)
    assert not {"ppl", "ppl_ci95"} & pseudo.summary().keys()


def test_the_pseudo_likelihood_bounds_nothing() -> None:
    """Of a network that knows p it lies below -log p: with what all others tell, a token is cheaper than it is."""
    world, p = data_world(V=2, L=3, seed=0)
    x_BL = world.texts
    exact_B = -p[world.index(x_BL)].log()
    pseudo_B = MLM().bound(world.denoiser(), x_BL, estimator="pseudo").nats_B
    bound_B = torch.tensor([world.count_bound(x) for x in x_BL], dtype=torch.float64)
    weight_B = p[world.index(x_BL)]
    assert (bound_B >= exact_B - 1e-9).all()
    assert float(weight_B @ pseudo_B) < float(weight_B @ exact_B) - 0.1


def test_rows_of_any_shape_and_in_any_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    net, pseudo = network(classes=2).eval(), MLM().with_estimator("pseudo")
    batch = make_batch(rows(), torch.tensor([20, 13, 5, 7, 20, 2]), torch.tensor([0, 4, 1, 0, 0, 0]), seed=0, step=0)
    batch = Batch(
        batch.x_BL, batch.valid_BL, batch.scored_BL, batch.key_B, batch.time_B, torch.tensor([0, 1, 1, 0, -1, 1])
    )
    nats_BL = pseudo.position_nats(net, batch)
    assert (nats_BL > 0).equal(batch.scored_BL)
    monkeypatch.setattr(objectives.mlm, "AT_ONCE", 50)
    torch.testing.assert_close(pseudo.position_nats(net, batch), nats_BL, rtol=1e-9, atol=1e-12)
    alone = [pseudo.position_nats(net, batch.rows(i, i + 1)) for i in range(6)]
    torch.testing.assert_close(torch.cat(alone), nats_BL, rtol=1e-9, atol=1e-12)


def test_a_measurement_says_what_it_is() -> None:
    tokenizer = load_tokenizer("bytes")
    net = DiT(hidden=16, blocks=1, heads=2).build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    model = Model(denoiser=net, tokenizer=tokenizer, objective=MLM(), length=16)
    bound = unmask.evaluate(model, ["the cat sat", "on a mat"], num_samples=2)
    assert (bound.name, bound.sign, bound.protocol["estimator"]) == ("perplexity", "≤", "count")
    pseudo = unmask.evaluate(model, ["the cat sat", "on a mat"], estimator="pseudo")
    assert (pseudo.name, pseudo.sign, pseudo.protocol["draws_per_row"]) == ("pseudo-perplexity", "≈", 1)
    scored = model.score("the cat", estimator="pseudo")
    assert sum(token.nats for token in scored.explain()[0]) == pytest.approx(scored.nats)
    assert isinstance(model.sampler, unmask.samplers.Gibbs)
    assert len(model.generate(1, 6, seed=0)) == 1


# --- a run, and what is refused ---


def test_a_run_goes_on_bit_for_bit(tmp_path: Path, make_config: Any) -> None:
    models = whole_and_resumed(tmp_path, make_config, MLM())
    assert models[0].objective == MLM()
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert not any("valid_pseudo_ppl" in line for line in lines)


BAD: list[tuple[Any, str]] = [
    (lambda: MLM(rate=0.0), r"in \(0, 1\]; got 0"),
    (lambda: MLM(mask=0.9, random=0.2), "together at most 1"),
    (lambda: MLM(random=-0.1), "together at most 1"),
    (lambda: MLM().check(DiT(causal=True)), "sees both sides"),
    (lambda: MLM().check(DiT(conditioning="level")), "no noise level"),
    (lambda: MLM().with_estimator("time"), "known: count, pseudo"),
    (lambda: objectives.MDLM().with_estimator("pseudo"), "unknown estimator"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_what_makes_no_sense_is_refused_in_one_sentence(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as e:
        make()
    assert "\n" not in str(e.value)
