"""Who may come in: keys on every route, Host and Origin, and where the command is willing to listen."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

import unmask.server.access as access_module
from unmask.model import Model
from unmask.server.access import Access, AccessMiddleware, is_loopback
from unmask.server.app import make_app

KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def locked(small: Model) -> Iterator[TestClient]:
    """With a key, one more name, one more site."""
    access = Access(key=KEY, hosts=frozenset({"llm.example.org"}), origins=frozenset({"https://pages.example.org"}))
    with TestClient(make_app(small, access=access), base_url="http://localhost:8000") as found:
        yield found


def routes(client: TestClient) -> list[tuple[str, str]]:
    gate: Any = client.app
    assert isinstance(gate, AccessMiddleware)
    app: Any = gate.app
    assert isinstance(app, FastAPI)
    found = [(method, route.path) for route in app.routes if hasattr(route, "methods") for method in route.methods]  # type: ignore[attr-defined]
    assert len([route for route in app.routes if isinstance(route, APIRoute)]) >= 14
    return sorted(found)


BAD_KEYS: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"authorization": KEY},
    {"authorization": f"Token {KEY}"},
    {"authorization": "Basic !!!"},
    {"authorization": "Basic " + base64.b64encode(KEY.encode()).decode()},
    {"authorization": "Basic " + base64.b64encode(f"any:{KEY}".encode()).decode()},
    {"x-api-key": KEY},
    {"cookie": f"unmask-page={KEY}"},
    {"cookie": "unmask-page="},
    {"accept": "text/html"},
]


def test_every_route_but_health_needs_the_key(locked: TestClient) -> None:
    for method, path in [*routes(locked), ("GET", "/no/such/route"), ("POST", "/metrics"), ("OPTIONS", "/fill")]:
        url = path.replace("{name}", "index.html")
        for headers in BAD_KEYS:
            answer = locked.request(method, url, headers=headers, json={} if method == "POST" else None)
            if url == "/health" and method == "GET":
                assert answer.status_code == 200
            elif url != "/health":
                assert answer.status_code == 401, (method, url, headers)
                # At any other kind a browser would ask by itself, before our page can.
                assert answer.headers["www-authenticate"] == 'Bearer realm="unmask"'
                assert "set-cookie" not in answer.headers
                assert KEY not in answer.text


def test_who_opens_the_page_is_refused_with_one_that_asks(locked: TestClient) -> None:
    html = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for path in ("/", "/docs"):
        answer = locked.get(path, headers=html)
        assert answer.status_code == 401
        assert answer.headers["content-type"].startswith("text/html")
        assert '<input id="key" type="password"' in answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert len(re.findall(r"'sha256-[A-Za-z0-9+/]{43}='", policy)) == 2
        assert locked.get(path).headers["content-type"] == "application/json"  # a program
    assert locked.get("/info", headers=html).headers["content-type"] == "application/json"
    assert locked.post("/fill", headers=html, json={}).headers["content-type"] == "application/json"
    assert locked.get("/", headers=html | {"host": "evil.example"}).status_code == 421


def test_the_cookie_opens_the_page_and_nothing_else(small: Model) -> None:
    access = Access(key=KEY)
    with TestClient(make_app(small, access=access), base_url="http://localhost:8000") as client:
        opened = client.get("/", headers={"authorization": f"Bearer {KEY}"})
        said = opened.headers["set-cookie"]
        assert said == f"unmask-page={access.cookie}; Path=/; HttpOnly; SameSite=Strict"
        assert KEY not in said
        cookie = {"cookie": f"theme=dark; unmask-page={access.cookie}"}
        client.cookies.clear()
        pages = {"/", "/docs", "/openapi.json", "/page/{name}"}
        for method, path in routes(client):
            url = path.replace("{name}", "main.js")
            answer = client.request(method, url, headers=cookie, json={} if method == "POST" else None)
            client.cookies.clear()
            assert answer.status_code == (200 if path in pages or path == "/health" else 401), (method, path)
        assert client.post("/", headers=cookie, json={}).status_code == 401
        assert client.get("/", headers={"cookie": f"unmask-page={Access(key=KEY).cookie}"}).status_code == 401
    assert access.cookie not in repr(access)
    with TestClient(make_app(small), base_url="http://localhost") as client:
        assert "set-cookie" not in client.get("/").headers  # no key, no cookie


def test_with_the_key_the_door_opens(locked: TestClient) -> None:
    for given in (f"Bearer {KEY}", f"bearer {KEY}"):
        assert locked.get("/v1/models", headers={"authorization": given}).status_code == 200
        assert locked.get("/", headers={"authorization": given}).status_code == 200
        locked.cookies.clear()
    two = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
    assert locked.get("/v1/models", headers=two).status_code == 401


def test_the_key_is_checked_before_the_body(locked: TestClient) -> None:
    for route in ("/fill", "/health"):  # the open route, too, takes no body from strangers
        assert locked.post(route, content=b"x" * (2 << 20)).status_code == 401


GOOD_HOSTS = ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9999", "[::1]", "[::1]:80"]
GOOD_HOSTS += ["llm.example.org", "LLM.Example.org:443"]
BAD_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "evil.example@localhost",
    "localhost:8000@evil.example",
    "localhost:",
    "localhost:port",
    "localhost:99999",
    "localhost:" + "9" * 5000,
    "[::1]:" + "9" * 5000,
    "9" * 5000,
    "localhost:٣",
    "localhost:-1",
    "localhost:80:80",
    "local host",
    "localhost/evil",
    "localhost\\evil",
    "localhost,evil.example",
    "localhost.",
    "0.0.0.0",
    "192.168.1.10",
    "10.0.0.1:8000",
    "2130706433",
    "0x7f000001",
    "127.1",
    "[::1",
    "::1",
    "[localhost]",
    "[::ffff:127.0.0.1]",
    "[::1]x",
    "",
]


@pytest.mark.parametrize("host", GOOD_HOSTS)
def test_names_it_goes_by(locked: TestClient, host: str) -> None:
    assert locked.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_names_it_does_not_go_by(locked: TestClient, host: str) -> None:
    """A foreign name that was made to point here (DNS rebinding) says itself in the Host header."""
    headers = {"host": host, "authorization": f"Bearer {KEY}"}
    for method, url in (("GET", "/health"), ("GET", "/"), ("POST", "/fill")):
        answer = locked.request(method, url, headers=[(name, value.encode()) for name, value in headers.items()])
        assert answer.status_code == 421
        assert host == "" or host not in answer.text


def test_two_hosts_are_none(locked: TestClient) -> None:
    assert locked.get("/health", headers=[("host", "localhost"), ("host", "evil.example")]).status_code == 421


BAD_ORIGINS = [
    "http://evil.example",
    "https://evil.example",
    "null",
    "",
    "http://localhost",  # another port is another site
    "http://localhost:3000",
    "https://localhost",
    "http://127.0.0.1:8000",  # the page was loaded under another name
    "http://localhost:8000.evil.example",
    "http://localhost.evil.example:8000",
    "http://localhost:8000@evil.example",
    "http://evil.example@localhost:8000",
    "http://localhost:8000/",
    "http://localhost:8000/x",
    "http://localhost:8000?x",
    "http://localhost:8000#x",
    "http://localhost:8000 http://evil.example",
    "file://",
    "file://localhost:8000",
    "ftp://localhost:8000",
    "chrome-extension://abcdefgh",
    "localhost:8000",
    "//localhost:8000",
    "http://[::1]:8000",
    "http://localhost:80000",
    "http://localhost:" + "9" * 5000,
    "http://localhost:abc",
    "http://pages.example.org",  # the right name, the wrong scheme
    "https://pages.example.org:444",
    "https://xpages.example.org",
    "https://pages.example.org.evil.example",
]


@pytest.mark.parametrize("origin", BAD_ORIGINS)
def test_pages_of_other_sites(locked: TestClient, origin: str) -> None:
    headers = {"origin": origin, "authorization": f"Bearer {KEY}", "host": "localhost:8000"}
    for method, url in (("POST", "/fill"), ("GET", "/v1/models"), ("OPTIONS", "/fill"), ("GET", "/health")):
        answer = locked.request(method, url, headers=headers)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8000", "localhost:8000"),
        ("http://LOCALHOST:8000", "localhost:8000"),
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://localhost", "localhost:80"),
        ("http://localhost", "localhost"),
        ("https://llm.example.org", "llm.example.org"),
    ],
)
def test_the_servers_own_page(locked: TestClient, origin: str, host: str) -> None:
    headers = {"origin": origin, "host": host, "authorization": f"Bearer {KEY}"}
    assert locked.get("/v1/models", headers=headers).status_code == 200


def test_a_site_that_is_allowed(locked: TestClient) -> None:
    origin = {"origin": "https://pages.example.org"}
    before = locked.options("/fill", headers={**origin, "access-control-request-method": "POST"})
    assert before.status_code == 204
    assert before.headers["access-control-allow-origin"] == "https://pages.example.org"
    assert locked.post("/fill", headers=origin, json={}).status_code == 401
    answer = locked.get("/v1/models", headers={**origin, "authorization": f"Bearer {KEY}"})
    assert answer.headers["access-control-allow-origin"] == "https://pages.example.org"
    two = [("origin", "https://pages.example.org"), ("origin", "https://pages.example.org")]
    assert locked.get("/health", headers=two).status_code == 403


def test_on_a_public_address_any_bare_address_is_a_name(small: Model) -> None:
    with TestClient(make_app(small, access=Access(key=KEY, any_address=True)), base_url="http://localhost") as client:
        for host in ("192.168.1.10", "192.168.1.10:8000", "[fe80::1]:8000"):
            assert client.get("/health", headers={"host": host}).status_code == 200
        for host in ("evil.example", "localhost.evil.example", "192.168.1.10.evil.example"):
            assert client.get("/health", headers={"host": host}).status_code == 421


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.1", "example.org", ""))


def test_every_answer_has_the_same_headers(locked: TestClient) -> None:
    for answer in (
        locked.get("/health"),
        locked.get("/metrics"),
        locked.get("/health", headers={"host": "evil.example"}),
        locked.get("/nowhere", headers={"authorization": f"Bearer {KEY}"}),
    ):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
        assert not re.search("uvicorn|fastapi|starlette", str(answer.headers), re.IGNORECASE)


@pytest.mark.parametrize("where", ["access", "body", "route"])
def test_whatever_breaks_is_one_sentence_of_ours(
    small: Model, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("an inner secret")

    app = make_app(small)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        if where == "route":
            monkeypatch.setattr(app.jobs.metrics, "text", broken)
        else:
            monkeypatch.setattr(*((Access, "check") if where == "access" else (access_module, "parse_json")), broken)
        answer = client.post("/fill", json={}) if where == "body" else client.get("/metrics")
        monkeypatch.undo()
        told = client.get("/metrics").text
    assert answer.status_code == 500
    error = {"message": "something went wrong inside the server", "type": "server_error", "param": None}
    assert answer.json() == {"error": error | {"code": "internal"}}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert 'status="500"} 1' in told
    if where != "route":  # of which the server itself tells
        assert "ZeroDivisionError: an inner secret" in capfd.readouterr().err


def test_what_breaks_when_an_answer_has_begun_is_not_answered_twice(small: Model) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 2:
            raise ZeroDivisionError

    app = make_app(small)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"evil.example")]}
    with pytest.raises(ZeroDivisionError):
        asyncio.run(app(scope, lambda: asyncio.sleep(0), send))  # type: ignore[arg-type, return-value]
    app.jobs.close()
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
