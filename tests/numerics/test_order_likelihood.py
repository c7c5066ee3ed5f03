"""Likelihoods along an order: laws that add up to 1, mixtures that never fall below the truth."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from chains import World, random_order_law
from torch import Tensor

import unmask
from unmask import samplers
from unmask.data.batch import make_batch
from unmask.errors import UsageError
from unmask.evaluation.orders import check_order, mixture_nats, order_nats
from unmask.metrics.order_likelihood import OrderLikelihood
from unmask.model import Model
from unmask.samplers import Sampler
from unmask.sampling.canvas import Canvas

FIXED = [
    samplers.Confidence(),
    samplers.Margin(),
    samplers.Entropy(tokens=2),
    samplers.Threshold(threshold=0.6),
    samplers.LeftToRight(),
    samplers.LeftToRight(tokens=2),
    samplers.Block(size=2, inner=samplers.Confidence()),
]


def nats_of_all_texts(world: World, sampler: Sampler, seed: int = 0) -> Tensor:
    predictor = unmask.objectives.MDLM().predictor(world.denoiser())
    x_BL = world.texts
    canvas = Canvas.blank(num=len(x_BL), length=world.L, mask_id=world.mask_id, seed=seed)
    return order_nats(predictor, canvas, sampler, x_BL)


@pytest.mark.parametrize("level", [False, True], ids=["ignores level", "sees level"])
@pytest.mark.parametrize("sampler", FIXED, ids=repr)
def test_a_fixed_order_is_a_law(sampler: Sampler, level: bool) -> None:
    assert sampler.fixed_order
    world = World.random(V=3, L=4, seed=3, level=level)
    assert float(nats_of_all_texts(world, sampler).neg().exp().sum()) == pytest.approx(1, abs=1e-12)


def test_the_law_is_that_of_the_sampler() -> None:
    """By hand: the surest position first, then the surer of the two that are left."""
    world = World.random(V=2, L=3, seed=5)
    truth = []
    for x in world.texts:
        z, nats = torch.full((1, 3), world.mask_id), 0.0
        while bool((masked_L := z[0] == world.mask_id).any()):
            p_LI = world.x_theta(z, float(masked_L.float().mean()))[0]
            i = int(p_LI.amax(dim=1).masked_fill(~masked_L, -1).argmax())
            nats -= math.log(float(p_LI[i, x[i]]))
            z[0, i] = x[i]
        truth.append(nats)
    assert nats_of_all_texts(world, samplers.Confidence()).tolist() == pytest.approx(truth, rel=1e-12)


def all_orders(world: World) -> Tensor:
    """[orders, texts] p of each text in each order, one token a call."""
    made = []
    for order in itertools.permutations(range(world.L)):
        z_BL, p_B = torch.full_like(world.texts, world.mask_id), torch.ones(len(world.texts), dtype=torch.float64)
        for done, i in enumerate(order):
            p_BI = world.x_theta(z_BL, 1 - done / world.L)[:, i]
            p_B = p_B * p_BI.gather(1, world.texts[:, i : i + 1]).squeeze(1)
            z_BL[:, i] = world.texts[:, i]
        made.append(p_B)
    return torch.stack(made)


def test_a_mixture_of_orders_lies_between_the_bound_and_the_truth() -> None:
    """Enumerated: E[-log of the mean over K orders] falls from the count form to -log p and never below it."""
    world = World.random(V=2, L=3, seed=7)
    p_OB = all_orders(world)
    exact_B = -p_OB.mean(dim=0).log()
    assert torch.allclose(exact_B, -random_order_law(world)[world.index(world.texts)].log(), atol=1e-12)
    one_B = -p_OB.log().mean(dim=0)
    assert one_B.tolist() == pytest.approx([world.count_bound(x) for x in world.texts], rel=1e-10)
    pairs = torch.tensor(list(itertools.product(range(len(p_OB)), repeat=2)))
    two_B = -p_OB[pairs].mean(dim=1).log().mean(dim=0)
    assert bool((exact_B < two_B).all() and (two_B < one_B).all())

    x_BL = world.texts[[2]].expand(6000, -1)
    predictor = unmask.objectives.MDLM().predictor(world.denoiser())
    batch = make_batch(x_BL, seed=3, step=0)
    for sampler, orders, truth_B in (
        (samplers.Ancestral(steps=None), 1, one_B),
        (samplers.Ancestral(steps=None), 2, two_B),
        (samplers.Confidence(random=1.0), 2, two_B),
    ):
        nats_B = mixture_nats(predictor, batch, sampler, mask_id=world.mask_id, orders=orders)
        error = float(nats_B.std()) / math.sqrt(len(nats_B))
        assert abs(float(nats_B.mean()) - float(truth_B[2])) < 4.5 * error
        assert error < 0.01 * float(truth_B[2])
    other_B = mixture_nats(predictor, batch, samplers.Ancestral(steps=None), mask_id=world.mask_id, draw=1)
    assert not other_B.equal(mixture_nats(predictor, batch, samplers.Ancestral(steps=None), mask_id=world.mask_id))


def test_left_to_right_of_an_autoregressive_model_is_its_likelihood(ar_model: Model) -> None:
    texts = ["the cat sat on the mat", "a dog ran"]
    by_order = unmask.evaluate(ar_model, texts, metric=OrderLikelihood(sampler=samplers.LeftToRight()))
    plain = unmask.evaluate(ar_model, texts)
    assert by_order.kind == plain.kind == "exact"
    assert by_order.n == plain.n
    assert by_order.value == pytest.approx(plain.value, rel=1e-5)
    assert by_order.bound is not None
    assert plain.bound is not None
    assert by_order.bound.bits_per_byte == pytest.approx(plain.bound.bits_per_byte, rel=1e-5)


def test_the_metric_pads_and_says_what_it_is(model: Model) -> None:
    texts = ["the cat sat on the mat", "a dog ran"]
    both = unmask.evaluate(model, texts, packing="pad", metric=OrderLikelihood())
    alone = [unmask.evaluate(model, [text], packing="pad", metric=OrderLikelihood()) for text in texts]
    assert both.bound is not None
    for row, one in zip(both.bound.nats_B.tolist(), alone, strict=True):
        assert one.bound is not None
        assert row == pytest.approx(one.bound.nats, rel=1e-4)
    assert (both.kind, both.protocol["orders"]) == ("exact", "fixed")
    drawn = unmask.evaluate(model, texts, metric=OrderLikelihood(sampler=samplers.Ancestral(), orders=3, num_samples=2))
    assert (drawn.kind, drawn.protocol["orders"]) == ("upper bound", 3)
    assert drawn.bound is not None
    assert math.isfinite(drawn.bound.draws_error)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ({"orders": 2}, "one order"),
        ({"orders": 0}, "orders must be at least 1"),
        ({"sampler": samplers.Confidence(top_p=0.9)}, "own law"),
        ({"sampler": samplers.Confidence(temperature=0.5)}, "own law"),
        ({"sampler": samplers.ReMDM()}, "no likelihood"),
        ({"sampler": samplers.Gibbs()}, "no likelihood"),
        ({"sampler": samplers.SemiAR(window=8)}, "window"),
    ],
    ids=repr,
)
def test_what_has_no_likelihood_is_refused(model: Model, metric: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        unmask.evaluate(model, ["a cat"], metric=OrderLikelihood(**metric))  # type: ignore[arg-type]


def test_a_network_that_predicts_the_mask_has_no_such_likelihood() -> None:
    predictor = unmask.objectives.D3PM(steps=3).predictor(World.random().denoiser())
    with pytest.raises(UsageError, match="clean tokens"):
        check_order(samplers.Confidence(), predictor)
