"""MDLM whose attention opens: what is seen when, that the loss is MDLM's under it, and that what is measured stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from resuming import whole_and_resumed
from unmask.data.batch import make_batch
from unmask.denoisers.llama import Llama
from unmask.denoisers.network import Attend, Network
from unmask.errors import UsageError
from unmask.objectives.mdlm import MDLM
from unmask.objectives.mdlm_opening import MDLMOpening
from unmask.objectives.mdlm_warm import MDLMWarm

V, B, L = 5, 16, 6
OBJECTIVE = MDLMOpening(opened=0.5, form="count")
PADDED = torch.randint(1, L + 1, (B,), generator=torch.Generator().manual_seed(1))


def network(**options: Any) -> Network:
    torch.manual_seed(0)
    net = Llama(hidden=16, blocks=2, heads=2, inner=24, **options).build(num_ids=V + 1, mask_id=V)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return net.double()


def rows(num: int = B) -> Tensor:
    return torch.randint(0, V, (num, L), generator=torch.Generator().manual_seed(0))


def test_a_later_token_is_seen_with_the_probability_that_is_due() -> None:
    batch = make_batch(torch.zeros(4000, L, dtype=torch.long), seed=0, step=0, done=0.15)
    mask = OBJECTIVE.attend(batch).mask
    assert mask is not None
    before = torch.ones(L, L, dtype=torch.bool).tril()
    assert mask[:, before].all()
    share = mask.double().mean(dim=0)
    assert ((share - 0.3).abs()[~before] < 4 * (0.3 * 0.7 / 4000) ** 0.5).all()
    both = (mask[:, 0, 2] & mask[:, 0, 4]).double().mean()  # tokens are drawn apart from each other
    assert abs(float(both) - 0.09) < 4 * (0.09 * 0.91 / 4000) ** 0.5
    parts = [OBJECTIVE.attend(batch.rows(lo, lo + 1000)).mask for lo in range(0, 4000, 1000)]
    assert torch.cat([part for part in parts if part is not None]).equal(mask)


@pytest.mark.parametrize("lengths", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_loss_is_mdlms_with_less_to_see(share: float, shifted: bool, lengths: Tensor | None) -> None:
    """Row by row, each with its own mask; and the rows that are read for the next token beside them."""
    net, objective = network(shifted=shifted), replace(OBJECTIVE, share=share, until=1.0)
    for done in (0.0, 0.2, 0.7):
        batch = make_batch(rows(), lengths, seed=0, step=3, done=done)
        back_B = objective.looks_back_B(batch)
        want = 0.0
        if back_B.any():
            all_back = MDLMWarm(share=1.0, until=1.0)
            want += float(all_back.loss(net, replace(batch.where(back_B), done=0.0)).nats.detach())
        rest = batch.where(~back_B)
        noised = objective.noised(rest, objective.process(net))
        seen = torch.ones(len(rest.x_BL), L, L, dtype=torch.bool)
        if done < 0.5:
            seen = objective._seen(rest, done / 0.5)
        for b in range(len(rest.x_BL)):
            n = L if rest.valid_BL is None else int(rest.valid_BL[b].sum())
            at = noised.masked_BL[b, :n].nonzero().squeeze(1)
            h = net.trunk(noised.z_BL[b : b + 1, :n], attend=Attend(mask=seen[b, :n, :n]))[0, at]
            log_p = torch.log_softmax(net.head(h)[:, :V], dim=-1).gather(1, rest.x_BL[b, at, None])
            want -= float(noised.weight_B[b]) * float(log_p.detach().sum())
        assert float(objective.loss(net, batch).nats.detach()) == pytest.approx(want, rel=1e-6), done


def test_what_is_measured_is_the_bound_and_after_the_opening_it_is_mdlm() -> None:
    net, x_BL = network().eval(), rows()
    for form in ("count", "time"):
        own, plain = (
            kind.bound(net, x_BL, num_samples=4).nats_per_token
            for kind in (replace(OBJECTIVE, form=form), MDLM(form=form))  # type: ignore[arg-type]
        )
        assert own == plain
    late = make_batch(x_BL, seed=0, step=0, done=0.5)
    assert OBJECTIVE.loss(net, late).nats.equal(MDLM(form="count").loss(net, late).nats)


def test_weights_that_looked_back_begin_where_they_were() -> None:
    """At the first step nothing later is seen: a shifted network's vectors are those of its causal twin."""
    shifted, causal = network(shifted=True), network(causal=True)
    batch = make_batch(rows(), seed=0, step=0, done=0.0)
    told = OBJECTIVE.attend(batch)
    with torch.no_grad():
        torch.testing.assert_close(shifted.trunk(batch.x_BL, attend=told), causal.trunk(batch.x_BL))


def test_what_it_refuses() -> None:
    for wrong in ({"opened": 1.5}, {"opened": -0.1}):
        with pytest.raises(UsageError, match="opened"):
            MDLMOpening(**wrong)
    with pytest.raises(UsageError, match="sees both sides"):
        MDLMOpening().check(network(causal=True))


def test_a_run_goes_on_bit_for_bit(tmp_path: Any, make_config: Any) -> None:
    models = whole_and_resumed(tmp_path, make_config, MDLMOpening(opened=0.9, share=0.5, form="count"))
    assert isinstance(models[0].objective, MDLMOpening)
    assert models[0].generate(length=8, seed=0) == models[1].generate(length=8, seed=0)
