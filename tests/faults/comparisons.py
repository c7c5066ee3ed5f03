"""Kills a comparison and looks at what is left. A program: it forks from one loaded process.

    python comparisons.py FOLDER CORPUS NUMBER

Kills at so many points at which the comparison's folder changes (0: at every kind of them), then lets it go on to the
end; its files must be those of one that nobody killed. Prints one JSON object: the cases, and every one in which
something was wrong.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from injection import Taps

import quick_gc
from unmask.comparison import work
from unmask.comparison.compare import Watcher, compare
from unmask.comparison.plan import Planned
from unmask.errors import UnmaskError

RECIPE = """
batch = 4
tokenizer = "bpe:300"
data = {{ train = {{ name = "text", path = "{corpus}" }}, length = 16, held_out = 0.1 }}
optim = {{ muon = false }}
objective = {{ name = "{objective}" }}
denoiser = {{ size = "nano", hidden = 16, blocks = 1, heads = 2, causal = {causal} }}
"""
Point = tuple[str, int, str]


class Told(Watcher):
    """Notes what is begun, in a file that outlives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_begin(self, trial: Planned) -> None:
        with self.path.open("a") as file:
            print(trial.name, file=file)


def steady_seconds() -> None:
    """What is compared bit for bit has no clock in it."""
    real = work._trained

    def trained(*args: Any) -> Any:
        done = real(*args)
        done.state["train_seconds"] = 1.0
        return done

    work._trained = trained


def run(recipes: list[str], root: Path, arm: Callable[[], None] = lambda: None) -> int:
    """Compare in a child; the signal that ended it, 0 for none, -1 where it failed."""
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -1 if status else 0
    try:
        arm()
        how: dict[str, Any] = {"tokens": 4 * 64, "valid_rows": 4, "draws": 1, "device": "cpu", "apart": False}
        found = compare(recipes, out=root / "out", watch=Told(root / "begun"), **how)
        os._exit(0 if found.ok else 2)
    except UnmaskError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)


def contents(root: Path) -> dict[str, Any]:
    """All files; of metrics what has no clock in it. Paths in them are those of this root."""
    files: dict[str, Any] = {}
    for path in sorted((root / "out").rglob("*")):
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            clocks = ("seconds", "train_seconds", "tokens_per_second")
            files[str(path.relative_to(root))] = [{k: v for k, v in line.items() if k not in clocks} for line in lines]
        elif path.is_file():
            files[str(path.relative_to(root))] = path.read_bytes().replace(str(root).encode(), b"ROOT")
    return files


def points(recipes: list[str], root: Path) -> list[Point]:
    """(name, its number among those of one name, before, half or after), as they come."""
    listing = root / "points.jsonl"

    def arm() -> None:
        def note(name: str, when: str) -> None:
            with listing.open("a") as file:
                print(json.dumps([name, when]), file=file)

        Taps(root, note, "out").__enter__()

    if run(recipes, root, arm):
        raise SystemExit("a comparison that nothing disturbed failed")
    counts: dict[tuple[str, str], int] = {}
    found: list[Point] = []
    for name, when in map(json.loads, listing.read_text().splitlines()):
        counts[name, when] = counts.get((name, when), 0) + 1
        found.append((name, counts[name, when], when))
    # Trials and steps do the same again: the first and the last point of a name stand for all of it.
    return [case for case in found if case[1] in (1, counts[case[0], case[2]])]


def one_point(recipes: list[str], root: Path, case: Point, expected: dict[str, Any]) -> str:
    """What is wrong with a comparison that is killed there and goes on; empty: nothing."""
    root.mkdir()

    def arm() -> None:
        count = 0

        def die(name: str, when: str) -> None:
            nonlocal count
            count += (name, when) == (case[0], case[2])
            if (name, when) == (case[0], case[2]) and count == case[1]:
                os.kill(os.getpid(), signal.SIGKILL)

        Taps(root, die, "out").__enter__()

    if run(recipes, root, arm) != signal.SIGKILL:
        return "not reached"
    finished = {path.stem for path in (root / "out" / "trials").glob("[!.]*.json")}
    (root / "begun").unlink(missing_ok=True)
    if code := run(recipes, root):
        return f"going on ended with {code}"
    begun = (root / "begun").read_text().split() if (root / "begun").exists() else []
    if again := finished & set(begun):
        return f"{sorted(again)} were done again"
    left = contents(root)
    differ = sorted(name for name in left.keys() | expected.keys() if left.get(name) != expected.get(name))
    return f"other files: {differ}" if differ else ""


def main() -> None:
    folder, corpus, number = Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3])
    quick_gc.install()
    torch.set_num_threads(1)  # a process that is forked must have no threads
    os.fsync = lambda descriptor: None  # what a kill leaves does not depend on it
    steady_seconds()
    recipes = []
    for name, causal in (("mdlm", "false"), ("ar", "true")):
        recipes.append(str(folder / f"{name}.toml"))
        Path(recipes[-1]).write_text(RECIPE.format(corpus=corpus, objective=name, causal=causal))
    (folder / "list").mkdir()
    cases = points(recipes, folder / "list")
    expected = contents(folder / "list")
    if number:
        # The save path has a matrix of its own; the one point at which finished checkpoints go is always among them.
        chosen = [case for case in cases if "checkpoint" not in case[0]]
        going = [case for case in cases if case[0].startswith("rename checkpoints")]
        cases = [*random.Random(0).sample(chosen, number - 1), going[-1]]
    wrong = []
    for i, case in enumerate(cases):
        if said := one_point(recipes, folder / f"case-{i}", case, expected):
            wrong.append(f"{case[2]} {case[0]} (number {case[1]}): {said}")
        shutil.rmtree(folder / f"case-{i}")
    print(json.dumps({"cases": [" ".join(map(str, case)) for case in cases], "wrong": wrong}))


if __name__ == "__main__":
    main()
