"""A model whose rows are anchored, served: the library's texts and scores, and no anchor in any answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from small_server import WINDOW, random_model
from starlette.testclient import TestClient

from unmask.model import Model
from unmask.server.app import make_app


@pytest.fixture(scope="module")
def anchored() -> Model:
    plain = random_model()
    parts: dict[str, Any] = {"denoiser": plain.denoiser, "tokenizer": plain.tokenizer, "objective": plain.objective}
    return Model(**parts, length=WINDOW, packing="pad", anchor="both", typical_length=12)


@pytest.fixture(scope="module")
def client(anchored: Model) -> Iterator[TestClient]:
    with TestClient(make_app(anchored, name="anchored"), base_url="http://localhost") as found:
        yield found


def test_texts_are_the_library_s(anchored: Model, client: TestClient) -> None:
    gaps = "ab[MASK:4]cd[MASK]"
    filled = client.post("/fill", json={"text": gaps, "seed": 3, "score": True}).json()["texts"][0]
    assert filled["text"] == anchored.fill(gaps, seed=3)[0]
    assert [token["text"] for token in filled["tokens"]] == list(filled["text"])
    unknown = client.post("/fill", json={"text": "ab[MASK:1..3]", "seed": 3}).json()["texts"][0]
    assert unknown["text"] == anchored.fill("ab[MASK:1..3]", seed=3)[0]
    ids = [97, None, None, 98]
    by_id = client.post("/fill", json={"tokens": ids, "seed": 3}).json()["texts"][0]
    assert by_id["text"] == anchored.fill("a[MASK:2]b", seed=3)[0]
    edits = client.post("/edit", json={"text": "the cat", "replace": "cat", "seed": 2}).json()["edits"]
    assert edits[0]["text"] == anchored.edit("the cat", "cat", seed=2)[0].text


def test_scores_are_the_library_s(anchored: Model, client: TestClient) -> None:
    for text in ("abc", "a" * 70):
        answer = client.post("/score", json={"texts": [text], "num_samples": 8, "seed": 1}).json()["texts"][0]
        bound = anchored.score(text, num_samples=8, seed=1)
        assert answer["tokens"] == bound.tokens == len(text) + 1
        assert answer["nats_per_token"] == pytest.approx(bound.nats_per_token, rel=1e-5)
    shares = client.post("/score", json={"texts": ["abc"], "num_samples": 64}).json()["texts"][0]["by_token"]
    assert [token["text"] for token in shares] == ["a", "b", "c"]
    assert all(token["nats"] > 0 for token in shares)


def test_completions_and_steps_show_no_anchor(anchored: Model, client: TestClient) -> None:
    asked = {"prompt": "ab", "max_tokens": 8, "seed": 3, "logprobs": 1}
    choice = client.post("/v1/completions", json=asked).json()["choices"][0]
    assert "endoftext" not in choice["text"]
    assert len(choice["logprobs"]["tokens"]) <= 8
    stream = client.post("/trace", json={"prompt": "ab", "length": 10, "seed": 3}).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    start = next(event["rows"][0] for event in events if "rows" in event)
    begin = client.get("/info").json()["begin"]
    assert [token["text"] for token in start[begin:]] == ["a", "b", *[None] * 6]
    last = events[-1]["texts"][0]
    assert last["text"] == anchored.generate(1, 10, "ab", seed=3)[0]
    fits = client.post("/fit", json={"length": 3, "regex": "[a-z]{3}"}).json()
    assert fits["fits"]
