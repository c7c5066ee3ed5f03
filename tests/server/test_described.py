"""openapi.json and /docs: every field is described, every answer has a schema, every example works."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

import pytest
from described import events, fault, wrong_answer
from starlette.testclient import TestClient


@pytest.fixture(scope="module")
def schema(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def asked(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each POST takes."""
    shelf = schema["components"]["schemas"]
    found = {}
    for path, methods in schema["paths"].items():
        if "post" in methods:
            ref = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            found[path] = shelf[ref.rpartition("/")[2]]
    assert len(found) == 8
    return found


def test_every_field_of_a_request_is_described(schema: dict[str, Any]) -> None:
    for path, model in asked(schema).items():
        missing = [name for name, field in model["properties"].items() if "description" not in field]
        assert not missing, (path, missing)


def test_every_route_says_what_it_answers(schema: dict[str, Any]) -> None:
    for path, methods in schema["paths"].items():
        for about in methods.values():
            assert about["responses"]["4XX"]["content"]["application/json"]["schema"]["$ref"].endswith("/Error")
            if path in ("/v1/chat/completions", "/page/{name}"):  # always refused; files of any kind
                continue
            content = about["responses"]["200"]["content"]
            assert content
            for kind, said in content.items():
                assert kind != "application/json" or said["schema"].get("$ref"), (path, said)
    assert "text/event-stream" in schema["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert "left_to_right" in schema["paths"]["/v1/completions"]["post"]["description"]


def test_every_example_is_answered_as_described(client: TestClient, schema: dict[str, Any]) -> None:
    num = 0
    for path, model in asked(schema).items():
        for example in model.get("examples", ()):
            for body in (example, example | {"stream": True}) if path == "/v1/completions" else (example,):
                answer = client.post(path, json=body)
                assert answer.status_code == 200, (path, answer.text)
                assert wrong_answer(schema, path, 200, answer.content) is None
                num += 1
    assert num == 8  # chat has none, completions also as a stream


def test_fields_that_come_when_asked_for_are_described(client: TestClient, schema: dict[str, Any]) -> None:
    body = {"text": "a[MASK:2..4]", "n": 2, "score": True, "runners_up": 2, "steps": "inf"}
    for path in ("/fill", "/trace"):
        answer = client.post(path, json=body)
        assert wrong_answer(schema, path, 200, answer.content) is None
    [(_, end)] = [event for event in events(answer.content) if event[0] == "end"]
    assert {"tokens", "ranked", "bound"} <= end["texts"][0].keys()
    assert {kind for kind, _ in events(answer.content)} == {"start", "step", "end"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/health", "/info"])
def test_what_is_only_read_is_described(client: TestClient, schema: dict[str, Any], path: str) -> None:
    about = schema["paths"].get(path) or schema["paths"][path.replace("{name}", "{name:path}")]
    said = about["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert fault(schema, said, client.get(path.replace("{name}", "small")).json()) is None


def test_the_docs_show_fields_and_examples(client: TestClient, schema: dict[str, Any]) -> None:
    page = client.get("/docs").text
    for model in asked(schema).values():
        for name in model["properties"]:
            assert f"<td><code>{name}</code></td>" in page
        for example in model.get("examples", ()):
            assert escape(json.dumps(example)) in page
    anchors, links = set(re.findall(r'id="([^"]+)"', page)), re.findall(r'href="#([^"]+)"', page)
    assert links
    assert set(links) <= anchors
    files = re.findall(r'(?:src|href)="(/page/[^"]+)"', page)
    assert {client.get(file).status_code for file in files} == {200}
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)  # it works without a network beyond the server
    assert "<script" not in page
