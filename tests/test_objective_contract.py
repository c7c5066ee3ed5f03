"""What an objective says of itself is what evaluation and server do with it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor

from unmask import objectives
from unmask.data.batch import Batch, make_batch
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network
from unmask.errors import UsageError
from unmask.model import Model
from unmask.objectives import Objective
from unmask.objectives.draws import draws_of
from unmask.objectives.mdlm import MDLM
from unmask.rng import row_keys
from unmask.server.app import make_app

V, L = 7, 9


def network(**options: Any) -> Network:
    torch.manual_seed(0)
    net = DiT(hidden=16, blocks=2, heads=2, **options).build(num_ids=V + 1, mask_id=V).double().eval()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return net


@dataclass(frozen=True, kw_only=True)
class Doubled(MDLM):
    """Counts every nat twice."""

    def row_nats(self, denoiser: Network, batch: Batch) -> Tensor:
        return 2 * super().row_nats(denoiser, batch)


@pytest.mark.parametrize("estimator", [None, "count", "time", "T=3"])
def test_a_subclass_is_evaluated_as_itself(estimator: str | None) -> None:
    net, x_BL = network(), torch.randint(V, (3, L))
    how: dict[str, Any] = {"seed": 4, "num_samples": 8, "estimator": estimator}
    plain, doubled = MDLM().bound(net, x_BL, **how), Doubled().bound(net, x_BL, **how)
    torch.testing.assert_close(doubled.nats_B, 2 * plain.nats_B)
    assert type(Doubled().with_estimator("T=3")) is Doubled


SCORED: list[tuple[Objective, dict[str, Any]]] = [
    (objectives.MDLM(), {}),
    (objectives.MDLM(form="count"), {}),
    (objectives.MDLM(steps=3), {"conditioning": "level"}),
    (objectives.MDLM(steps=3, zero_masking=False), {}),
    (objectives.MDLM(steps=3, carry_over=False), {}),
    (objectives.D3PM(steps=3), {"conditioning": "level"}),
    (objectives.MDLM(), {"classes": 3}),
    (objectives.MLM(), {"classes": 3}),
    (objectives.AR(), {"causal": True}),
    (objectives.UDLM(), {"conditioning": "level"}),
    (objectives.UDLM(steps=3), {"classes": 3}),
    (objectives.SEDD(), {"conditioning": "level"}),
    (objectives.SEDD(state="uniform"), {}),
    (objectives.TokenRates(rates="power", k=2.0), {"conditioning": "level"}),
    (objectives.TokenRates(rates="power", k=2.0, steps=3), {}),
    (objectives.TokenRates(centre="sentence"), {"conditioning": "level"}),
    (objectives.TokenRates(centre="sentence", steps=3), {}),
    (objectives.Plaid(), {"conditioning": "level"}),
    (objectives.Plaid(steps=3), {"conditioning": "level", "classes": 3}),
    (objectives.Plaid(self_conditioning=0.25), {"conditioning": "level"}),
    (objectives.DiffusionLM(dim=8), {"conditioning": "level"}),
    (objectives.SSDLM(block=4, steps=10), {"conditioning": "level"}),
]


@pytest.mark.parametrize(("objective", "options"), SCORED, ids=lambda value: repr(value)[:60])
def test_the_queries_of_a_score_add_up_to_the_bound(objective: Objective, options: dict[str, Any]) -> None:
    """A row asked question by question: the same estimates as `bound`, and the same tokens as `position_nats`."""
    net = network(**options)
    objective.attach(net)
    objective.prepare(net, lambda: np.arange(net.num_ids) ** 3)
    objective = objective.with_estimator(objective.estimator(net))
    x_1L, scored_1L = torch.randint(V, (1, L)), torch.arange(L)[None] >= 2
    label_1 = torch.tensor([1]) if options.get("classes") else None
    key_1 = row_keys(5, torch.tensor([3]))
    batch = Batch(x_1L, None, scored_1L, key_1, key_1.double(), label_1)
    parts = objective.score_queries(net, batch, num_samples=8)
    assert parts is not None
    predictor, nats, by_position = objective.predictor(net), defaultdict(float), torch.zeros(L, dtype=torch.float64)
    for part in parts:
        nats_N = part.nats(predictor(part.query)) * part.share
        nats[part.group] += float(nats_N.sum())
        by_position.index_add_(0, part.position_N, nats_N)
    how: dict[str, Any] = {"scored_BL": scored_1L, "seed": 5, "first_row": 3, "num_samples": 8, "label_B": label_1}
    bound = objective.bound(net, x_1L, **how)
    assert [nats[g] for g in sorted(nats)] == pytest.approx(bound.draws_BS[0].tolist(), rel=1e-6)
    expected_L = torch.zeros(L, dtype=torch.float64)
    for group in draws_of(objective, key_1, 8):
        for key, time in group:
            one = Batch(x_1L, None, scored_1L, key, time, label_1)
            with torch.no_grad():
                expected_L += objective.position_nats(net, one)[0] / len(group)
    torch.testing.assert_close(by_position, expected_L, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("objective", "kind"),
    [
        (objectives.MDLM(), "upper bound"),
        (objectives.D3PM(), "upper bound"),
        (objectives.MLM(), "upper bound"),
        (objectives.MLM().with_estimator("pseudo"), "pseudo"),
        (objectives.AR(), "exact"),
    ],
)
def test_a_bound_says_what_it_is(objective: Objective, kind: str) -> None:
    net = network(causal=kind == "exact")
    assert objective.bound(net, torch.randint(V, (2, L))).kind == kind


def test_rows_add_up_over_positions() -> None:
    net = network()
    batch = make_batch(torch.randint(V, (4, L)), seed=0, step=1)
    with torch.no_grad():
        for objective in (objectives.MDLM(), objectives.D3PM(steps=4)):
            by_position = objective.position_nats(net, batch)
            torch.testing.assert_close(by_position.sum(dim=1), objective.row_nats(net, batch))
            assert by_position.shape == batch.x_BL.shape


def test_a_subclass_is_scored_as_itself_by_the_server_too() -> None:
    tokenizer = load_tokenizer("bytes")
    net = DiT(hidden=16, blocks=1, heads=2).build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    model = Model(denoiser=net, tokenizer=tokenizer, objective=Doubled(), length=16)
    nats = model.score("the cat", num_samples=8, seed=3).nats
    with TestClient(make_app(model), base_url="http://localhost") as client:
        [one] = client.post("/score", json={"texts": ["the cat"], "num_samples": 8, "seed": 3}).json()["texts"]
    assert one["nats"] == pytest.approx(nats, rel=1e-4)
    with pytest.raises(UsageError, match="token"):
        model.score("the cat", num_samples=8).explain()


def test_what_an_objective_lacks_is_said_before_the_first_step() -> None:
    class Hollow(objectives.Objective):
        check = process = loss = predictor = sampler = lambda *given: None  # type: ignore[assignment]

    class Mute(Hollow):
        def row_nats(self, network: Network, batch: Batch) -> Tensor:
            return batch.time_B

    for objective, missing in ((Hollow(), "position_nats"), (Mute(), "predictor")):
        with pytest.raises(UsageError, match=missing):
            objective.check_whole(network())
