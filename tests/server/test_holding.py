"""What a constraint costs is counted like network calls, before anything is written, and its memory has an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_engine import JOBS, ONE_A_CALL, done_by

import unmask
from unmask.constraints import Constraint
from unmask.constraints.automaton import Automaton
from unmask.model import Model
from unmask.samplers.ancestral import Ancestral
from unmask.server import compiling, limits, served_model
from unmask.server import rows as rows_module
from unmask.server.compiling import Busy, Compiler
from unmask.server.engine import Call, Engine
from unmask.server.limits import ConstraintTooCostly, Holding, Limits
from unmask.server.served_model import Served


@pytest.fixture
def engine(small: Model) -> Iterator[Engine]:
    made = Engine(small)
    yield made
    made.close()


WORDS = unmask.constraints.Regex(pattern="(?:[a-z]{3,9} ){4}[a-z]*")


def test_a_constraint_is_counted_with_the_network_calls(engine: Engine, compiler: Compiler) -> None:
    """20 tokens in 20 calls are 400; the constraint makes each of the calls dearer."""
    automaton = compiler(WORDS, may_end=True)
    held = Holding.of(automaton, 20, 20, likeliest=False)
    assert held.text > 20
    asked: dict[str, Any] = {"num": 2, "length": 20, "sampler": ONE_A_CALL}
    tight = Limits(budget=2 * (400 + held.text) - 1)
    with pytest.raises(ConstraintTooCostly, match=f"as long as {held.text} tokens more"):
        Served(engine, compiler, tight, Call()).generate(**asked, constraint=WORDS)
    assert engine.metrics.value("unmask_steps_total") == 0
    assert len(Served(engine, compiler, tight, Call()).generate(**asked)) == 2
    enough = Limits(budget=2 * (400 + held.text))
    assert len(Served(engine, compiler, enough, Call()).generate(**asked, constraint=WORDS)) == 2


def test_more_states_positions_and_steps_cost_more(compiler: Compiler) -> None:
    simple = compiler(unmask.constraints.Regex(pattern="[a-z]+"), may_end=True)
    large = compiler(unmask.constraints.Regex(pattern="(?:[a-y][b-z][ac-z]){60}"), may_end=True)

    def text(automaton: Automaton, positions: int, steps: int, likeliest: bool = False) -> int:
        return Holding.of(automaton, positions, steps, likeliest=likeliest).text

    assert text(large, 200, 100) > text(simple, 200, 100)
    assert text(large, 200, 200) > 1.5 * text(large, 200, 100)
    assert text(large, 200, 100) > 1.5 * text(large, 100, 100)
    assert text(large, 200, 100, likeliest=True) > text(large, 200, 100)
    assert Holding.of(large, 200, 1, likeliest=False).step > Holding.of(large, 200, 200, likeliest=False).step


def test_only_the_gap_counts_where_only_the_gap_is_held(
    engine: Engine, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    of = Holding.of

    def noted(automaton: Automaton, positions: int, steps: int, *, likeliest: bool) -> Holding:
        seen.append(positions)
        return of(automaton, positions, steps, likeliest=likeliest)

    monkeypatch.setattr(Holding, "of", noted)
    for over in ("gap", "text"):
        number = unmask.constraints.Regex(pattern="[a-z :]*[0-9]+", over=over)
        Served(engine, compiler, Limits(), Call()).fill("the number: [MASK:3]", constraint=number)
    assert seen == [3, 15]


def test_a_step_that_would_keep_all_waiting_is_refused(
    engine: Engine, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_STEP", 3)
    for job in (
        lambda one: one.generate(1, 20, constraint=WORDS, sampler=Ancestral(steps=1)),
        lambda one: one.fill("[MASK:18..20]", constraint=WORDS),
    ):
        with pytest.raises(ConstraintTooCostly, match="use a simpler constraint, or a shorter gap"):
            job(Served(engine, compiler, Limits(), Call()))
    assert engine.metrics.value("unmask_steps_total") == 0


def test_looks_in_many_lengths_are_counted_together(engine: Engine, compiler: Compiler) -> None:
    one = Holding.of(compiler(WORDS, may_end=False), 20, 0, likeliest=False).text
    asked = Served(engine, compiler, Limits(budget=3 * one), Call())
    with pytest.raises(ConstraintTooCostly, match="give fewer lengths"):
        asked.fill("[MASK:16..20]", constraint=WORDS)
    assert engine.metrics.value("unmask_steps_total") == 0


def test_beside_the_engine_the_same_texts_are_written(
    small: Model, engine: Engine, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every constraint taken for a long one: planned, adaptive and in blocks, over gaps and over texts."""
    jobs = [job for job in JOBS if "constraint" in job[1]]
    assert len(jobs) >= 5
    wanted = [done_by(Served(engine, compiler, Limits(), Call()), job) for job in jobs]
    threads: set[str] = set()
    take: Callable[..., Any] = rows_module.Writing.take

    def noted(self: rows_module.Writing, *given: Any) -> Any:
        threads.add(threading.current_thread().name.partition("_")[0])
        return take(self, *given)

    monkeypatch.setattr(rows_module.Writing, "take", noted)
    for module in (rows_module, served_model):
        monkeypatch.setattr(module, "LONG", 0)
    assert [done_by(Served(engine, compiler, Limits(), Call()), job) for job in jobs] == wanted
    assert threads == {"unmask-beside"}
    with pytest.raises(unmask.UsageError, match="it needs at least 5"):
        Served(engine, compiler, Limits(), Call()).fill(
            "[MASK:2]", constraint=unmask.constraints.Choices(options=("hello",))
        )


class Sized(Compiler):
    """Compiles to as many states as it is told to."""

    def _compile(self, several: tuple[Constraint, ...], may_end: bool, check: Callable[[], None]) -> Automaton:
        return several[0].automaton(self.tokenizer, may_end=may_end)


def test_the_memory_of_all_constraints_has_an_end(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Sized(small.tokenizer)

    def get(letter: str) -> Automaton:
        return compiler(unmask.constraints.Regex(pattern=f"[{letter}-z]{{40}}"), may_end=False)

    size = get("a").cost(1).shared_bytes
    monkeypatch.setattr(compiling, "MEMORY", 3 * size + size // 2)
    for letter in "bcdefgh":
        get(letter)
        assert compiler._bytes() <= compiling.MEMORY
    assert len(compiler._alive) == 3  # the last ones are remembered
    used = [get(letter) for letter in "abc"]
    with pytest.raises(Busy, match="try again later"):
        get("d")
    assert get("b") is used[1]  # what is there is shared
    used.pop(0)
    assert get("d").accepts(b"z" * 40)
    assert get("c") is used[-1]
    monkeypatch.setattr(compiling, "MEMORY", size // 2)
    with pytest.raises(unmask.UsageError, match="too much memory"):
        get("e")
