"""Requests that cannot be met: each is refused in a short sentence that repeats nothing of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

CANARY = "Zebra42CanaryZebra"
POSTS = ("/v1/completions", "/v1/chat/completions", "/fill", "/edit", "/score", "/fit", "/tokenize", "/trace")
GETS = ("/v1/models", "/health", "/metrics", "/info", "/docs", "/", "/page/style.css", "/openapi.json")

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": CANARY, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": CANARY}]},
    "/fill": {"text": f"{CANARY}[MASK]"},
    "/edit": {"text": f"{CANARY} sat", "replace": "sat"},
    "/score": {"texts": [CANARY], "num_samples": 1},
    "/fit": {"length": 3, "regex": "[0-9]+"},
    "/tokenize": {"text": CANARY},
    "/trace": {"text": f"{CANARY}[MASK]"},
}

# Bodies that are no JSON object of ours, for every route.
RAW = [
    b"",
    b" ",
    b"{",
    b"}",
    b"null",
    b"[]",
    b"[1]",
    b'"text"',
    b"1",
    b"true",
    b"NaN",
    b"{'text': 1}",
    b'{"text": }',
    b'{"text": "a",}',
    b'{"text": "\xff"}',
    b"\xff\xfe",
    b"\x00",
    b'{"text": NaN}',
    b'{"seed": Infinity}',
    b'{"seed": -Infinity}',
    b'{"temperature": 1e400}',
    b'{"temperature": -1e400}',
    b'{"text": "\\ud800"}',
    b'{"text": "a\\uDFFFb[MASK]"}',
    b'{"\\ud800": 1}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"temperature": 0.' + b"1" * 5000 + b"}",
    b"[" * 100_000,
    b'{"json_schema": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    b'{"options": ' + b'{"a":' * 80 + b"1" + b"}" * 80 + b"}",
]

WRONG: dict[str, list[Any]] = {
    "text": [1, None, True, [], {}, ["a"], 1.5],
    "tokens": ["a", 1, [-1], ["a"], [1.5], [True], {}, [None] * 200, [10**30], [257], [300, None], [1, 2], []],
    "n": [0, -1, 9, 1.5, "1", None, True, 10**30, [1]],
    "seed": ["0", 1.5, 2**63, -(2**64), 10**400, True, [0], {}],
    "steps": [0, -1, 4097, 10**9, "many", 1.5, [], True, ""],
    "temperature": [-1, 101, 1e300, "hot", [], {}, -0.001],
    "top_p": [0, -1, 1.1, "all", []],
    "top_k": [-1, 10**7, 1.5, "all"],
    "guidance": [-11, 101, "much", 1e308],
    "sampler": ["", "no_such", CANARY, "../ancestral", 1, [], "x" * 41, "Ancestral", "__init__", "_planned"],
    "options": [
        [],
        "x",
        1,
        {"steps": 3},
        {"no_such": 1},
        {CANARY: 1},
        {"draw": {}},
        {"noise": CANARY},
        {"sure": 7},
        {"temperature": 1},
        {"draw": CANARY},
        {"temperature_end": "nan"},
        {"temperature_end": "inf"},
    ],
    "regex": [
        1,
        [],
        "",
        "(",
        "[",
        "a{2,1}",
        "*",
        "(?=a)",
        "\\1",
        "a" * 2001,
        "(?P<x>a)(?P=x)",
        CANARY + "(",
        "[z-a]",
        "a++b",
    ],
    "json_schema": [
        1,
        "x",
        [],
        {},
        {"type": "no"},
        {"type": CANARY},
        {"$ref": "http://evil.example"},
        {"enum": []},
        {"type": "string", "pattern": "("},
        {"type": "object", "properties": 3},
        {"anyOf": []},
        {"not": {}},
        {"type": "integer", "minimum": "0"},
        {"type": "object", "required": 5},
        {"type": "array", "items": 1},
        {"type": "string", "minLength": "x"},
        {"type": "string", "format": CANARY},
        {"$ref": "#/nowhere"},
    ],
    "choices": ["", 1, [], [1], [""], ["a"] * 101, ["x" * 1001], [None]],
    "constraints": [
        "a",
        [1],
        [{}],
        [{"name": "no_such"}],
        [{"name": CANARY}],
        [{"name": "regex"}],
        [{}] * 9,
        [{"name": "regex", "pattern": 1}],
        [{"name": "length", "least": -1}],
        [{"name": "words", CANARY: 1}],
        [{"name": "../regex"}],
        [{"name": "regex", "pattern": "a", "over": "all"}],
        [{"name": "contains"}],
    ],
    "over": ["", "all", 1, None, CANARY],
    "runners_up": [-1, 11, "1", 1.5],
    "score": [1, "yes", None],
}

FILL_TEXTS = [
    "",
    "no gap",
    CANARY,
    "[MASK:0]",
    "[MASK:1000001]",
    "[MASK:99999999999999999999]",
    "[MASK:5..3]",
    "[MASK:1..9999]",
    "[MASK:1..99][MASK:1..99]",
    "[MASK:200]",
    "x" * 200 + "[MASK]",
    "x" * 200_001,
    "[MASK:100..128]" + "y" * 20,
]

ROUTE_CASES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {"prompt": value}) for value in (1, None, [], [257], [[1], [256]], ["a"] * 9, {}, "[MASK]")),
    *(("/v1/completions", {"prompt": value}) for value in (True, [[]], [1, "a"], [-1], [10**30], [[1]] * 9, [1] * 129)),
    *(("/v1/completions", {"suffix": value}) for value in (1, [], "[MASK:3]")),
    *(("/v1/completions", {"max_tokens": value}) for value in (0, -1, "4", 1.5, 10**7, 4097, 129, True)),
    *(("/v1/completions", {"stop": value}) for value in (1, [1], ["a"] * 5, "", [""], "x" * 201, {}, [["a"]])),
    *(("/v1/completions", {"stream": value}) for value in (1, "yes", [])),
    *(("/v1/completions", {"logprobs": value}) for value in (-1, 11, "1", True, 1.5)),
    *(("/v1/completions", {"model": value}) for value in ("other", CANARY, 1, "", "x" * 300)),
    *(("/v1/completions", {"best_of": value}) for value in (0, 2, 9)),
    *(("/v1/completions", {key: 1}) for key in ("presence_penalty", "frequency_penalty", "logit_bias", CANARY)),
    *(
        ("/v1/completions", {"response_format": value})
        for value in (1, "json", {}, {"type": "json_object"}, {"type": CANARY}, {"type": "json_schema"})
    ),
    ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}),
    ("/v1/completions", {"prompt": ["a"] * 3, "n": 3}),
    ("/v1/completions", {"stream": True, "echo": True}),
    ("/v1/completions", {"stream_options": 1}),
    ("/v1/completions", {"max_tokens": 100, "n": 8, "steps": "inf"}),
    ("/v1/completions", {"max_tokens": 3, "regex": "[0-9]{9}"}),
    ("/v1/completions", {"max_tokens": 100, "regex": "[0-9]+"}),
    ("/v1/completions", {"sampler": "semi_ar", "options": {"window": 64}}),
    ("/v1/completions", {"sampler": "refine", "options": {"rounds": 100000}}),
    ("/v1/completions", {"sampler": "remdm", "steps": 4000, "max_tokens": 20, "regex": "a+"}),
    ("/v1/completions", {"prompt": "", "guidance": 2.0}),
    *(("/v1/chat/completions", {"messages": value}) for value in (1, None, "a", [1], [[]], [])),
    *(("/edit", {"replace": value}) for value in ("", "dog", 1, None, CANARY + "x")),
    *(("/edit", {"with_length": value}) for value in (0, -1, [1], [3, 2], [1, 2, 3], [0, 4], "3", 1.5, 60, [1, 400])),
    *(("/edit", {"occurrence": value}) for value in (0, 2, -1, "1", 1.5)),
    *(("/edit", {"rank": value}) for value in ("", "bound", 1)),
    ("/edit", {"text": "sat sat", "replace": "sat"}),
    ("/edit", {"text": "x" * 60 + "sat"}),
    ("/edit", {"with_length": [1, 30], "n": 8}),
    *(("/score", {"texts": value}) for value in (1, "a", [], [1], ["a"] * 9, [None], ["x" * 200])),
    *(("/score", {"num_samples": value}) for value in (0, 257, "8", 1.5, -1)),
    ("/score", {"texts": ["x" * 120], "num_samples": 256}),
    *(("/fit", {"length": value}) for value in (0, -1, 10**7, "3", 129)),
    ("/fit", {"text": "[MASK]"}),
    ("/fit", {"length": None}),
    ("/fit", {"regex": None}),
    *(("/tokenize", {"spans": value}) for value in (1, [1], [[1]], [[2, 1]], [[0, 999]], [[0, 2], [1, 3]], [["a", 1]])),
    *(("/tokenize", {"spans": value}) for value in ([[-1, 2]], [[0, 0]], [[0, 1, 2]], [[0, 1]] * 1001)),
    *(("/trace", {"text": None, "length": value}) for value in (0, -1, "9", 10**7, 129)),
    ("/trace", {"length": 9}),
    ("/trace", {"prompt": "a"}),
    ("/trace", {"tokens": [None]}),
    ("/trace", {"text": None, "prompt": "x" * 60, "length": 20}),
    ("/trace", {"text": None, "prompt": "[MASK]"}),
]

CASES: list[tuple[str, bytes]] = [(route, raw) for route in POSTS for raw in RAW]
for _route in ("/fill", "/v1/completions", "/trace"):
    for _name, _values in WRONG.items():
        if _route == "/v1/completions" and _name in ("text", "tokens", "runners_up", "score"):
            continue
        for _value in _values:
            if (_route, _name, _value) in (("/v1/completions", "n", None), ("/trace", "text", None)):
                continue  # OpenAI's clients may say so; a trace may begin from nothing
            _body = {**GOOD[_route], _name: _value}
            if _name == "tokens":
                _body.pop("text")
            CASES.append((_route, json.dumps(_body).encode()))
CASES += [(route, json.dumps({"text": text}).encode()) for route in ("/fill", "/trace") for text in FILL_TEXTS]
CASES += [(route, json.dumps({**GOOD[route], **change}).encode()) for route, change in ROUTE_CASES]
CASES += [(route, json.dumps({**GOOD[route], f"{CANARY}_field": 1}).encode()) for route in POSTS if "chat" not in route]
CASES += [(route, b"{}") for route in POSTS if route not in ("/v1/completions", "/trace")]


def check(answer: Any) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.content) <= 1024
    assert CANARY not in answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["message"].isprintable()
    assert error["type"] == "invalid_request_error"


def test_there_are_many() -> None:
    assert len(CASES) == len(set(CASES)) >= 300


@pytest.mark.parametrize("route", POSTS)
def test_refused(client: TestClient, route: str) -> None:
    cases = [body for where, body in CASES if where == route]
    assert cases
    for body in cases:
        answer = client.post(route, content=body, headers={"content-type": "application/json"})
        try:
            check(answer)
        except AssertionError as e:
            raise AssertionError(f"{route} {body[:200]!r}: {answer.status_code} {answer.text[:300]}") from e


def test_what_is_right_is_not_refused(client: TestClient) -> None:
    """The guard of the test above: without their one fault these requests are met."""
    for route, body in GOOD.items():
        if "chat" not in route:
            assert client.post(route, json=body).status_code == 200, route


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json"])
def test_only_json(client: TestClient, kind: str) -> None:
    """A form of another site can send these without asking."""
    for route in POSTS:
        answer = client.post(route, content=json.dumps(GOOD[route]).encode(), headers={"content-type": kind})
        check(answer)
        assert answer.status_code == 415


def test_methods_and_routes(client: TestClient) -> None:
    for route in POSTS:
        for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
            answer = client.request(method, route)
            assert answer.status_code == 405
    for route in GETS:
        answer = client.post(route, json={})
        check(answer)
        assert answer.status_code == 405
    for route in ("/nowhere", "/v1", "/fill/", "/v1/completions/", "/FILL", f"/{CANARY}", "/%00", "/%ff"):
        answer = client.post(route, json={})
        check(answer)
        assert answer.status_code == 404


def test_bodies_that_are_too_large(client: TestClient) -> None:
    def pieces() -> Any:  # without a content-length
        for _ in range(17):
            yield b"x" * 65536

    headers = {"content-type": "application/json"}
    for route in POSTS:
        for content in (b"x" * ((1 << 20) + 1), pieces()):
            answer = client.post(route, content=content, headers=headers)
            check(answer)
            assert answer.status_code == 413
    claimed = client.post("/fill", content=b"{}", headers={**headers, "content-length": str(10**30)})
    assert claimed.status_code == 413
    just = json.dumps({"text": "[MASK]"}).encode().ljust(1 << 20)
    assert client.post("/fill", content=just, headers=headers).status_code == 200


@pytest.mark.parametrize("spelled", ["\\ud83e\\udd93" * 12, "Z\\/e\\/b\\/r\\/a\\/4\\/2", "Z  e  b  r  a  4  2"])
def test_escapes_hide_no_echo(client: TestClient, spelled: str) -> None:
    body = f'{{"text": "{spelled}"}}'.encode()
    answer = client.post("/fill", content=body, headers={"content-type": "application/json"})
    check(answer)
    assert answer.json()["error"]["message"].startswith("no gap in '…': write [MASK]")


def test_messages_help(client: TestClient) -> None:
    def said(route: str, **body: Any) -> str:
        found: str = client.post(route, json={**GOOD[route], **body}).json()["error"]["message"]
        return found

    for text in ("no gap here", "no"):
        assert said("/fill", text=text) == "no gap in '…': write [MASK] for one token, [MASK:5] for five"
    assert said("/fill", temprature=1) == "unknown field; did you mean 'temperature'?"
    assert said("/fill", sampler="ancestrl") == "unknown sampler; did you mean 'ancestral'?"
    assert "less than or equal to 8" in said("/fill", n=9)
    assert "needs at least 9" in said("/v1/completions", max_tokens=3, regex="[0-9]{9}")


@pytest.mark.parametrize("word", ["it's", 'it\'s "so"', "Zq", "zq_xv", "Zq Xv's", "ab\ncd", "Zebra's canary is secret"])
def test_no_word_is_repeated_however_it_is_quoted(client: TestClient, word: str) -> None:
    fields: list[dict[str, Any]] = [
        {"options": {"tokens": word}},
        {"options": {word: 1}},
        {"sampler": "ancestral", "options": {"temperature_end": word}},
        {"regex": f"{word}("},
        {"choices": ["a"], "constraints": [{"name": "words", word: 1}]},
        {"constraints": [{"name": "words", "forbid": [word, "two words"]}]},
        {"constraints": [{"name": "regex", "pattern": [word]}]},
        {"constraints": [{"name": word}]},
        {"constraints": [{"name": "regex", "pattern": "a", "over": word}]},
        {"json_schema": {"type": "object", "properties": {word: {}}}},
        {"json_schema": {"type": "object", "properties": {word: {"type": "object", "properties": {word: 1}}}}},
        {"json_schema": {"type": "object", "properties": {word: [word, 1]}}},
        {"json_schema": {"type": "object", "properties": {}, "required": [word]}},
        {"json_schema": {"type": "string", word: 1}},
        {"json_schema": {"type": "string", "format": word}},
        {"json_schema": {"type": word}},
        {"json_schema": {"enum": [1], word: 1}},
        {"json_schema": {"$ref": word}},
    ]
    for more in fields:
        messages = [client.post("/fill", json={"text": "[MASK:3]", **more}).json()["error"]["message"]]
        if "options" not in more and "sampler" not in more:
            told = client.post("/fit", json={"length": 3, **more}).json()
            messages.append(told["reason"] if "fits" in told else told["error"]["message"])
        for message in messages:
            plain = message.replace("'…'", "").replace("doesn't", "").replace("the mask's", "").replace("model's", "")
            for spelled in (word, repr(word)[1:-1], json.dumps(word)[1:-1], word.replace("_", "-")):
                assert spelled not in plain, (more, message)


def test_our_own_names_are_not_hidden(client: TestClient) -> None:
    def said(**body: Any) -> str:
        found: str = client.post("/fill", json={"text": "[MASK]", **body}).json()["error"]["message"]
        return found

    wrong = said(sampler="ancestral", options={"temperature_end": "hot"})
    assert wrong == "--temperature_end: expected float, got '…'"
    assert said(sampler="ancestral", options={"temperature_endd": 1}) == (
        "the sampler Ancestral has no option …; did you mean 'temperature_end'?"
    )
    wrong = said(constraints=[{"name": "regex", "pattern": "a", "over": "all"}])
    assert wrong == "constraints.over: '…' is not a choice; known: gap, text"
    wrong = said(constraints=[{"name": "words", "forbid": ["a"] * 5000}])
    assert wrong == "a constraint may have 16000 characters: use a shorter one"
    wrong = said(json_schema={"type": "object", "properties": {"secret": {"type": "strng"}, "a": {"type": "string"}}})
    assert wrong == "schema.…: needs a type, did you mean 'string'?"
    for word in ("a", "number", "regex"):  # here they are the request's
        assert said(text=word).startswith("no gap in '…': write [MASK]")
        wrong = said(json_schema={"type": "object", "properties": {word: {"type": "strng"}}})
        assert wrong == "schema.…: needs a type, did you mean 'string'?"
    assert said(text="a", regex="a") == "no gap in '…': write [MASK] for one token, [MASK:5] for five"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": 5},
        {"type": "object", "properties": [1]},
        {"type": "array", "prefixItems": 5},
        {"anyOf": 5},
        {"$defs": 5, "$ref": "#/$defs/a"},
        {"type": 5},
    ],
)
def test_a_schema_that_is_none_is_refused_without_a_traceback(
    client: TestClient, capfd: pytest.CaptureFixture[str], schema: dict[str, Any]
) -> None:
    for route, body in (
        ("/fill", {"text": "[MASK:8]", "json_schema": schema}),
        ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
    ):
        check(client.post(route, json=body))
    assert "Traceback" not in capfd.readouterr().err
