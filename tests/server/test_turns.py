"""Threads take turns in the order of coming."""

from __future__ import annotations

import threading
import time

from unmask.server.turns import Turns


def test_whoever_gives_way_waits_behind_all_who_wait() -> None:
    turns = Turns()
    log: list[str] = []

    def one(name: str) -> None:
        with turns:
            log.append(name)

    threads = [threading.Thread(target=one, args=(name,)) for name in "abc"]
    with turns:
        for thread in threads:
            before = len(turns._line)
            thread.start()
            while len(turns._line) == before:
                time.sleep(0.001)
        turns.give_way()
        log.append("first again")
        turns.give_way()  # nobody waits
        log.append("and again")
    for thread in threads:
        thread.join(10)
    assert log == ["a", "b", "c", "first again", "and again"]


def test_only_one_has_the_turn() -> None:
    turns = Turns()
    inside = most = 0

    def many() -> None:
        nonlocal inside, most
        for _ in range(200):
            with turns:
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == 1
