"""A notebook: texts at hand, an objective of one's own, a run that is watched and stopped, and a look inside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor

import unmask
from tiny import PLAIN, TINY
from unmask.corpora.memory import Memory
from unmask.data.batch import Batch
from unmask.denoisers import Denoiser
from unmask.denoisers.network import Network
from unmask.objectives import Objective
from unmask.objectives.chunked_loss import LossSum, at_positions, cross_entropy, summed_nats, token_nats
from unmask.processes.absorbing import Absorbing
from unmask.samplers.confidence import Confidence
from unmask.sampling.predictor import XTheta
from unmask.server.app import make_app
from unmask.training.checkpoint.files import best_checkpoint

TEXTS = [f"the {animal} sat on the {place}" for animal in ("cat", "dog", "rat") for place in ("mat", "hut", "log")] * 4


@dataclass(frozen=True, kw_only=True)
class Bert(Objective):
    """A masked language model at one rate: what it gives is no bound of anything, and it says so."""

    kind = "pseudo"
    rate: float = 0.3

    def check(self, denoiser: Denoiser | Network) -> None:
        assert not denoiser.causal

    def process(self, network: Network) -> Absorbing:
        return Absorbing(unmask.noise.LogLinear(), num_ids=network.num_ids, mask_id=network.mask_id)

    def _masked(self, network: Network, batch: Batch) -> tuple[Tensor, Tensor, Any]:
        rate_B = torch.full_like(batch.time_B, self.rate)
        masked_BL = self.process(network).masked(rate_B, batch.key_B, batch.scored_BL)
        flat_N = masked_BL.flatten().nonzero().squeeze(1)
        z_BL = batch.x_BL.masked_fill(masked_BL, network.mask_id)
        h_ND = network.trunk_at(z_BL, rate_B, flat_N, valid_BL=batch.valid_BL)
        return masked_BL, h_ND, cross_entropy(batch.x_BL.flatten()[flat_N], network.mask_id)

    def loss(self, network: Network, batch: Batch) -> LossSum:
        masked_BL, h_ND, term = self._masked(network, batch)
        return LossSum(summed_nats(network, h_ND, term), masked_BL.sum())

    def position_nats(self, network: Network, batch: Batch) -> Tensor:
        masked_BL, h_ND, term = self._masked(network, batch)
        return at_positions(masked_BL, token_nats(network, h_ND, term) / self.rate)

    def predictor(self, network: Network) -> XTheta:
        return XTheta(network, self.process(network))

    def sampler(self) -> Confidence:
        return Confidence()


class Watch(unmask.Callback):
    """Logs how sure the averaged weights are of one word, and stops when the run has been long enough."""

    def __init__(self) -> None:
        self.sure: dict[int, float] = {}
        self.reason = ""

    def on_run(self, run: unmask.RunView) -> None:
        self.run = run

    def on_valid(self, step: int, bound: Any) -> None:
        [prediction] = self.run.averaged().predict("the cat s[MASK]t on", top=1)
        self.sure[step] = prediction.candidates[0].prob
        self.run.log("sure", self.sure[step])
        if step >= 6:
            self.run.stop("long enough")

    def on_note(self, step: int, text: str) -> None:
        self.reason = text


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    unmask.objectives.room.discard("bert")


def test_texts_objective_callback_and_a_look_inside(tmp_path: Path) -> None:
    config = unmask.RunConfig(
        out=str(tmp_path / "run"),
        steps=40,
        batch=8,
        data=unmask.config.DataConfig(train=Memory(texts=tuple(TEXTS)), length=24, held_out=0.2),
        denoiser=TINY,
        objective=Bert(),
        optim=PLAIN,
        valid_every=2,
        valid_rows=4,
        sample_every=0,
        save_every=2,
        best="sure",
        best_is="most",
    )
    watch = Watch()
    model = unmask.train(config, callbacks=[watch], device="cpu")

    # stopped early, and the model is that of the step at which the callback's metric was best
    assert sorted(watch.sure) == [0, 2, 4, 6]
    assert "long enough" in watch.reason
    best = best_checkpoint(tmp_path / "run")
    assert best is not None
    assert int(best.name.removeprefix("step-")) == max(watch.sure, key=watch.sure.__getitem__)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["sure"] for line in lines if "sure" in line} == watch.sure
    [prediction] = model.predict("the cat s[MASK]t on", top=3)
    assert prediction.candidates[0].prob == pytest.approx(max(watch.sure.values()), rel=1e-5)

    # logits, vectors and predictions say the same
    logits_LI, h_LD = model.logits("the cat s[MASK]t on"), model.hidden("the cat s[MASK]t on")
    torch.testing.assert_close(model.denoiser.head(h_LD), logits_LI)
    logits_LI[:, model.tokenizer.mask_id] = -torch.inf
    assert int(logits_LI[prediction.position].argmax()) == prediction.candidates[0].token

    # the number says what it is, and where it comes from
    bound = model.score("the cat sat", num_samples=8)
    assert bound.kind == "pseudo"
    assert "≈" in repr(bound)
    [tokens] = bound.explain()
    assert sum(token.nats for token in tokens) == pytest.approx(bound.nats, rel=1e-6)
    assert "".join(token.text for token in tokens).startswith("the cat sat")
    assert unmask.evaluate(model, TEXTS[:4], num_samples=2).sign == "≈"
    assert "Bert" in repr(model)
    assert model.generate(2, 12, seed=1) == unmask.load(tmp_path / "run", device="cpu").generate(2, 12, seed=1)


@dataclass(frozen=True, kw_only=True)
class RowsAlone(Bert):
    """One that knows a row's number and not the tokens that it comes from."""

    def row_nats(self, network: Network, batch: Batch) -> Tensor:
        return super().position_nats(network, batch).sum(dim=1)

    def position_nats(self, network: Network, batch: Batch) -> Tensor:
        return Objective.position_nats(self, network, batch)


def test_an_objective_may_know_rows_alone() -> None:
    torch.manual_seed(0)
    network = TINY.build(num_ids=258, mask_id=257)
    whole, rows = (
        unmask.Model(denoiser=network, tokenizer=unmask.load_tokenizer("bytes"), objective=objective, length=24)
        for objective in (Bert(), RowsAlone())
    )
    assert rows.score("the cat", num_samples=8).nats == whole.score("the cat", num_samples=8).nats
    with pytest.raises(unmask.UsageError, match="token"):
        rows.score("the cat", num_samples=8).explain()
    with TestClient(make_app(rows, name="rows"), base_url="http://localhost") as client:
        [score] = client.post("/score", json={"texts": ["the cat"], "num_samples": 8}).json()["texts"]
    assert score["nats"] == pytest.approx(whole.score("the cat", num_samples=8).nats, rel=1e-5)
