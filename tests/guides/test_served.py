"""The guides' plug-ins behind a server: which routes answer, that they answer as the library does, what others say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from guide_files import Bench
from starlette.testclient import TestClient

import unmask
from unmask import plugin_modules
from unmask.model import Model
from unmask.server.app import make_app
from unmask.server.compiling import Compiler

ASKED: dict[str, Any] = {"model": "mine", "prompt": "(1", "max_tokens": 8, "seed": 2}


@contextmanager
def client_of(model: Model) -> Iterator[TestClient]:
    with TestClient(make_app(model, name="mine"), base_url="http://localhost") as client:
        yield client


def check_completions(client: TestClient, model: Model, sampler: str | None) -> None:
    """Whole and streamed: the text that the library writes."""
    asked = ASKED if sampler is None else ASKED | {"sampler": sampler}
    [text] = model.generate(1, 10, "(1", seed=2, sampler=model.make_sampler(sampler))
    answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert "(1" + answer.json()["choices"][0]["text"] == text
    lines = client.post("/v1/completions", json=asked | {"stream": True}).text.splitlines()
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "(1" + "".join(part["choices"][0]["text"] for part in parts) == text


def check_score(client: TestClient, model: Model) -> None:
    [score] = client.post("/score", json={"texts": ["(1+2)=3"], "seed": 4, "num_samples": 8}).json()["texts"]
    assert score["nats"] == pytest.approx(model.score("(1+2)=3", seed=4, num_samples=8).nats, rel=1e-5)


def test_objective_schedule_sampler_and_constraint(diffusion: Model) -> None:
    with client_of(diffusion) as client:
        for sampler in (None, "middle_first"):
            check_completions(client, diffusion, sampler)
            named = {} if sampler is None else {"sampler": sampler}
            body = {"text": "x[MASK:6]", "seed": 1, "constraints": [{"name": "balanced", "depth": 1}]}
            answer = client.post("/fill", json=body | named | {"regex": "[()]{6}"})
            assert answer.status_code == 200, answer.text
            assert answer.json()["texts"][0]["text"] == "x()()()"  # the only one there is at this depth
            held = client.post("/v1/completions", json=ASKED | named | {"regex": "[0-9]{8}"})
            assert re.fullmatch("[0-9]{8}", held.json()["choices"][0]["text"]), held.text
        trace = client.post("/trace", json={"prompt": "(1", "length": 9, "sampler": "middle_first", "runners_up": 1})
        assert trace.status_code == 200, trace.text
        check_score(client, diffusion)


def test_a_constraint_that_was_registered_without_a_plugin_option(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that compiles finds its module where this one has; of a class in no module a sentence says so."""
    balanced = unmask.constraints.room.get("balanced")
    monkeypatch.setattr(plugin_modules, "loaded", [])
    monkeypatch.syspath_prepend(str(bench.folder))
    compiler = Compiler(unmask.load_tokenizer("bytes"))
    try:
        assert compiler([balanced(depth=1)], may_end=False).accepts(b"()()")
        with pytest.raises(unmask.UsageError, match="--plugin"):
            compiler([type("Here", (balanced,), {"__module__": "__main__"})()], may_end=False)
    finally:
        compiler.close()


def test_denoiser(recurrent: Model) -> None:
    with client_of(recurrent) as client:
        check_completions(client, recurrent, None)
        check_score(client, recurrent)
        end = client.post("/fill", json={"text": "(1[MASK:4]", "seed": 1})
        assert end.json()["texts"][0]["text"].startswith("(1")
        for path, body, noun in (
            ("/fill", {"text": "(1[MASK:4])"}, "gap"),
            ("/fill", {"text": "(1[MASK:4]", "constraints": [{"name": "balanced"}]}, "diffusion"),
            ("/v1/completions", ASKED | {"regex": "[0-9]{8}"}, "diffusion"),
            ("/v1/completions", ASKED | {"sampler": "middle_first"}, "left_to_right"),
        ):
            refused = client.post(path, json=body)
            assert (refused.status_code, noun in refused.text) == (400, True), refused.text
