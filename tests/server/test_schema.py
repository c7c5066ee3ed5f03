"""Requests made from the OpenAPI schema, right and wrong: none of them is answered with a 5xx, and every answer is what
the schema says. A thousand of them; five thousand with UNMASK_FAULTS=all."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import hypothesis
import requests
import schemathesis
from described import wrong_answer
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from small_server import random_model

from matrix import ALL
from unmask.server.app import make_app
from unmask.server.limits import Limits

PART = 1 if ALL else 8  # of those drawn at random; of the borders every so many are tried
LEAST = 5000 // (1 if ALL else 5)
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
# Drawn at random, of each mode; few where the making of a request costs more than its answer. Besides them every field
# is tried at its borders.
EXAMPLES = {"/v1/completions": 60, "/v1/chat/completions": 10, "/fill": 120, "/score": 150, "/tokenize": 480}
USUAL = 160
# A request with all fields at once is refused for one of them as a rule; with these alone it may get through.
PLAIN = {"text", "texts", "prompt", "replace", "messages", "n", "seed", "steps", "temperature", "stream", "max_tokens"}
PLAIN |= {"num_samples", "spans", "length"}


def test_no_request_is_answered_with_a_5xx_or_otherwise_than_the_schema_says() -> None:
    # Little work for each request: what is tried here are the fields, not the engine.
    app = make_app(random_model(16, 1, 1), name="tiny", limits=Limits(budget=1 << 8, length=32, requests=8))
    raw = app.app.openapi()  # type: ignore[attr-defined]
    seen: Counter[tuple[str, int]] = Counter()
    bad: list[str] = []
    with asyncio.Runner() as runner:

        def send(case: schemathesis.Case) -> None:
            made = requests.Request(**case.as_transport_kwargs(base_url="http://localhost")).prepare()
            status, body = runner.run(call(app, made))
            seen[case.operation.path, status] += 1
            if status >= 500 or (status >= 400 and len(body) > 1024):
                bad.append(f"{case.operation.path} {status} {made.body!r}"[:500])
            if fault := wrong_answer(raw, case.operation.path, status, body):
                bad.append(f"{case.operation.path} {status} {made.body!r}"[:300] + fault)

        def ask(case: schemathesis.Case) -> None:
            send(case)
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and case.body.keys() - PLAIN:
                case.body = {name: value for name, value in case.body.items() if name in PLAIN}
                send(case)

        for mode in MODES:
            config = SchemathesisConfig.from_dict({"generation": {"mode": mode.value}})
            schema = schemathesis.openapi.from_dict(raw, config=config)
            posts = [found.ok() for found in schema.get_all_operations() if found.ok().method.upper() == "POST"]
            assert len(posts) == 8
            for operation in posts:
                borders = schema.iter_coverage_cases(
                    operation, generation_modes=[mode], generation_config=schema.config.generation
                )
                for case in itertools.islice(borders, 0, None, 1 if ALL else 3):
                    ask(case)
                drawn = hypothesis.given(operation.as_strategy(generation_mode=mode))(ask)
                hypothesis.settings(
                    max_examples=max(8, EXAMPLES.get(operation.path, USUAL) // PART),
                    database=None,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                    phases=[hypothesis.Phase.generate],
                    derandomize=True,
                )(drawn)()
    app.jobs.close()
    assert bad == []
    assert sum(seen.values()) >= LEAST, seen
    met = {path: seen[path, 200] for path in ("/fill", "/trace", "/score", "/tokenize", "/v1/completions")}
    assert min(met.values()) > (10 if ALL else 3), met  # what is right is not refused for another reason


async def call(app: Any, made: requests.PreparedRequest) -> tuple[int, bytes]:
    """A request without a socket, answered whole."""
    path, _, query = (made.path_url or "/").partition("?")
    body = made.body.encode() if isinstance(made.body, str) else bytes(made.body or b"")
    headers = {"host": "localhost", "content-length": str(len(body))}
    headers |= {k.lower(): v if isinstance(v, str) else v.decode("latin-1") for k, v in made.headers.items()}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": made.method,
        "scheme": "http",
        "path": requests.compat.unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }
    sent: list[dict[str, Any]] = []
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # the client stays
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
