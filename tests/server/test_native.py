"""Our own routes: gaps, edits, scores, steps, fits; and what a page needs besides."""

from __future__ import annotations

import gc
import json
import re
import weakref
from typing import Any

import pytest
from small_server import random_model
from starlette.testclient import TestClient

from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.model import Model
from unmask.objectives.mdlm import MDLM
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.confidence import Confidence
from unmask.server import limits
from unmask.server.app import make_app
from unmask.server.routes_native import _samplers_for_constraints
from unmask.text import editing
from unmask.text.editing import fill as fill_gaps


def post(client: TestClient, route: str, **body: Any) -> dict[str, Any]:
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(client: TestClient, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    answer = client.post("/trace", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", answer.text)
    return [(kind, json.loads(data)) for kind, data in found]


def test_fill(client: TestClient, small: Model) -> None:
    found = post(client, "/fill", text="a [MASK:3] b [MASK] c", n=3, seed=4, runners_up=2)
    texts = [one["text"] for one in found["texts"]]
    assert texts == small.fill(["a [MASK:3] b [MASK] c"] * 3, seed=4)
    for one in found["texts"]:
        assert "".join(token["text"] for token in one["tokens"]) == one["text"]
        written = [k for k, token in enumerate(one["tokens"]) if "log_prob" in token]
        assert written == [2, 3, 4, 8]
        assert all(len(one["tokens"][k]["others"]) == 2 for k in written)
        assert all(0 <= one["tokens"][k]["model_prob"] <= 1 for k in written)
    assert 1 <= found["calls"] <= 4
    assert found["seconds"] >= 0


def test_fill_by_tokens(client: TestClient) -> None:
    found = post(client, "/fill", tokens=[97, None, None, 98], seed=1)
    by_text = post(client, "/fill", text="a[MASK:2]b", seed=1)
    assert found["texts"] == by_text["texts"]
    assert [token["token"] for token in found["texts"][0]["tokens"]][::3] == [97, 98]


def test_fill_with_a_bound_and_of_unknown_length(client: TestClient, small: Model) -> None:
    found = post(client, "/fill", text="a[MASK:1..2]b", score=True, steps=1)
    [one] = found["texts"]
    assert one["text"] == small.fill("a[MASK:1..2]b", sampler=Ancestral(steps=1))[0]
    assert one["bound"]["nats"] == pytest.approx(small.score(one["text"], num_samples=32).nats, rel=1e-4)


def test_gaps_of_unknown_length_tell_their_tokens_and_ranks(client: TestClient, small: Model) -> None:
    text = "a[MASK:1..3]b[MASK:1..2]"
    found = post(client, "/fill", text=text, n=2, seed=4, runners_up=2)["texts"]
    wanted = fill_gaps(small, [text] * 2, seed=4)
    for one, mine in zip(found, wanted, strict=True):
        assert one["text"] == mine.text == "".join(token["text"] for token in one["tokens"])
        assert one["row"] == mine.row
        assert [way["text"] for way in one["ranked"]] == [way.text for way in mine.ways]
        assert [way["row"] for way in one["ranked"]] == [way.row for way in mine.ways]
        assert [way["nats"] for way in one["ranked"]] == pytest.approx([way.nats for way in mine.ways], rel=1e-4)
        written = [k for k, token in enumerate(one["tokens"]) if "log_prob" in token]
        assert [k for k, token in enumerate(one["tokens"]) if "others" in token] == written
        assert len(written) == len(one["text"]) - 2
    plain = post(client, "/fill", text="a[MASK:2]b", n=2)["texts"]
    assert [one["row"] for one in plain] == [0, 1]
    assert all("ranked" not in one for one in plain)


def test_a_constrained_text_beyond_the_window_tells_no_row_that_is_not_its_own(client: TestClient) -> None:
    [one] = post(client, "/fill", text="x" * 40 + "[MASK:2]", regex="[0-9]+")["texts"]
    assert re.fullmatch(r"x{40}\d\d", one["text"])
    assert "tokens" not in one


def test_samplers_and_their_options(client: TestClient, small: Model) -> None:
    found = post(client, "/fill", text="ab[MASK:9]c", sampler="confidence", options={"tokens": 4, "random": 0.5})
    assert found["texts"][0]["text"] == small.fill("ab[MASK:9]c", sampler=Confidence(tokens=4, random=0.5))[0]
    assert found["calls"] == 3


def test_constraints(client: TestClient) -> None:
    for body, pattern in (
        ({"regex": "[0-9]+"}, "a[0-9]{4}b"),
        ({"choices": ["blue", "pink"]}, "a(blue|pink)b"),
        ({"choices": "pink"}, "apinkb"),
        ({"constraints": [{"name": "contains", "phrases": "pi"}, {"name": "choices", "options": "pink"}]}, "apinkb"),
        ({"json_schema": {"enum": ["x7"]}}, 'a"x7"b'),
        ({"constraints": [{"name": "words", "forbid": ["I"]}, {"name": "regex", "pattern": "[xyz ]+"}]}, "a[xyz ]{4}b"),
        ({"regex": "a[q-s]{4}b", "over": "text"}, "a[q-s]{4}b"),
    ):
        assert re.fullmatch(pattern, post(client, "/fill", text="a[MASK:4]b", **body)["texts"][0]["text"]), body


def test_edit(client: TestClient, small: Model) -> None:
    found = post(client, "/edit", text="the cat sat", replace="cat", with_length=[2, 3], n=2, steps=2)
    wanted = small.edit("the cat sat", "cat", with_length=(2, 3), num=2, sampler=Ancestral(steps=2))
    assert [one["text"] for one in found["edits"]] == [edit.text for edit in wanted]
    assert found["edits"][0]["nats"] == pytest.approx(wanted[0].nats, rel=1e-4)


def test_score(client: TestClient, small: Model) -> None:
    found = post(client, "/score", texts=["a cat", ""], num_samples=8)
    bound = small.score("a cat", num_samples=8)
    [first, empty] = found["texts"]
    assert first["nats"] == pytest.approx(bound.nats, rel=1e-4)
    assert first["bits_per_byte"] == pytest.approx(bound.bits_per_byte, rel=1e-4)
    assert [token["text"] for token in first["by_token"]] == list("a cat")
    assert 0 < sum(token["nats"] for token in first["by_token"]) < first["nats"]  # the end has its own share
    assert empty["tokens"] == 1
    assert empty["by_token"] == []
    given = post(client, "/score", texts=["a cat"], prompt="the dog and ", num_samples=8)["texts"][0]
    bound = small.score("a cat", prompts="the dog and ", num_samples=8)
    assert given["nats"] == pytest.approx(bound.nats, rel=1e-4)
    assert given["nats"] != first["nats"]
    assert given["tokens"] == 6
    assert [token["text"] for token in given["by_token"]] == list("a cat")
    assert 0 < sum(token["nats"] for token in given["by_token"]) < given["nats"]
    told = client.post("/score", json={"texts": ["a"], "prompt": "x" * 40})
    assert told.status_code == 400
    assert "the prompt takes 40 tokens" in told.text


def test_trace_tells_every_step(client: TestClient) -> None:
    found = events(client, text="a[MASK:6]b", n=2, seed=3, steps=3, runners_up=2)
    kinds = [kind for kind, _ in found]
    assert kinds == ["start", *["step"] * (len(kinds) - 2), "end"]
    start, end = found[0][1], found[-1][1]
    assert [token["text"] for token in start["rows"][0]] == ["a", *[None] * 6, "b"]
    rows = [[token["token"] for token in row] for row in start["rows"]]
    for number, (_, step) in enumerate(found[1:-1], 1):
        assert step["step"] == number == step["calls"]
        for k, (row, position) in enumerate(zip(step["row"], step["position"], strict=True)):
            assert rows[row][position] == start["mask"]
            rows[row][position] = step["token"][k]
            assert len(step["others"][k]) == 2
    assert rows == [[token["token"] for token in one["tokens"]] for one in end["texts"]]
    assert end["texts"] == post(client, "/fill", text="a[MASK:6]b", n=2, seed=3, steps=3, runners_up=2)["texts"]


def test_trace_from_a_prompt(client: TestClient, small: Model) -> None:
    found = events(client, prompt="ab", suffix="yz", length=12, seed=2)
    assert found[-1][1]["texts"][0]["text"] == small.generate(1, 12, "ab", "yz", seed=2)[0]


def test_trace_shows_what_is_masked_again(client: TestClient) -> None:
    found = events(client, text="[MASK:12]", sampler="remdm", steps=12, runners_up=1)
    assert any(step["remasked"] for kind, step in found if kind == "step")


def test_fit_asks_no_network(client: TestClient) -> None:
    def calls() -> str:
        return re.findall(r"^unmask_network_calls_total (.*)$", client.get("/metrics").text, re.MULTILINE)[0]

    before = calls()
    fits = post(client, "/fit", length=4, regex="[0-9]{4}")
    assert (fits["fits"], fits["reason"]) == (True, None)
    refused = post(client, "/fit", length=3, regex="[0-9]{4}")
    assert refused["fits"] is False
    assert "at least 4" in refused["reason"]
    assert post(client, "/fit", text="a[MASK:2..5]b", regex="[0-9]{4}")["fits"] is True
    assert post(client, "/fit", text="a[MASK:2..3]b", regex="[0-9]{4}")["fits"] is False
    assert post(client, "/fit", text="no gap", regex="a")["fits"] is False
    assert "a constraint is held within one window" in post(client, "/fit", length=50, regex="[0-9]+")["reason"]
    assert post(client, "/fit", length=3, regex="(")["fits"] is False
    secret = post(client, "/fit", length=3, regex="a very secret pattern(")
    assert "no regular expression" in secret["reason"]
    assert "secret" not in secret["reason"]
    assert calls() == before


def test_fit_tells_which_samplers_hold_a_constraint(client: TestClient) -> None:
    told = client.post("/fit", json={"length": 4, "regex": "[0-9]+"}).json()["samplers"]
    cannot_fit = client.post("/fit", json={"length": 4, "regex": "[0-9]{5}"}).json()["samplers"]
    ask = {"text": "ab[MASK:4]", "regex": "[0-9]+", "steps": 2}
    held = [
        name
        for name in client.get("/info").json()["samplers"]
        if client.post("/fill", json=ask | {"sampler": name}).status_code == 200
    ]
    assert told == cannot_fit == held
    assert {"ancestral", "block"} <= set(held)
    assert {"remdm", "posterior", "predictor_corrector"} <= set(held)
    assert "refine" not in held


def test_fit_says_what_fill_does(client: TestClient) -> None:
    """Also beyond the window, and of every length that fill would try."""
    for text in ("x" * 40 + "[MASK:2]", "[MASK:2]" + "x" * 40):
        assert post(client, "/fit", text=text, regex="[0-9]+")["fits"] is True
        assert re.search("[0-9]", post(client, "/fill", text=text, regex="[0-9]+", steps=1)["texts"][0]["text"])
    for pattern, fits in (("[0-9]{1,2}", True), ("[0-9]{9}", True), ("[0-9]{10}", False)):
        assert post(client, "/fit", text="a[MASK:1..9]b[MASK:1..9]", regex=pattern)["fits"] is fits


def test_tokenize_turns_words_into_gaps(client: TestClient) -> None:
    text = "the café sat"
    found = post(client, "/tokenize", text=text, spans=[[9, 12], [4, 8]])
    assert found["masked"] == "the [MASK:5] [MASK:3]"
    assert found["gaps"] == [5, 3]
    assert [token["start"] for token in found["tokens"]] == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10, 11]
    assert all(token["start"] < token["end"] for token in found["tokens"])


def test_tokens_of_a_vocabulary_without_a_space() -> None:
    dna = load_tokenizer("dna")
    network = DiT(hidden=8, blocks=1, heads=2).build(num_ids=dna.num_ids, mask_id=dna.mask_id)
    model = Model(denoiser=network, tokenizer=dna, objective=MDLM(), length=16)
    with TestClient(make_app(model, name="dna"), base_url="http://localhost") as client:
        assert [token["text"] for token in post(client, "/tokenize", text="ACN")["tokens"]] == ["A", "C", "N"]
        assert post(client, "/tokenize", text="ACGT", spans=[[1, 3]])["masked"] == "A[MASK:2]T"


def test_the_page_and_its_files(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in page.text
    assert not re.search(r"""(src|href)=["']https?:""", page.text + client.get("/docs").text)
    for name in re.findall(r"/page/([\w.]+)", page.text):
        assert client.get(f"/page/{name}").status_code == 200
    for name in ("%2e%2e%2fapp.py", "app.py", "index.html%00", "../app.py"):
        assert client.get(f"/page/{name}").status_code in (404, 307)


def test_docs_list_every_route(client: TestClient) -> None:
    text = client.get("/docs").text
    for path in client.get("/openapi.json").json()["paths"]:
        assert f" {path}</code>" in text


def test_info(client: TestClient) -> None:
    found = client.get("/info").json()
    assert (found["window"], found["mask"], found["vocabulary"]) == (32, 257, 258)
    assert "ancestral" in found["samplers"]


def test_metrics_are_as_prometheus_reads_them(client: TestClient) -> None:
    post(client, "/fill", text="a[MASK:3]")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("#"):
            found = re.fullmatch(r'(\w+(?:\{(?:\w+="[^"\\]*",?)*\})?) (-?[\d.e+-]+)', line)
            assert found, line
            assert found[1] not in values
            values[found[1]] = float(found[2])
    assert kinds["unmask_request_seconds"] == "histogram"
    assert values["unmask_tokens_total"] >= 3
    assert values["unmask_requests_active"] == values["unmask_queue_rows"] == 0
    assert values['unmask_batch_occupancy_bucket{le="+Inf"}'] == values["unmask_steps_total"]
    for name in ("unmask_steps_per_second", "unmask_tokens_per_second"):
        assert values[name] > 0
    counts = [values[key] for key in values if re.match(r'unmask_request_seconds_bucket\{.*route="/fill"', key)]
    assert counts == sorted(counts)
    assert counts[-1] == values['unmask_request_seconds_count{route="/fill"}']


def test_fit_answers_of_a_step_that_is_too_costly(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STEP", -1)
    told = post(client, "/fit", length=4, regex="[0-9]{4}")
    assert told["fits"] is False
    assert "simpler constraint" in told["reason"]
    assert "ancestral" in told["samplers"]


def test_a_refused_edit_speaks_of_a_constraint_only_where_one_was_given(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(editing, "_may_lend", lambda *_: True)  # the gap then begins with its space, by a constraint
    monkeypatch.setattr(limits.Holding, "of", lambda *_, **__: limits.Holding(step=0, text=1 << 30))
    body = {"text": "the cat sat", "replace": "cat"}
    answers = [client.post("/edit", json=body | more) for more in ({}, {"regex": "[a-z]+"})]
    assert [answer.status_code for answer in answers] == [400, 400]
    plain, constrained = (answer.json()["error"]["message"] for answer in answers)
    assert "constraint" not in plain
    assert "16384" in plain
    assert "constraint" in constrained


def test_what_fit_remembers_of_a_model_goes_with_it() -> None:
    model = random_model()
    assert _samplers_for_constraints(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
