"""Kills processes that write many texts, and lets two work together. A program: it forks from one loaded process.

    python many_texts.py FOLDER MODEL NUMBER WORDS

Kills at so many points at which the folder changes, and behind two of the batches (0: at all points and batches). Two
processes run the command lines in WORDS, a JSON list of them, as under torchrun. Prints one JSON object: the cases,
every one in which something was wrong, and how each of the two processes ended and what it printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from injection import Taps

from unmask import cli
from unmask.distributed.world import join_world
from unmask.errors import UnmaskError
from unmask.model import Model, load
from unmask.text.bulk import Order, generate_many

ORDER = Order(num=20, length=12, seed=3, batch=4, part=8)
Point = tuple[str, int, str]


def run(model: Model, folder: Path, arm: Callable[[], None] = lambda: None, batches: int | None = None) -> int:
    """Write in a child, killed behind so many batches; the signal that ended it, 0 for none, -1 where it failed."""
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -1 if status else 0
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == batches:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        arm()
        generate_many(model, ORDER, folder, progress=progress, note=lambda line: os._exit(3))
        os._exit(0)
    except UnmaskError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def points(model: Model, root: Path) -> list[Point]:
    """(name, its number among those of one name, before, half or after), as they come."""
    listing = root / "points.jsonl"

    def arm() -> None:
        def note(name: str, when: str) -> None:
            with listing.open("a") as file:
                print(json.dumps([name, when]), file=file)

        Taps(root / "list", note, "out").__enter__()

    (root / "list").mkdir()
    if run(model, root / "list" / "out", arm):
        raise SystemExit("a run that nothing disturbed failed")
    counts: dict[tuple[str, str], int] = {}
    found: list[Point] = []
    for name, when in map(json.loads, listing.read_text().splitlines()):
        counts[name, when] = counts.get((name, when), 0) + 1
        found.append((name, counts[name, when], when))
    return found


def two(root: Path, lines: list[list[str]]) -> list[tuple[int, str]]:
    """The exit code and the output of each of two processes that run the command lines together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    pids = []
    for rank in range(2):
        if pid := os.fork():
            pids.append(pid)
            continue
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (root / f"rank-{rank}").open("w") as out, contextlib.redirect_stdout(out), join_world("cpu"):
            codes = [cli.run(words) for words in lines]
        os._exit(max(codes))
    del os.environ["WORLD_SIZE"]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return [(code, (root / f"rank-{rank}").read_text()) for rank, code in enumerate(codes)]


def main() -> None:
    torch.set_num_threads(1)
    root, model, number = Path(sys.argv[1]), load(sys.argv[2], device="cpu"), int(sys.argv[3])
    together = two(root, json.loads(sys.argv[4]))
    run(model, root / "straight")
    expected = contents(root / "straight")
    reached: list[str] = []
    wrong: list[str] = []

    def check(what: str, folder: Path, code: int) -> None:
        if code != signal.SIGKILL:
            wrong.append(f"{what}: not reached, ended with {code}")
            return
        reached.append(what)
        left = {name: data for name, data in contents(folder).items() if name.startswith("part-")}
        if any(data != expected[name] for name, data in left.items()):
            wrong.append(f"{what}: left a part that is not whole")
        if code := run(model, folder):
            wrong.append(f"{what}: going on ended with {code}")
        elif contents(folder) != expected:
            wrong.append(f"{what}: another result, or files left over")
        shutil.rmtree(folder)

    cases = points(model, root)
    for i, case in enumerate(random.Random(0).sample(cases, number) if number else cases):
        place = root / f"point-{i}"
        place.mkdir()

        def arm(case: Point = case, place: Path = place) -> None:
            count = 0

            def die(name: str, when: str) -> None:
                nonlocal count
                count += (name, when) == (case[0], case[2])
                if count == case[1] and (name, when) == (case[0], case[2]):
                    os.kill(os.getpid(), signal.SIGKILL)

            Taps(place, die, "out").__enter__()

        check(f"{case[2]} {case[0]} (number {case[1]})", place / "out", run(model, place / "out", arm))
    # One folder, killed again and again; then each moment by itself.
    chain = root / "chain"
    for _ in range(2):
        run(model, chain, batches=3)  # in the middle of the second part, then before the third is written
    check("killed three times", chain, run(model, chain, batches=1))
    for batches in (2, 5) if number else range(1, 6):
        folder = root / f"batches-{batches}"
        check(f"behind batch {batches}", folder, run(model, folder, batches=batches))
    print(json.dumps({"points": len(cases), "reached": reached, "wrong": wrong, "two": together}))


if __name__ == "__main__":
    main()
