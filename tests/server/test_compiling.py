"""Constraints of strangers: whatever their process does, the server goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from slow_constraint import Slow
from starlette.testclient import TestClient

import unmask
from unmask.model import Model
from unmask.server import compiling
from unmask.server.app import make_app
from unmask.server.compiling import Busy, Compiler
from unmask.server.engine import Call, Cancelled


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands beside this file, by the processes that are started here."""
    there = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(there))


def test_what_takes_too_long_is_given_up_and_the_next_one_works(small: Model) -> None:
    compiler = Compiler(small.tokenizer, seconds=1.0)
    try:
        with pytest.raises(unmask.UsageError, match="too long or too much memory"):
            compiler([Slow(busy=True)], may_end=False)
        good = [unmask.constraints.Regex(pattern="[0-9]{2}")]
        assert compiler(good, may_end=False).accepts([48, 49])
        assert compiler(good, may_end=False) is compiler(good, may_end=False)
        with pytest.raises(unmask.UsageError, match="regular expression"):
            compiler([unmask.constraints.Regex(pattern="(")], may_end=False)
    finally:
        compiler.close()


def test_a_process_that_does_not_begin_is_not_waited_for(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(small.tokenizer)
    good = [unmask.constraints.Regex(pattern="[0-9]{2}")]
    try:
        for name, value in (("START_SECONDS", 0.0), ("sys.executable", "/bin/false")):
            with monkeypatch.context() as patched:
                patched.setattr(f"unmask.server.compiling.{name}", value)
                with pytest.raises(unmask.UnmaskError, match="try again later"):
                    compiler(good, may_end=False)
        assert compiler(good, may_end=False).accepts([48, 49])
    finally:
        compiler.close()


def test_a_constraint_that_nobody_waits_for_is_not_compiled(small: Model) -> None:
    compiler, call = Compiler(small.tokenizer), Call()
    number = [unmask.constraints.Regex(pattern="[0-9]+")]
    compiler._compile = lambda *_: pytest.fail("compiled")  # type: ignore[method-assign]
    try:
        with compiler._lock, ThreadPoolExecutor() as pool:  # another one's is being made
            waits = pool.submit(compiler, number, may_end=False, check=call.check)
            time.sleep(0.3)
            assert not waits.done()
            call.cancel()
            with pytest.raises(Cancelled):
                waits.result(timeout=5)
        with pytest.raises(Cancelled):
            compiler(number, may_end=False, check=call.check)
    finally:
        compiler.close()


# --- what is remembered -----------------------------------------------------------------------------------------------


def regex(pattern: str) -> list[unmask.constraints.Constraint]:
    return [unmask.constraints.Regex(pattern=pattern)]


class Counted(Compiler):
    """Compiles the same whatever it is asked for: notes what that was, and waits until it may go on."""

    def __init__(self, small: Model) -> None:
        super().__init__(small.tokenizer)
        self.asked: list[str] = []
        self.go = threading.Event()

    def _compile(self, several: Any, may_end: bool, check: Callable[[], None]) -> Any:
        self.asked.append(several[0].pattern)
        assert self.go.wait(20)
        if several[0].pattern.startswith("bad"):
            raise unmask.UsageError("too long")
        return unmask.constraints.Choices(options=("a",)).automaton(self.tokenizer)


def test_what_is_known_does_not_wait_for_what_is_not(small: Model) -> None:
    compiler = Counted(small)
    compiler.go.set()
    known = compiler(regex("known"), may_end=False)
    with pytest.raises(unmask.UsageError, match="too long"):
        compiler(regex("bad"), may_end=False)
    compiler.go.clear()
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(compiler, regex("slow"), may_end=False)
        while "slow" not in compiler.asked:
            time.sleep(0.001)
        assert compiler(regex("known"), may_end=False) is known
        with pytest.raises(unmask.UsageError, match="too long"):
            compiler(regex("bad"), may_end=False)
        assert not slow.done()
        compiler.go.set()
        slow.result(timeout=5)
    assert compiler.asked == ["known", "bad", "slow"]


def test_refusals_are_forgotten_one_day_and_not_kept_without_end(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Counted(small)
    compiler.go.set()
    for i in range(compiling.REFUSALS + 10):
        with pytest.raises(unmask.UsageError):
            compiler(regex(f"bad{i}"), may_end=False)
    assert len(compiler._refused) == compiling.REFUSALS
    monkeypatch.setattr(compiling, "REFUSED_SECONDS", 0.0)
    compiler.asked.clear()
    for _ in range(2):
        with pytest.raises(unmask.UsageError):
            compiler(regex("bad again"), may_end=False)
    assert len(compiler.asked) == 2


def test_a_queue_has_an_end(small: Model) -> None:
    compiler = Counted(small)
    num = compiling.QUEUE + 1
    with ThreadPoolExecutor(num) as pool:
        waits = [pool.submit(compiler, regex(str(i)), may_end=False) for i in range(num)]
        while compiler._waiting < num:
            time.sleep(0.001)
        with pytest.raises(Busy, match="try again later"):
            compiler(regex("one more"), may_end=False)
        compiler.go.set()
        found = [one.result(timeout=20) for one in waits]
        assert len(set(map(id, found))) == num
    compiler(regex("one more"), may_end=False)
    assert compiler._waiting == 0


def test_a_full_queue_is_answered_with_429(small: Model) -> None:
    app = make_app(small, name="small")
    app.jobs.compiler._waiting = compiling.QUEUE + 1
    with TestClient(app, base_url="http://localhost") as client:
        answer = client.post("/fill", json={"text": "[MASK:3]", "regex": "[a-z]+"})
    assert answer.status_code == 429
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["message"] == "too many constraints wait to be prepared: try again later"


# --- what is left -----------------------------------------------------------------------------------------------------


looks_at_processes = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to look at")


def descendants(pid: int) -> set[int]:
    """The living processes that this one has started, and those that they have."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(entry.name)] = int(parent)
    found, more = set(), {pid}
    while more:
        found |= more
        more = {child for child, parent in parents.items() if parent in more} - found
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.add(pid)
    return found


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@looks_at_processes
def test_a_constraint_that_is_cancelled_is_not_compiled_on(small: Model) -> None:
    compiler, call = Compiler(small.tokenizer), Call()
    try:
        compiler(regex("[0-9]"), may_end=False)
        assert compiler._process is not None
        pid = compiler._process.pid
        with ThreadPoolExecutor() as pool:
            waits = pool.submit(compiler, Slow(), may_end=False, check=call.check)
            until(lambda: len(descendants(pid)) == 2)  # the task's own process, and the pattern's
            begun = descendants(pid)
            call.cancel()
            with pytest.raises(Cancelled):
                waits.result(timeout=5)
        until(lambda: not alive(begun), 5)
        assert compiler(regex("[a-c]"), may_end=False).accepts([97])
        assert compiler._process.pid == pid  # it did not have to begin again
    finally:
        compiler.close()
    assert not alive({pid})


@looks_at_processes
def test_what_takes_too_long_is_ended_with_all_that_it_started(small: Model) -> None:
    compiler = Compiler(small.tokenizer, seconds=0.5)
    try:
        compiler(regex("[0-9]"), may_end=False)
        assert compiler._process is not None
        pid = compiler._process.pid
        with ThreadPoolExecutor() as pool:
            waits = pool.submit(compiler, Slow(), may_end=False)
            until(lambda: len(descendants(pid)) == 2)
            begun = descendants(pid)
            with pytest.raises(unmask.UsageError, match="too long"):
                waits.result(timeout=20)
        until(lambda: not alive(begun), 5)
    finally:
        compiler.close()


SERVER = """
import unmask
from slow_constraint import Slow
from unmask.server.compiling import Compiler
from unmask.data.tokenizers import load_tokenizer
compiler = Compiler(load_tokenizer("bytes"), seconds=60.0)
compiler([unmask.constraints.Regex(pattern="[0-9]")], may_end=False)
print("ready", flush=True)
compiler([Slow()], may_end=False)
"""


@looks_at_processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_compiled_on_when_the_server_is_killed(number: signal.Signals) -> None:
    begun: set[int] = set()
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "ready\n"
        until(lambda: len(descendants(server.pid)) == 3)
        begun = descendants(server.pid)
        server.send_signal(number)
        server.wait(10)
        until(lambda: not alive(begun), 5)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        for pid in alive(begun):
            os.kill(pid, signal.SIGKILL)


def test_limits_hold_for_what_a_compilation_starts_and_are_never_raised() -> None:
    code = (
        "import subprocess, sys\n"
        "from unmask.server.compile_process import limit\n"
        "limit(3 << 30, 7)\n"
        "limit(4 << 30, 20)\n"
        "ask = 'import resource as r; print(r.getrlimit(r.RLIMIT_AS), r.getrlimit(r.RLIMIT_CPU))'\n"
        "subprocess.run([sys.executable, '-c', ask], check=True)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == f"({3 << 30}, {3 << 30}) (7, 7)\n"
