"""MDLM that begins with the next token: its extra loss is autoregression's, and what is measured stays the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from resuming import whole_and_resumed
from unmask.data.batch import Batch, make_batch
from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.denoisers.network import Attend, as_denoiser
from unmask.errors import UsageError
from unmask.objectives.mdlm import MDLM
from unmask.objectives.mdlm_warm import MDLMWarm
from unmask.training.loop import train

V, B, L = 5, 16, 6


def network(**options: Any) -> DiTNetwork:
    torch.manual_seed(0)
    net = DiT(hidden=16, blocks=2, heads=2, cond_dim=8, **options).build(num_ids=V + 1, mask_id=V)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return net.double()


def rows(seed: int = 0, num: int = B) -> Tensor:
    return torch.randint(0, V, (num, L), generator=torch.Generator().manual_seed(seed))


def next_token_nats(net: DiTNetwork, batch: Batch) -> Tensor:
    """Of rows that all look back."""
    return MDLMWarm(share=1.0, until=1.0).loss(net, replace(batch, done=0.0)).nats


@pytest.mark.parametrize("lengths", [None, [6, 2, 1, 4]], ids=["whole", "padded"])
@pytest.mark.parametrize("options", [{}, {"conditioning": "level"}, {"conditioning": "constant"}], ids=str)
def test_the_next_token_is_told_by_what_stands_before_it(options: dict[str, Any], lengths: list[int] | None) -> None:
    """Prefix by prefix, each read alone: the same sum, so nothing later is ever seen."""
    net, x_BL = network(**options).eval(), rows(num=4)
    batch = make_batch(x_BL, None if lengths is None else torch.tensor(lengths), seed=0, step=0)
    want = 0.0
    for b, row in enumerate(x_BL):
        for end in range(1, L if lengths is None else lengths[b]):
            # a prefix's last position sees all of it and nothing else; earlier ones must look back, too
            seen = Attend(mask=torch.ones(end, end, dtype=torch.bool).tril())
            h = net.trunk(row[None, :end], torch.zeros(1), attend=seen)[0, -1]
            want -= float(torch.log_softmax(net.head(h)[:V], dim=-1)[row[end]].detach())
    assert float(next_token_nats(net, batch).detach()) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("told", [Attend(causal=True), Attend(mask=torch.ones(L, L, dtype=torch.bool), causal=True)])
def test_nobody_who_looks_back_sees_what_comes(told: Attend) -> None:
    net, x_BL = network().eval(), rows(num=1)
    other = x_BL.clone()
    other[0, 4] = (other[0, 4] + 1) % V
    with torch.no_grad():
        a, b = (net.trunk(z, attend=told)[0] for z in (x_BL, other))
        assert a[:4].equal(b[:4])
        assert not a[4:].isclose(b[4:]).all(dim=-1).any()
        both = [net.trunk(z)[0] for z in (x_BL, other)]
    assert not both[0][:4].isclose(both[1][:4]).all(dim=-1).any()  # without it everybody does


def test_who_looks_back_and_when() -> None:
    """The share that is asked for, of the global batch however it is cut, evenly among the times."""
    objective = MDLMWarm(share=0.75, flat=0.1, until=0.5)
    for done, wanted in ((0.0, 0.75), (0.1, 0.75), (0.3, 0.375), (0.5, 0.0), (1.0, 0.0)):
        whole = make_batch(rows(), seed=3, step=7, done=done)
        back_B = objective.looks_back_B(whole)
        assert int(back_B.sum()) == wanted * B
        parts = [
            make_batch(rows()[lo : lo + 4], seed=3, step=7, first_row=lo, num_rows=B, done=done) for lo in (0, 4, 8, 12)
        ]
        assert torch.cat([objective.looks_back_B(part) for part in parts]).equal(back_B)
        in_time = back_B[whole.time_B.argsort()].view(2, 8).sum(dim=1)
        assert in_time[0] == in_time[1]
    assert whole.place_B is not None
    assert whole.place_B.sort().values.equal(torch.arange(B))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"value_residual": True}, {"conditioning": "constant"}], ids=str)
def test_the_loss_is_of_both_kinds_of_rows(options: dict[str, Any], padded: bool) -> None:
    """In one pass as in two."""
    net, objective = network(**options), MDLMWarm(share=0.5, form="count")
    lengths = torch.randint(1, L + 1, (B,), generator=torch.Generator().manual_seed(1)) if padded else None
    batch = make_batch(rows(), lengths, seed=0, step=0, done=0.0)
    back_B = objective.looks_back_B(batch)
    masked = MDLM(form="count").loss(net, batch.where(~back_B)).nats
    total = objective.loss(net, batch)
    both = masked + next_token_nats(net, batch.where(back_B))
    assert total.nats.item() == pytest.approx(both.item(), rel=1e-12)
    assert int(total.tokens) == (B * L if lengths is None else int(lengths.sum()))
    late = objective.loss(net, replace(batch, done=0.7))
    assert late.nats.item() == pytest.approx(MDLM(form="count").loss(net, batch).nats.item(), rel=1e-12)


def test_what_is_measured_is_the_bound() -> None:
    net, x_BL = network().eval(), rows()
    for form in ("count", "time"):
        own, plain = (
            kind(form=form).bound(net, x_BL, num_samples=4).nats_per_token  # type: ignore[arg-type]
            for kind in (MDLMWarm, MDLM)
        )
        assert own == plain


def test_what_it_refuses() -> None:
    for wrong in ({"share": 1.5}, {"flat": 0.5, "until": 0.4}, {"until": 2.0}):
        with pytest.raises(UsageError, match="share must lie"):
            MDLMWarm(**wrong)  # type: ignore[arg-type]
    coin = as_denoiser(lambda z, level: torch.zeros(*z.shape, V + 1), vocab_size=V, mask_id=V)
    with pytest.raises(UsageError, match="look back"):
        MDLMWarm().check_whole(coin)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="until_epoch must be above 0"):
            MDLMWarm(until_epoch=wrong)
    with pytest.raises(UsageError, match="causal"):
        coin.trunk(rows(), attend=Attend(causal=True))


def test_in_a_run_the_share_falls_with_the_epochs(tmp_path: Any, make_config: Any, monkeypatch: Any) -> None:
    """As many epochs as half of the run reads: the same run as with until = 0.5, to the last bit."""
    seen: list[float] = []
    loss = MDLMWarm.loss
    monkeypatch.setattr(MDLMWarm, "loss", lambda self, net, batch: seen.append(batch.epoch) or loss(self, net, batch))
    objective = MDLMWarm(until=0.5, form="count")
    plain = train(make_config(out=tmp_path / "plain", objective=objective), device="cpu")
    assert seen[0] == 0.0
    assert seen[1] > 0
    assert seen == pytest.approx([step * seen[1] for step in range(12)])
    objective = replace(objective, until=1.0, until_epoch=6 * seen[1])
    by_epochs = train(make_config(out=tmp_path / "epochs", objective=objective), device="cpu")
    other = train(make_config(out=tmp_path / "whole", objective=replace(objective, until_epoch=None)), device="cpu")
    weights = [torch.cat([p.flatten() for p in model.denoiser.parameters()]) for model in (plain, by_epochs, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_a_run_goes_on_bit_for_bit_and_its_model_is_one_of_masks(tmp_path: Any, make_config: Any) -> None:
    models = whole_and_resumed(tmp_path, make_config, MDLMWarm(share=0.5, until=0.6, form="count"))
    assert isinstance(models[0].objective, MDLMWarm)
    text = models[0].generate(length=8, seed=0)
    assert text == models[1].generate(length=8, seed=0)


@pytest.mark.parametrize("form", ["time", "count"])
def test_a_power_of_the_weight_is_learned_by_and_never_measured_by(form: Any) -> None:
    net, batch = network().eval(), make_batch(rows(), seed=0, step=0)
    plain, half = MDLM(form=form), MDLMWarm(form=form, share=0.0, power=0.5)
    noised = plain.noised(batch, plain.process(net))
    logits = net.head(net.trunk(noised.z_BL, noised.level_B))
    each_BL = -torch.log_softmax(logits[..., :V], dim=-1).gather(-1, batch.x_BL[..., None]).squeeze(-1)
    want = (noised.weight_B[:, None].sqrt() * each_BL * noised.masked_BL).sum()
    assert float(half.loss(net, batch).nats.detach()) == pytest.approx(float(want.detach()), rel=1e-6)
    with torch.no_grad():
        assert half.row_nats(net, batch).equal(plain.row_nats(net, batch))
    for wrong, word in (({"power": 1.5}, "power"), ({"steps": 4, "zero_masking": False}, "SUBS")):
        with pytest.raises(UsageError, match=word):
            MDLMWarm(**wrong)
