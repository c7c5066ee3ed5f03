"""D3PM's auxiliary loss: training has lambda times the cross-entropy more, the bound has nothing of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from unmask import objectives
from unmask.data.batch import Batch, make_batch
from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network
from unmask.errors import UsageError
from unmask.processes.absorbing import Absorbing

V, L = 5, 7
CASES: list[Any] = [
    objectives.D3PM(steps=4),
    objectives.D3PM(steps=4, carry_over=True),
    objectives.D3PM(steps=4, zero_masking=True, carry_over=True),
    objectives.D3PM(steps=4, zero_masking=True),
    objectives.UDLM(steps=4),
]
each_case = pytest.mark.parametrize("objective", CASES, ids=repr)


def network() -> Network:
    torch.manual_seed(0)
    net = DiT(hidden=16, blocks=1, heads=2, conditioning="level", cond_dim=8).build(num_ids=V + 1, mask_id=V)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return net.double()


def some_rows() -> Batch:
    x_BL = torch.randint(0, V, (6, L), generator=torch.Generator().manual_seed(1))
    return make_batch(x_BL, torch.tensor([7, 4, 6, 7, 5, 3]), torch.tensor([0, 1, 2, 0, 0, 1]), seed=3, step=2)


def entropy(objective: Any, net: Network, batch: Batch) -> Tensor:
    """-log x_theta(z_t)[x] summed over what the noise reaches, written out from the whole network's logits."""
    t_B = torch.ceil(batch.time_B * objective.steps) / objective.steps
    process = objective.process(net)
    z_BL = process.corrupt(batch.x_BL, t_B, batch.key_B, batch.scored_BL)
    h_BLD = net.trunk(z_BL, process.level(t_B), valid_BL=batch.valid_BL)
    logits = net.head(h_BLD.flatten(0, 1)).view(*z_BL.shape, V + 1)
    if getattr(objective, "zero_masking", True):
        logits = logits[..., :V]
    nats_BL = -logits.log_softmax(-1).gather(2, batch.x_BL[..., None]).squeeze(2)
    where_BL = z_BL == V if isinstance(process, Absorbing) else batch.scored_BL
    return nats_BL[where_BL].sum()


@each_case
def test_the_loss_and_its_gradient_change_by_just_that(objective: Any) -> None:
    net, batch = network(), some_rows()
    given = list(net.parameters())

    def both(nats: Tensor) -> tuple[Tensor, Tensor]:
        grads = torch.autograd.grad(nats, given, allow_unused=True)
        return nats.detach(), torch.cat([torch.zeros(1) if g is None else g.flatten() for g in grads])

    plain, plain_grad = both(objective.loss(net, batch).nats)
    more, more_grad = both(replace(objective, auxiliary=0.3).loss(net, batch).nats)
    extra, extra_grad = both(entropy(objective, net, batch))
    assert float(extra) > 1
    torch.testing.assert_close(more - plain, 0.3 * extra, rtol=1e-9, atol=0)
    torch.testing.assert_close(more_grad - plain_grad, 0.3 * extra_grad, rtol=1e-7, atol=1e-9)


@each_case
def test_the_bound_has_nothing_of_it(objective: Any) -> None:
    net, batch = network().eval(), some_rows()
    aux = replace(objective, auxiliary=2.0)
    with torch.no_grad():
        assert aux.row_nats(net, batch).equal(objective.row_nats(net, batch))
        assert aux.position_nats(net, batch).equal(objective.position_nats(net, batch))
    how: dict[str, Any] = {"seed": 1, "num_samples": 4}
    assert aux.bound(net, batch.x_BL, **how).draws_BS.equal(objective.bound(net, batch.x_BL, **how).draws_BS)


def test_a_bound_in_continuous_time_of_a_network_trained_with_it() -> None:
    net, x_BL = network().eval(), some_rows().x_BL
    how: dict[str, Any] = {"seed": 1, "num_samples": 2, "estimator": "time"}
    aux = objectives.UDLM(steps=4, auxiliary=1.0).bound(net, x_BL, **how)
    assert aux.draws_BS.equal(objectives.UDLM(steps=4).bound(net, x_BL, **how).draws_BS)


BAD: list[tuple[type[Any], dict[str, Any], str]] = [
    (objectives.D3PM, {"auxiliary": -0.1}, "give 0 .off. or more, got -0.1"),
    (objectives.UDLM, {"auxiliary": -0.1, "steps": 4}, "give 0 .off. or more"),
    (objectives.D3PM, {"auxiliary": float("nan")}, "give 0 .off. or more"),
    (objectives.D3PM, {"auxiliary": 0.1, "steps": 0}, "steps must be at least 1"),
    (objectives.D3PM, {"auxiliary": 0.1, "steps": None}, "T-step"),
    (objectives.UDLM, {"auxiliary": 0.1, "steps": 0}, "steps must be at least 1"),
    (objectives.UDLM, {"auxiliary": 0.1}, "of T steps"),
]


@pytest.mark.parametrize(("cls", "options", "message"), BAD)
def test_what_makes_no_sense_is_refused_in_one_sentence(cls: type[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as e:
        cls(**options)
    assert "\n" not in str(e.value)
