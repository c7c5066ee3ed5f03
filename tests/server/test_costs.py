"""What a request may make slow or large: it is counted before it is done, done once, and nothing of it stays."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from test_next_tokens import causal_model

import unmask.server.app as app_module
import unmask.server.errors as errors_module
import unmask.server.jobs as jobs_module
import unmask.server.rows as rows_module
from unmask.data.tokenizers import Tokenizer
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.model import Model
from unmask.objectives.d3pm import D3PM
from unmask.server.app import make_app
from unmask.server.errors import HTTPError, from_validation
from unmask.server.jobs import Jobs
from unmask.server.limits import Limits
from unmask.server.next_tokens import RowCache
from unmask.server.routes_openai import _Choice
from unmask.server.served_model import Served


@pytest.fixture
def encoded(small: Model, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is tokenized."""
    found: list[str] = []
    kind = type(small.tokenizer)
    encode: Callable[[Tokenizer, str], list[int]] = kind.encode

    def noted(self: Tokenizer, text: str) -> list[int]:
        found.append(text)
        return encode(self, text)

    monkeypatch.setattr(kind, "encode", noted)
    return found


def refused(client: TestClient, route: str, **body: Any) -> str:
    answer = client.post(route, json=body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("route", ["/fill", "/trace", "/fit"])
def test_a_long_text_is_refused_before_it_is_read_in_every_length(
    client: TestClient, encoded: list[str], route: str
) -> None:
    more: dict[str, Any] = {"regex": "[a-z]+"} if route == "/fit" else {"n": 8}
    assert "may have 128 tokens" in refused(client, route, text="x" * 200 + "[MASK:1..90]", **more)
    assert len(encoded) < 5


JSON = {"content-type": "application/json"}
LONG: dict[str, tuple[str, Any]] = {
    "lists": ("/fill", {"options": {"a": [[]] * 200_000}}),
    "objects": ("/fill", {"json_schema": {"enum": [{}] * 200_000}}),
    "fields": ("/fill", {f"k{i}": 1 for i in range(60_000)}),
    "tokens": ("/fill", {"tokens": [-1] * 200_000}),
    "texts": ("/score", {"texts": [""] * 200_000}),
    "texts without an end": ("/score", b'""' * 200_000 + b"," * 70_000),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """To parse it, and to say what is wrong with each part, would take the event loop more than a second."""
    parsed: list[str] = []
    monkeypatch.setattr(errors_module.json, "loads", lambda text, **how: parsed.append(text))
    route, body = LONG[kind]
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(route, content=data, headers={"content-type": "application/json"})
    monkeypatch.undo()
    assert parsed == []
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body has too many values, lists or fields: send fewer"


def test_signs_inside_a_text_are_no_parts(client: TestClient) -> None:
    for text in ("[{:," * 40_000, '\\"[{:,' * 25_000, '",' * 40_000):
        assert "may have 128 tokens" in refused(client, "/score", texts=[text])
    assert "may have 128 tokens" in refused(client, "/fill", tokens=[None] * 30_000)


def test_numbers_of_many_digits_are_refused() -> None:
    """To turn them into numbers, and these into text, takes time that grows with the square of their digits."""
    assert errors_module.parse_json(b"[%d, 0.%d]" % (10**400, 10**400)) is not None
    for spelled in ("9" * 501, "-" + "9" * 501, "0." + "1" * 501, "1" * 501 + "e-501"):
        with pytest.raises(HTTPError, match="not valid JSON"):
            errors_module.parse_json(spelled.encode())


FAULTY: list[tuple[str, dict[str, Any]]] = [
    ("/fill", {"tokens": [-1] * 30_000}),
    ("/fill", {"tokens": ["a"] * 30_000}),
    ("/fill", {"text": "[MASK]", "choices": [1] * 30_000}),
    ("/fill", {"text": "[MASK]", "choices": [""] * 100}),
    ("/fill", {"text": "[MASK]", "options": {f"k{i}": [] for i in range(1500)}}),
    ("/fill", {"text": "[MASK]", "constraints": [1] * 30_000}),
    ("/edit", {"text": "a", "replace": "a", "with_length": [0] * 30_000}),
    ("/tokenize", {"text": "a", "spans": [[-1] * 30_000]}),
    ("/tokenize", {"text": "a", "spans": [[-1]] * 1000}),
    ("/score", {"texts": [1] * 30_000}),
    ("/v1/completions", {"prompt": [-1] * 30_000}),
    ("/v1/completions", {"prompt": [[-1] * 1000] * 8}),
    ("/v1/completions", {"prompt": [None] * 30_000}),
    ("/v1/completions", {"stop": [1] * 30_000}),
    ("/v1/chat/completions", {"messages": [1] * 1000}),
]


@pytest.mark.parametrize(("route", "body"), FAULTY)
def test_of_many_faults_few_are_listed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any]
) -> None:
    found: list[int] = []

    def noted(errors: Any, fields: Any) -> HTTPError:
        found.append(len(errors))
        return from_validation(errors, fields)

    monkeypatch.setattr(app_module, "from_validation", noted)
    refused(client, route, **body)
    assert found[0] <= 4


def test_a_text_is_cut_into_no_more_tokens_than_a_row_may_have(client: TestClient) -> None:
    assert len(client.post("/tokenize", json={"text": "x" * 128}).json()["tokens"]) == 128
    assert "may have 128 tokens" in refused(client, "/tokenize", text="x" * 129)


def test_scores_are_counted_with_what_they_score(client: TestClient) -> None:
    """The budget here is 16384."""
    text = "x" * 25
    assert client.post("/fill", json={"text": f"{text}[MASK:2]", "n": 8, "steps": 1, "score": True}).status_code == 200
    assert "24 rows x 29 tokens x 33" in refused(client, "/fill", text=f"{text}[MASK:2..4]", n=8, steps=1)
    assert "network calls" in refused(client, "/edit", text=f"{text} y", replace="y", n=8, with_length=[1, 4], steps=1)
    assert "8 rows x 25 tokens x 256" in refused(client, "/score", texts=[text] * 8, num_samples=256)


def test_guidance_is_counted_as_two_calls(client: TestClient) -> None:
    body = {"prompt": "x", "max_tokens": 31, "n": 8, "sampler": "remdm", "steps": 40}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert "8 rows x 32 tokens x 80" in refused(client, "/v1/completions", **body, guidance=1.0)


def test_a_text_is_scored_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    bound: Callable[..., Bound] = Served._bound

    def noted(self: Served, canvas: Any, *scored: Any, **how: Any) -> Bound:
        seen.extend(canvas.tokens.tolist())
        return bound(self, canvas, *scored, **how)

    monkeypatch.setattr(Served, "_bound", noted)
    body = {"text": "a[MASK:1..2]b", "n": 3, "temperature": 0, "sampler": "left_to_right", "score": True}
    texts = client.post("/fill", json=body).json()["texts"]
    assert len({one["text"] for one in texts}) == 1
    assert len(seen) == 2  # each length once, and no more for the bound
    assert texts[0]["bound"]["nats"] == texts[0]["ranked"][0]["nats"]
    seen.clear()
    one, two = client.post("/score", json={"texts": ["abc", "abc"]}).json()["texts"]
    assert one == two
    assert len(one["by_token"]) == 3
    assert len(seen) == 1


def test_other_objectives_are_scored_by_the_engine_as_by_the_library(small: Model) -> None:
    model = Model(denoiser=small.denoiser, tokenizer=small.tokenizer, objective=D3PM(), length=small.length)
    texts = ["the cat", "a dog", "x" * 40]
    jobs = Jobs(model, "d3pm", Limits())
    try:
        found = Served(jobs.engine, jobs.compiler, Limits(), jobs_module.Call()).score(texts, num_samples=8)
        assert jobs.metrics.value("unmask_network_calls_total") > 0
    finally:
        jobs.close()
    wanted = model.score(texts, num_samples=8)
    torch.testing.assert_close(found.draws_BS, wanted.draws_BS, rtol=1e-4, atol=1e-4)
    assert found.tokens_B.tolist() == wanted.tokens_B.tolist()


def test_a_stream_spells_each_token_once(small: Model) -> None:
    class Spelling:
        mask_id, eot_id = small.tokenizer.mask_id, small.tokenizer.eot_id
        calls = 0

        def token_text(self, id: int) -> str:
            self.calls += 1
            return "ab"[: id % 2 + 1]

    tokenizer: Any = Spelling()
    choice = _Choice(0, "xyz", [7, 7], [7, 7], 40, [], tokenizer)
    written, told = list(range(60, 100)), []
    for k in range(1, 41):
        told.append(choice.logprobs([7, 7, *written[:k], *[tokenizer.mask_id] * (40 - k)]))
    assert tokenizer.calls == 40
    names = ["ab"[: id % 2 + 1] for id in written]
    assert [one["tokens"] for one in told] == [[name] for name in names]
    assert [one["text_offset"] for one in told] == [[3 + len("".join(names[:i]))] for i in range(40)]


def test_an_autoregressive_score_asks_for_few_lines_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_model()
    wanted = model.score("some words and more").nats
    lines: list[int] = []
    head = model.denoiser.head
    monkeypatch.setattr(model.denoiser, "head", lambda h_ND: (lines.append(len(h_ND)), head(h_ND))[1])
    for module in ("objectives.ar", "server.batching"):
        monkeypatch.setattr(f"unmask.{module}.MAX_NUMBERS", 9 * model.denoiser.num_ids)
    with TestClient(make_app(model), base_url="http://localhost") as client:
        [one] = client.post("/score", json={"texts": ["some words and more"]}).json()["texts"]
    assert one["nats"] == pytest.approx(wanted, rel=1e-5)
    assert sum(lines) >= 20
    assert max(lines) <= 9


def test_a_body_is_parsed_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    loads = json.loads

    def noted(text: Any, **how: Any) -> Any:
        parsed.append(text)
        return loads(text, **how)

    monkeypatch.setattr(json, "loads", noted)
    answers = [client.post("/fill", content=body, headers=JSON) for body in (b'{"text": "no gap"}', b'{"n": "1"}')]
    monkeypatch.undo()
    assert [answer.status_code for answer in answers] == [400, 400]
    assert parsed == ['{"text": "no gap"}', '{"n": "1"}']


@pytest.mark.parametrize("end", ["done", "failed", "cancelled", "stream closed"])
def test_what_a_request_held_goes_with_it(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Its key-value caches may fill a GPU: they must not wait until Python looks for rings of objects."""
    made: list[weakref.ref[RowCache]] = []

    class Noted(RowCache):
        def __init__(self) -> None:
            super().__init__()
            made.append(weakref.ref(self))

    monkeypatch.setattr(rows_module, "RowCache", Noted)

    def job(served: Served, emit: Callable[[Any], None] = lambda step: None) -> None:
        served.generate(2, 30, "a", watch=emit)
        if end == "failed":
            raise UsageError("no more")

    async def use(jobs: Jobs) -> None:
        left = asyncio.Event()

        async def receive() -> dict[str, str]:
            await left.wait()
            return {"type": "http.disconnect"}

        request: Any = SimpleNamespace(scope={}, receive=receive)
        if end == "stream closed":
            stream = jobs.stream(request, job)
            await anext(stream)
            await stream.aclose()
            return
        working = asyncio.ensure_future(jobs.run(request, job))
        if end == "cancelled":
            while not made:
                await asyncio.sleep(0.001)
            left.set()
        if end == "done":
            await working
        else:
            with pytest.raises(HTTPError):
                await working

    jobs = Jobs(causal_model(), "ar", Limits())
    gc.collect()
    gc.disable()
    try:
        asyncio.run(use(jobs))
        until = time.monotonic() + 10
        while any(ref() is not None for ref in made) and time.monotonic() < until:
            time.sleep(0.01)
        assert made  # one where it was cancelled before the second row
        assert not any(ref() is not None for ref in made)
    finally:
        gc.enable()
        jobs.close()
