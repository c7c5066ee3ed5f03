"""Looking into a model: logits, vectors, masks; and the bound, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unmask
from unmask.errors import UsageError
from unmask.evaluation.inspection import Candidate
from unmask.model import Model


def test_logits_and_hidden_are_the_networks(model: Model, ar_model: Model) -> None:
    for one in (model, ar_model):
        ids = torch.tensor([one.tokenizer.encode("the cat")])
        with torch.no_grad():
            h_1LD = one.denoiser.trunk(ids, torch.zeros(1))
            logits_1LI = one.denoiser.head(h_1LD)
        assert torch.equal(one.hidden("the cat"), h_1LD[0])
        assert torch.allclose(one.logits("the cat"), logits_1LI[0])
        assert torch.equal(one.logits("the cat"), one.logits(ids[0].tolist()))  # no frame: the same ids
        assert torch.allclose(one.logits(ids.repeat(2, 1))[1], one.logits(ids)[0], atol=1e-5)
        assert not one.logits("the cat").requires_grad
    assert len(model.logits("the [MASK:3] sat")) == len("the ") + 3 + len(" sat")


def test_a_frame_is_seen_and_not_answered(fresh_model: Model) -> None:
    plain = fresh_model.logits("the cat")
    fresh_model.packing, fresh_model.anchor = "pad", "both"
    framed = fresh_model.logits("the cat")
    assert framed.shape == plain.shape
    assert not torch.allclose(framed, plain)
    ids = [*fresh_model.begin, *fresh_model.tokenizer.encode("the cat"), *fresh_model.end]
    assert torch.equal(framed, fresh_model.logits(ids)[1:-1])


@pytest.mark.parametrize("wrong", ["a" * 33, [], [300], [-1], torch.zeros(2, 2), torch.zeros(1, 1, 1).long()], ids=str)
def test_what_cannot_be_looked_at_is_refused(model: Model, wrong: Any) -> None:
    with pytest.raises(UsageError):
        model.logits(wrong)
    with pytest.raises(UsageError, match="level"):
        model.logits("a", level=2.0)


def test_predict_gives_the_probabilities_of_every_mask(model: Model) -> None:
    text = "the [MASK] sat on [MASK:2]"
    predictions = model.predict(text, top=258)
    assert [p.position for p in predictions] == [4, 13, 14]
    logits_LI = model.logits(text)
    logits_LI[:, model.tokenizer.mask_id] = -torch.inf
    for prediction in predictions:
        probs = [c.prob for c in prediction.candidates]
        assert sum(probs) == pytest.approx(1, abs=1e-5)
        assert probs == sorted(probs, reverse=True)
        by_token = torch.tensor([c.prob for c in sorted(prediction.candidates, key=lambda c: c.token)])
        assert torch.allclose(by_token, logits_LI[prediction.position].softmax(dim=0), atol=1e-6)
    best = model.predict(text, top=2)[0]
    assert best.candidates == predictions[0].candidates[:2]
    assert isinstance(best.candidates[0], Candidate)
    assert f"{best.candidates[0].prob:.1%}" in repr(best)


def test_predict_refuses_what_has_no_masks(model: Model, ar_model: Model) -> None:
    with pytest.raises(UsageError, match="mask"):
        model.predict("no gap")
    with pytest.raises(UsageError, match="left to right"):
        ar_model.predict("a [MASK]")
    with pytest.raises(UsageError, match="top"):
        model.predict("a [MASK]", top=0)


@pytest.mark.parametrize(
    "how",
    [
        {"num_samples": 16},
        {"num_samples": 3, "estimator": "time"},
        {"num_samples": 8, "estimator": "T=5", "seed": 7},
        {"num_samples": 4, "prompts": "the "},
    ],
    ids=str,
)
def test_a_bound_explains_its_draws(model: Model, how: dict[str, Any]) -> None:
    texts = ["the cat sat on the mat and on the red hut and on", "a", "no rat"]  # the first takes two windows
    bound = model.score(texts, **how)
    explained = bound.explain()
    assert [len(tokens) for tokens in explained] == bound.tokens_B.tolist()
    for nats, tokens, text in zip(bound.nats_B.tolist(), explained, texts, strict=True):
        assert sum(token.nats for token in tokens) == pytest.approx(nats, rel=1e-6)
        assert "".join(token.text for token in tokens[:-1]) == text
        assert all(token.nats >= 0 for token in tokens)


def test_a_likelihood_is_explained_by_its_conditionals(ar_model: Model) -> None:
    bound = ar_model.score(["the cat", "a"])
    for text, tokens in zip(["the cat", "a"], bound.explain(), strict=True):
        ids = [*ar_model.tokenizer.encode(text), ar_model.tokenizer.eot_id]
        logits_LI = ar_model.logits(ids)
        logits_LI[:, ar_model.tokenizer.mask_id] = -torch.inf
        nats = -logits_LI.log_softmax(dim=1)[range(len(ids)), ids]
        assert [token.nats for token in tokens] == pytest.approx(nats.tolist(), rel=1e-4)
    assert "=" in repr(bound)
    with pytest.raises(UsageError, match="texts"):
        unmask.Bound(bound.draws_BS, bound.tokens_B).explain()


def test_reprs_tell_what_a_thing_is_in_a_line(model: Model) -> None:
    bound = model.score("the cat")
    canvas = model.canvas([[model.tokenizer.mask_id, 97, 98]], may_end=True)
    for thing, nouns in (
        (model, ["MDLM", "parameters", "Bytes", "length 32", "cpu"]),
        (bound, ["≤", f"{bound.nats_per_token:.4f}", "perplexity", "8 tokens"]),
        (canvas, ["1 x 3", "1 open"]),
        (unmask.corpora.Memory(texts=("a", "b")), ["2 texts"]),
    ):
        assert len(repr(thing)) < 200
        assert "\n" not in repr(thing)
        for noun in nouns:
            assert noun in repr(thing)
