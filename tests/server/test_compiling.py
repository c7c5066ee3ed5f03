"""Constraints of strangers: whatever their process does, the server goes on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import unmask
from unmask.model import Model
from unmask.server.compiling import Compiler
from unmask.server.engine import Call, Cancelled


def test_a_pattern_that_explodes_is_given_up_and_the_next_one_works(small: Model) -> None:
    compiler = Compiler(small.tokenizer, seconds=0.1)
    try:
        with pytest.raises(unmask.UsageError, match="too long or too much memory"):
            compiler([unmask.constraints.Regex(pattern="[ab]*a[ab]{20}")], may_end=False)
        compiler.seconds = 60
        with pytest.raises(unmask.UsageError, match="has too many states"):
            compiler([unmask.constraints.Regex(pattern="[ab]*a[ab]{20}")], may_end=False)
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
