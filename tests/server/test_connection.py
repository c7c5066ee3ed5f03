"""Connections: small answers leave at once, and who does not read holds neither a place nor memory nor the server."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from small_server import Running, running
from test_lifecycle import open_raw, post, until

from unmask.model import Model
from unmask.server.limits import Limits

# Its steps make some megabytes of events, more than any buffer between takes.
LONG = {"text": "[MASK:32]", "steps": "inf", "n": 8, "sampler": "refine", "options": {"rounds": 20}, "runners_up": 10}


def silent(server: Running, route: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody reads: the client's system takes next to nothing of it either."""
    data = json.dumps(body).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.settimeout(30)
    raw.connect(("127.0.0.1", server.port))
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    raw.sendall(f"{head}\r\n\r\n".encode() + data)
    return raw


def connections(server: Running) -> list[Any]:
    return list(server.server.server_state.connections)


def test_small_answers_are_sent_at_once(server: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with closing(connection):
        connection.request("GET", "/health")
        connection.getresponse().read()
        [mine] = [c for c in connections(server) if c.client == connection.sock.getsockname()]
        accepted = mine.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.fixture
def narrow(small: Model) -> Iterator[Running]:
    """One place, and nobody is waited for: what is dropped in these tests is dropped for another reason."""
    with running(small, limits=Limits(requests=1, budget=1 << 30)) as server:
        yield server


def test_a_place_is_free_when_the_rows_are_done(narrow: Running) -> None:
    with silent(narrow, "/trace", LONG):
        until(lambda: narrow.jobs.metrics.value("unmask_steps_total") > 0)
        until(lambda: narrow.jobs.engine.waiting == 0)
        until(lambda: narrow.jobs.active == 0)
        assert len(connections(narrow)) == 1  # it is still there
        assert post(narrow, "/fill", {"text": "[MASK]"})[0] == 200


def test_who_reads_nothing_is_dropped(small: Model) -> None:
    with running(small, limits=Limits(requests=1, budget=1 << 30, write_seconds=0.3)) as server:
        with silent(server, "/trace", {**LONG, "options": {"rounds": 400}}):
            until(lambda: server.jobs.active == 1)
            until(lambda: not connections(server))  # in the middle of its work, which ends with it
            until(lambda: server.jobs.active == 0)
            until(
                lambda: server.jobs.metrics.value("unmask_cancelled_total") == 1
            )  # the engine counts it in its next step
        with silent(server, "/tokenize", {"text": "word " * 800}) as raw:  # an answer in one piece
            raw.sendall(b"GET /page/main.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 40)
            until(lambda: len(connections(server)) == 1)
            until(lambda: not connections(server))
        assert post(server, "/fill", {"text": "[MASK]"})[0] == 200


def test_a_slow_reader_is_waited_for(small: Model) -> None:
    with (
        running(small, limits=Limits(budget=1 << 30, write_seconds=0.3, unread=1 << 26)) as server,
        silent(server, "/trace", LONG) as raw,
    ):
        whole = b""
        for _ in range(12):  # four times as long as one who reads nothing is waited for
            time.sleep(0.1)
            whole += raw.recv(65536)
        while b"event: end" not in whole[-(1 << 20) :] or not whole.endswith(b"0\r\n\r\n"):
            part = raw.recv(1 << 20)
            assert part, "dropped"
            whole += part


def test_what_waits_for_its_reader_is_bounded(small: Model) -> None:
    with (
        running(small, limits=Limits(budget=1 << 30, unread=1 << 16)) as server,
        silent(server, "/trace", LONG) as raw,
    ):
        until(lambda: server.jobs.metrics.value("unmask_cancelled_total") == 1)  # its work has stopped
        until(lambda: server.jobs.active == 0)
        whole = b""
        while not whole.endswith(b"0\r\n\r\n") and (part := raw.recv(1 << 20)):
            whole += part
        assert b"event: error" in whole  # who goes on reading is told
        assert b"slow_reader" in whole
        assert b"event: end" not in whole


def test_a_head_that_never_ends_is_not_waited_for(small: Model) -> None:
    with running(small, limits=Limits(body_seconds=0.3)) as server:
        for begun in (b"", b"GET /health HTTP/1.1\r\nhost: loc"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
                raw.sendall(begun)
                with suppress(ConnectionResetError):  # the other way to be told
                    assert raw.recv(100) == b""
        with closing(open_raw(server, "/trace", {**LONG, "runners_up": 0, "options": {"rounds": 2}})) as raw:
            time.sleep(0.5)  # a request that has come is not a head any more
            assert raw.recv(100).startswith(b"HTTP/1.1 200")


def answers(raw: socket.socket) -> list[bytes]:
    """The status lines of all that comes until the server closes."""
    whole = b""
    while part := raw.recv(1 << 16):
        whole += part
    return [line for line in whole.split(b"\r\n") if line.startswith(b"HTTP/1.1")]


@pytest.mark.parametrize("route", ["POST /tokenize", "GET /health"])
def test_a_body_with_two_ends_is_refused(server: Running, route: str) -> None:
    """One reader of it sees one request, another two: the second must not be answered."""
    head = f"{route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    for lengths in (
        "content-length: 4\r\ntransfer-encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 99",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
            body = 'e\r\n{"text": "ab"}\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n'
            raw.sendall(f"{head}{lengths}\r\n\r\n{body}".encode())
            assert answers(raw) == [b"HTTP/1.1 400 Bad Request"]


def test_a_body_of_http_1_0_ends_with_its_length_alone(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"GET /health HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")
        assert answers(raw) == [b"HTTP/1.1 400 Bad Request"]


@pytest.mark.parametrize("route", ["/", "/health", "/docs", "/v1/models"])
def test_head_is_get_without_the_body(server: Running, route: str) -> None:
    found = {}
    for method in ("GET", "HEAD"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
            raw.sendall(f"{method} {route} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            whole = b""
            while part := raw.recv(1 << 16):
                whole += part
            found[method] = whole.partition(b"\r\n\r\n")
    assert found["HEAD"][0] == found["GET"][0]
    assert found["HEAD"][0].startswith(b"HTTP/1.1 200")
    assert found["HEAD"][2] == b"" != found["GET"][2]
