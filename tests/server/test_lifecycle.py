"""Coming and going: clients that leave, a server that is full, one that is told to stop, and how it starts."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_server import Running, random_model, running

from unmask.cli import run
from unmask.model import Model
from unmask.server.limits import Limits

SLOW = {"text": "[MASK:32]", "steps": "inf", "n": 8, "sampler": "refine", "options": {"rounds": 30}}


def post(server: Running, route: str, body: dict[str, Any], timeout: float = 30) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    try:
        connection.request("POST", route, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def open_raw(server: Running, route: str, body: dict[str, Any]) -> socket.socket:
    """A request on its way, whose answer nobody has read yet."""
    data = json.dumps(body).encode()
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    raw.sendall(f"{head}\r\n\r\n".encode() + data)
    return raw


def until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def busy(small: Model) -> Iterator[Running]:
    with running(small, limits=Limits(requests=4, budget=1 << 30), max_batch=4) as server:
        yield server


@pytest.mark.parametrize("route", ["/fill", "/trace", "/v1/completions"])
def test_when_the_client_goes_its_work_stops(busy: Running, route: str) -> None:
    body: dict[str, Any] = SLOW
    if route == "/v1/completions":
        body = {"prompt": "", "max_tokens": 32, "stream": True, **{k: v for k, v in SLOW.items() if k != "text"}}
    metrics = busy.jobs.metrics
    for gone in range(1, 6):
        raw = open_raw(busy, route, body)
        until(lambda: busy.jobs.engine.waiting > 0)
        raw.close()
        until(lambda gone=gone: metrics.value("unmask_cancelled_total") == gone)
        until(lambda: busy.jobs.active == 0)
        assert busy.jobs.engine.waiting == 0
    assert metrics.late_most <= 1


def test_when_it_is_full_it_says_so_at_once(busy: Running) -> None:
    held = [open_raw(busy, "/fill", SLOW) for _ in range(4)]
    until(lambda: busy.jobs.active == 4)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(busy, "/fill", {"text": "[MASK]"}), range(40)))
    for status, headers, body in answers:
        assert status == 429
        assert 1 <= int(headers["retry-after"]) <= 60
        assert json.loads(body)["error"]["code"] == "busy"
    connection = http.client.HTTPConnection("127.0.0.1", busy.port, timeout=10)
    connection.request("GET", "/health")  # it is well all the same
    assert connection.getresponse().status == 200
    connection.close()
    with open_raw(busy, "/trace", SLOW) as raw:
        assert raw.recv(100).startswith(b"HTTP/1.1 429")  # a stream has a status, too
    for raw in held:
        raw.close()
    until(lambda: busy.jobs.active == 0)
    assert post(busy, "/fill", {"text": "[MASK]"})[0] == 200


def test_a_slow_body_does_not_hold_a_place(small: Model) -> None:
    with running(small, limits=Limits(requests=2, body_seconds=0.3)) as server:
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        raw.sendall(
            b"POST /fill HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        assert post(server, "/fill", {"text": "[MASK]"})[0] == 200
        assert raw.recv(200).startswith(b"HTTP/1.1 408")
        raw.close()


def test_an_error_inside_is_one_sentence(small: Model, capfd: pytest.CaptureFixture[str]) -> None:
    with running(small) as server:
        server.jobs.engine.predictor = None  # type: ignore[assignment]
        status, _, body = post(server, "/fill", {"text": "secret words [MASK]"})
    assert status == 500
    assert json.loads(body)["error"]["message"] == "something went wrong inside the server"
    assert "Traceback" in capfd.readouterr().err


def test_nothing_is_left_behind(small: Model) -> None:
    before = set(threading.enumerate())
    with running(small) as server:
        for _ in range(3):
            assert post(server, "/fill", {"text": "[MASK:3]", "regex": "[a-c]+"})[0] == 200
    until(lambda: set(threading.enumerate()) <= before)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "small"
    random_model().save(path)
    return path


@contextmanager
def command(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`unmask serve` as a process, once it has said where it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "unmask", "serve", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], 60)[0], "it did not start"
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def test_sigterm_finishes_what_is_being_written(folder: Path) -> None:
    with command(str(folder), "--port", "0", "--name", "mine") as (process, line):
        found = re.fullmatch(r"unmask serves mine at http://127\.0\.0\.1:(\d+)\n", line)
        assert found, line
        server = Running("", int(found[1]), None, None, None)  # type: ignore[arg-type]
        raw = open_raw(server, "/trace", {"text": "[MASK:32]", "steps": "inf", "n": 8})
        first = raw.recv(1000)
        assert first.startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        text = first
        while part := raw.recv(65536):
            text += part
        raw.close()
        assert b"event: end" in text  # the whole text came
        assert process.wait(timeout=30) == 0
        out, err = process.communicate()
        assert out == ""
        assert "Traceback" not in err
        assert "finishing what is being written" in err
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_how_it_refuses_to_start(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNMASK_API_KEY", raising=False)

    def said(*words: str, code: int = 2) -> str:
        assert run(["serve", *words]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err

    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        assert "needs an API key" in said(str(folder), "--host", host)
    short = tmp_path / "key"
    short.write_text("short")
    assert "at least 16" in said(str(folder), "--api-key-file", str(short))
    assert "cannot read the key" in said(str(folder), "--api-key-file", str(tmp_path / "none"))
    monkeypatch.setenv("UNMASK_API_KEY", "short")
    assert "at least 16" in said(str(folder), "--host", "0.0.0.0")
    monkeypatch.delenv("UNMASK_API_KEY")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} on 127.0.0.1 is taken" in said(str(folder), "--port", port, code=1)
    assert "--port must lie in" in said(str(folder), "--port", "70000")
    assert "--max-batch must be at least 1" in said(str(folder), "--port", "0", "--max-batch", "0")
    assert "no model folder" in said(str(tmp_path / "nowhere"), "--port", "0", code=1)


def test_a_public_server_with_a_key(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    with command(str(folder), "--host", "0.0.0.0", "--port", "0", "--api-key-file", str(key)) as (process, line):
        port = int(line.rpartition(":")[2])
        for headers, status in (({}, 401), ({"authorization": "Bearer 0123456789abcdef"}, 200)):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/v1/models", headers=headers)
            assert connection.getresponse().status == status
            connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


def test_without_the_extra_it_says_what_to_install(folder: Path) -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; from unmask.cli import run; sys.exit(run(['serve', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.returncode == 1
    assert "pip install 'unmask[serve]'" in done.stderr
    assert done.stderr.count("\n") == 1
