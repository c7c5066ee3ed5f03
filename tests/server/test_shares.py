"""Fair by work: whoever asks for little is done soon, however much is asked for beside it."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch
from test_engine import Steps, together

from unmask.model import Model
from unmask.sampling.predictor import Query
from unmask.server.engine import Call, Cancelled, Closed, Engine
from unmask.server.fair_queue import LEAST_ROOM, LEAST_WORK, STEP_SECONDS, Shares
from unmask.server.rows import Work, draws_at_once


class Row(Steps):
    """A row of so many tokens, asked about at one of them."""

    def __init__(self, name: str, num: int, log: list[str], length: int, lines: int = 1) -> None:
        super().__init__(name, num, log)
        at = torch.zeros(1, lines, dtype=torch.long)
        self.questions = [Query(torch.full((1, length), 257), torch.ones(1), at, at == 0, 1)]


class Asks:
    """A request that is nothing but its rows."""

    def __init__(self, *works: Work) -> None:
        self.works, self.spent, self.at = works, 0.0, 0

    @property
    def next_work(self) -> Work | None:
        return self.works[self.at] if self.at < len(self.works) else None

    def take_next(self) -> int:
        self.at += 1
        return self.at - 1


def test_beside_many_long_rows_a_short_one_takes_its_steps(small: Model) -> None:
    engine = Engine(small, max_batch=64)
    log: list[str] = []
    try:
        many: list[Work] = [Row("long", 40, log, 256) for _ in range(8)]
        together(engine, [many, [Row("short", 32, log, 16)]])
    finally:
        engine.close()
    assert Counter(log) == {"long": 320, "short": 32}
    done = max(i for i, name in enumerate(log) if name == "short")
    # 32 steps of 16 tokens are two of 256: the long rows may have had as much, and one more when it came.
    assert log[:done].count("long") <= 4


def test_requests_get_the_same_share_of_the_work_with_rows_of_any_length(small: Model) -> None:
    engine = Engine(small, max_batch=4)
    log: list[str] = []
    lengths = {"a": 16, "b": 64, "c": 256, "d": 256}
    jobs: list[list[Work]] = [[Row(name, 4096 // lengths[name], log, lengths[name])] for name in "abc"]
    jobs.append([Row("d", 2, log, 256) for _ in range(8)])
    try:
        together(engine, jobs)
    finally:
        engine.close()
    spent: Counter[str] = Counter()
    for name in log:
        if max(spent.values(), default=0) < 4096:
            spent[name] += lengths[name]
    assert set(spent) == set(lengths)
    assert min(spent.values()) >= 4096 - 2 * 256


def test_a_step_has_so_much_work_as_fits_its_time() -> None:
    shares = Shares(num_ids=258)
    log: list[str] = []
    rows = Asks(*(Row("row", 1, log, 256) for _ in range(100)))
    batch, work = shares.pick([rows], 64)
    assert work == LEAST_ROOM
    assert len(batch) == 1
    for times in (2, 4, 8):  # fast: a step may have twice as much as the last one
        shares.took(work, seconds=STEP_SECONDS / 20)
        batch, work = shares.pick([rows], 64)
        assert len(batch) == times
    assert work == 8 * LEAST_ROOM
    shares.took(16, seconds=STEP_SECONDS / 2)  # a small step says nothing of a large one
    assert shares.room == 8 * LEAST_ROOM
    shares.took(work, seconds=1.25 * STEP_SECONDS)
    assert shares.room == 0.8 * 8 * LEAST_ROOM // 1
    for _ in range(9):
        shares.took(16, seconds=60.0)  # slow
    assert shares.room == LEAST_ROOM
    batch, _ = shares.pick([Asks(Row("long", 1, log, 4096))], 64)
    assert len(batch) == 1  # what is more than a step's goes by itself


def test_whoever_comes_has_had_as_much_as_those_who_are_here() -> None:
    shares = Shares(num_ids=258)
    log: list[str] = []
    old = Asks(*(Row("old", 1, log, 256) for _ in range(10)))
    for _ in range(4):
        shares.pick([old], 1)
    new = Asks(*(Row("new", 1, log, 256) for _ in range(10)))
    shares.joins(new)
    assert new.spent == old.spent - 256  # what it had when its last step began


def test_a_price_counts_what_is_read_answered_and_done(small: Model) -> None:
    shares = Shares(num_ids=8192)
    log: list[str] = []
    assert shares.price(Row("short", 1, log, 3)) == LEAST_WORK
    assert shares.price(Row("long", 1, log, 200)) == 256
    assert shares.price(Row("asked about all", 1, log, 200, lines=200)) == 256 + 100
    held = Row("constrained", 1, log, 200)
    held.extra = 1000
    assert shares.price(held) == 1256


@pytest.mark.parametrize(("length", "draws"), [(16, 8), (32, 8), (60, 4), (128, 2), (256, 1), (1024, 1)])
def test_a_score_asks_for_few_long_draws_in_a_step(length: int, draws: int) -> None:
    assert draws_at_once(length, torch.device("cpu")) == draws


def test_a_row_of_which_no_more_is_wanted_leaves(small: Model) -> None:
    engine = Engine(small, max_batch=8)
    log: list[str] = []
    works: list[Work] = [Steps("stopped", -1, log), Steps("whole", 50, log)]
    try:
        for _ in engine.run(works, Call()):
            if log.count("stopped") >= 3:
                works[0].stopped = True
        assert log.count("whole") == 50
        assert log.count("stopped") < 40
        endless: list[Work] = [Steps("endless", -1, log) for _ in range(3)]
        call = Call()
        ended = threading.Thread(target=lambda: list(engine.run(endless, call, quiet=True)))
        ended.start()
        while call.steps < 2:
            time.sleep(0.001)
        for work in endless:
            work.stopped = True
        ended.join(10)
        assert not ended.is_alive()
        assert engine.waiting == 0
    finally:
        engine.close()


class Long(Steps):
    """Work that takes as long with its answers as it is told to, and notes in which thread."""

    def __init__(self, name: str, num: int, log: list[str]) -> None:
        super().__init__(name, num, log)
        self.extra = 10_000
        self.go = threading.Event()
        self.threads: set[str] = set()

    def take(self, predictions: list[torch.Tensor]) -> None:
        assert self.go.wait(20)
        self.threads.add(threading.current_thread().name)
        super().take(predictions)


def test_what_takes_long_with_its_answers_holds_nobody_up(small: Model) -> None:
    engine = Engine(small, max_batch=8)
    log: list[str] = []
    works = [Long("long", 3, log) for _ in range(3)]
    try:
        waits = threading.Thread(target=lambda: list(engine.run(works, Call())))
        waits.start()
        while engine._beside_is_free:
            time.sleep(0.001)
        list(engine.run([Steps("short", 20, log)], Call()))
        assert log == ["short"] * 20
        assert engine.waiting == 3
        for work in works:
            work.go.set()
        waits.join(20)
        assert log.count("long") == 9
        assert all(name.startswith("unmask-beside") for work in works for name in work.threads)
    finally:
        engine.close()


@pytest.mark.parametrize("end", ["cancelled", "failed", "closed"])
def test_an_end_beside_the_engine_is_told(small: Model, end: str) -> None:
    engine, call = Engine(small), Call()
    log: list[str] = []
    work = Long("long", 3, log)
    work.fails_at = 2 if end == "failed" else None
    errors: list[Exception] = []

    def wait() -> None:
        try:
            list(engine.run([work], call))
        except Exception as e:
            errors.append(e)

    waits = threading.Thread(target=wait)
    try:
        waits.start()
        while engine._beside_is_free:
            time.sleep(0.001)
        if end == "cancelled":
            call.cancel()
            waits.join(10)  # before the row's step has ended
        threading.Timer(0.2, work.go.set).start()
        if end == "closed":
            engine.close()
        waits.join(10)
        wanted = {"cancelled": Cancelled, "failed": RuntimeError, "closed": Closed}[end]
        assert [type(error) for error in errors] == [wanted]
        if end != "closed":
            list(engine.run([Steps("after", 2, log)], Call()))
            assert log[-2:] == ["after", "after"]
    finally:
        engine.close()


def test_a_job_beside_the_engine_is_waited_for_as_long_as_somebody_is_there(small: Model) -> None:
    engine, call, go = Engine(small), Call(), threading.Event()
    try:
        assert engine.do_beside(lambda: 7, call) == 7
        with pytest.raises(ZeroDivisionError):
            engine.do_beside(lambda: 1 / 0, call)
        threading.Timer(0.2, call.cancel).start()
        with pytest.raises(Cancelled):
            engine.do_beside(lambda: go.wait(20), call)
        go.set()
    finally:
        engine.close()
    with pytest.raises(Closed):
        engine.do_beside(lambda: 7, Call())
