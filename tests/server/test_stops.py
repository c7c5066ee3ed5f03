"""A stop ends its row, not only the row's text."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from matrix import ALL, pairwise
from unmask.model import Model
from unmask.sampling.predictor import Query
from unmask.server.app import make_app
from unmask.server.jobs import Jobs
from unmask.server.routes_openai import first_stop

LENGTH = 80


@pytest.fixture(scope="module")
def slow(small: Model) -> Iterator[tuple[TestClient, Jobs]]:
    """A server whose network takes its time, so that whoever listens is not far behind it."""
    wide = Model(denoiser=small.denoiser, tokenizer=small.tokenizer, objective=small.objective, length=LENGTH + 1)
    app = make_app(wide, name="small")
    predictor = app.jobs.engine.predictor

    class Slow:
        process, gives, left_to_right = predictor.process, predictor.gives, predictor.left_to_right

        def __call__(self, query: Query) -> Any:
            time.sleep(0.005)
            return predictor(query)

    app.jobs.engine.predictor = Slow()
    with TestClient(app, base_url="http://localhost") as client:
        yield client, app.jobs


def written(client: TestClient, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Text and finish reason of each choice."""
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return [(choice["text"], choice["finish_reason"]) for choice in answer.json()["choices"]]
    found: dict[int, tuple[str, str]] = {}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text = found.get(choice["index"], ("", ""))[0]
                found[choice["index"]] = text + choice["text"], choice["finish_reason"]
    return [found[i] for i in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_row_with_a_stop_is_not_written_on(slow: tuple[TestClient, Jobs], stream: bool, n: int) -> None:
    client, jobs = slow
    body: dict[str, Any] = {"prompt": "a", "max_tokens": LENGTH, "n": n, "seed": 4, "sampler": "left_to_right"}
    before = jobs.metrics.value("unmask_row_steps_total")
    whole = written(client, body)
    all_steps = jobs.metrics.value("unmask_row_steps_total") - before
    stop = whole[0][0][6:9]
    wanted = [(text[: text.index(stop)], "stop") if stop in text else (text, end) for text, end in whole]
    before = jobs.metrics.value("unmask_row_steps_total")
    assert written(client, {**body, "stop": [stop], "stream": stream}) == wanted
    steps = jobs.metrics.value("unmask_row_steps_total") - before
    others = sum(len(text.encode()) + 1 for text, _ in wanted[1:])
    assert steps < min(all_steps, 10 + others + n * 20)
    assert jobs.engine.waiting == 0


@pytest.mark.parametrize(
    ("sampler", "stream"), pairwise(["ancestral", "confidence", "block", "remdm"], [False, True])[:: 1 if ALL else 2]
)
def test_a_stop_cuts_the_same_text_in_any_order(slow: tuple[TestClient, Jobs], sampler: str, stream: bool) -> None:
    """Where what is written may be masked again, a stop ends nothing before the end."""
    client, _ = slow
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 24, "n": 2, "seed": 6, "sampler": sampler}
    whole = [text for text, _ in written(client, body)]
    stops = [whole[0][9:11], whole[0][8:11] + "?", whole[1][20:22]]
    cuts = [min((text.find(stop) for stop in stops if stop in text), default=len(text)) for text in whole]
    found = written(client, {**body, "stop": stops, "stream": stream})
    assert [text for text, _ in found] == [text[:cut] for text, cut in zip(whole, cuts, strict=True)]


def test_a_stop_waits_for_one_that_may_begin_before_it() -> None:
    stops = ["d", "bcde", "cx"]
    assert first_stop("abcd", stops, last=False) == -1  # bcde may follow
    assert first_stop("abcd", stops, last=True) == 3
    assert first_stop("abcdx", stops, last=False) == 3
    assert first_stop("abcde", stops, last=False) == 1
    assert first_stop("abc", [], last=False) == -1
