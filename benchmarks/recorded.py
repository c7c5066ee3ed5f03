"""The queue of recorded.toml: table 3, figure 2, table 5 and Multi30k, on a GPU available for minutes at a time.

    python benchmarks/recorded.py --list
    python benchmarks/recorded.py --pack sent --data /data [--only JOB]
    python benchmarks/recorded.py --minutes 9 --data sent --out runs/recorded --back new.tar.gz [--finished old.tar.gz]
    python benchmarks/recorded.py --toy --data /data --out rehearsal --device cpu

A job is a list of steps, each an unmask command; the same call resumes where the last one stopped. A finished step
leaves a marker file. Networks are too large to transfer, so they and their marker files stay on the machine (stays);
another machine trains them again if a later step of the job needs them. Everything else is small. --back archives the
results and texts, rewritten after every step, in archives of at most 15 MiB (new.tar.gz, new-2.tar.gz, ...), and
--finished restores them. A step starts if its estimated seconds fit into the remaining time. Training starts with less
time too: it is stopped in time and resumes with the next call on the same machine.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from archives import only_begun, pack, unpack
from runs import at_its_end
from unmask.config import read_recipe
from unmask.errors import Stopped
from unmask.storage.atomic import atomic_text

HERE = Path(__file__).parent
MOST = 15 * 2**20  # bytes of an archive
GOES_ON = "stopped: it goes on with the next call"
GRACE = 40.0  # seconds that a command gets to stop in
TOY = 15.0  # seconds of a step of the rehearsal
STEPS = "steps"  # in the folder of results: a file for each finished step
RECIPE = re.compile(r"\{here\}/.*\.toml")
UNMASK = [sys.executable, "-c", "import sys; from unmask.cli import main; sys.exit(main())"]


@dataclass(frozen=True)
class Step:
    """A command. key: a hash of it, of the recipe that it names and of what makes the networks that it reads; it does
    not depend on where folders lie. stays: the folder that it makes and that does not travel. prints: the file that
    gets its stdout.
    """

    words: tuple[str, ...]
    key: str
    seconds: float
    stays: str = ""
    prints: str = ""

    @property
    def title(self) -> str:
        return " ".join(word for word in self.words[:2] if not word.startswith("-"))


@dataclass(frozen=True)
class Job:
    name: str
    steps: tuple[Step, ...]
    data: tuple[str, ...]  # files that it reads, in the folder of the data


class Queue:
    """The jobs, and what the folder of results says of them."""

    def __init__(self, text: str, out: Path, data: str, *, toy: bool = False, device: str | None = None) -> None:
        given = tomllib.loads(text)
        self.out, self.device, self.toy = out, device, toy
        self.values = {"data": data, "out": str(out), "here": str(HERE)} | given["size"]["toy" if toy else "full"]
        self.jobs = [job for one in given["job"] for job in self._jobs(one)]

    def _jobs(self, one: Mapping[str, Any]) -> Iterator[Job]:
        """One for each combination of what stands under `each`."""
        each: dict[str, list[Any]] = one.get("each", {})
        for values in itertools.product(*each.values()):
            known = self.values | dict(zip(each, map(str, values), strict=True))
            name = one["name"].format_map(known)
            steps: list[Step] = []
            for step in one["steps"]:
                steps.append(self._step(step, known, steps))
            yield Job(name, tuple(steps), tuple(one.get("data", ())))

    def _step(self, one: Mapping[str, Any], known: Mapping[str, Any], before: list[Step]) -> Step:
        nowhere = {name: f"{{{name}}}" for name in ("data", "out", "here")}
        named: list[Any] = words_of([*one["run"], one.get("prints", "")], {**known, **nowhere})
        named += [read_recipe(word.format(here=HERE)) for word in named if RECIPE.fullmatch(word)]
        words = words_of(one["run"], known)
        named += [earlier.key for earlier in before if earlier.stays and earlier.stays in words]
        key = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:12]
        if self.device is not None and words[0] != "windows":
            words += ["--device", self.device]
        about = {name: spelled(one[name], known) for name in ("stays", "prints") if name in one}
        return Step(tuple(words), key, TOY if self.toy else float(one["seconds"]), **about)

    def mark(self, step: Step) -> Path:
        """The file that says that a step is finished: beside what it has made, where that stays."""
        folder = self.out / STEPS if not step.stays else Path(step.stays)
        return folder / f"{step.key}.finished.json"

    def finished(self, step: Step) -> bool:
        return self.mark(step).is_file()

    def write_down(self, step: Step, began: float) -> None:
        """That a step is finished."""
        mark = self.mark(step)
        mark.parent.mkdir(parents=True, exist_ok=True)
        took = {"words": step.words, "seconds": round(time.monotonic() - began, 1)}
        atomic_text(mark, json.dumps(took, indent=1) + "\n")

    def in_the_way(self, step: Step) -> str:
        """Why a network is not trained in its folder: what another step has begun is neither gone on with nor lost."""
        begun = begun_by(step)
        if not step.stays or not begun.is_file() or begun.read_text(encoding="utf-8") == step.key:
            return ""
        return f"failed: {step.stays} was begun by another command (--toy, or an older recipe): give another --out"

    def due(self, job: Job) -> list[Step]:
        """What is left of a job, in order; networks only where a step that is left reads them."""
        left: list[Step] = []
        for step in reversed(job.steps):
            wanted = not step.stays or any(step.stays in later.words for later in left)
            if wanted and not self.finished(step):
                left.insert(0, step)
        return left

    def bring(self, archive: Path) -> None:
        """Put what other machines have finished in place, where nothing is; what they had only begun is of networks
        that are not here."""
        parts = list(parts_of(archive))
        if not parts:
            raise SystemExit(f"cannot put {archive} in place: there is no such file")
        for part in parts:
            unpack(part, self.out, lambda name: name.startswith(f"{STEPS}/"))
        steps = {step.key: step for job in self.jobs for step in job.steps if not step.stays}.values()
        begun = only_begun([(step.words, self.finished(step)) for step in steps], self.out)
        for part in parts:
            unpack(part, self.out, lambda name: not name.startswith(begun))

    def take_back(self, archive: Path) -> list[Path]:
        """All results, without what stays; each archive whole or not at all."""
        stays = {Path(step.stays) for job in self.jobs for step in job.steps if step.stays}
        files = [
            path
            for path in sorted(self.out.rglob("*"))
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(".tar.gz")
            if not any(folder in path.parents for folder in stays)
        ]
        groups, made = [files] if files else [], list[Path]()
        while groups:
            group, path = groups.pop(0), part_of(archive, len(made) + 1)
            pack(path, group, self.out)
            if path.stat().st_size > MOST and len(group) > 1:
                groups = [group[: len(group) // 2], group[len(group) // 2 :], *groups]
                continue
            if path.stat().st_size > MOST:
                print(f"{path.name} has more than {MOST / 2**20:.0f} MiB: {group[0]} is as large", file=sys.stderr)
            made.append(path)
        for older in parts_of(archive, len(made) + 1):
            older.unlink()
        return made


def words_of(given: list[str], known: Mapping[str, Any]) -> list[str]:
    """A command with the values in their places; a word that names a list stands for all of its words."""
    words: list[str] = []
    for word in given:
        held = known.get(word[1:-1]) if word.startswith("{") and word.endswith("}") else None
        words += [spelled(part, known) for part in held] if isinstance(held, list) else [spelled(word, known)]
    return words


def spelled(word: str, known: Mapping[str, Any]) -> str:
    """A word with the values in their places; braces of JSON stay.

    >>> spelled('{"steps": <T>}', {"T": 4}), spelled("{out}/a", {"out": "runs"})
    ('{"steps": 4}', 'runs/a')
    """
    if word.startswith('{"'):
        for name, value in known.items():
            word = word.replace(f"<{name}>", str(value))
        return word
    return word.format_map(known)


def part_of(archive: Path, number: int) -> Path:
    stem = archive.name.removesuffix(".tar.gz")
    return archive if number == 1 else archive.with_name(f"{stem}-{number}.tar.gz")


def parts_of(archive: Path, first: int = 1) -> Iterator[Path]:
    for number in itertools.count(first):
        if not (one := part_of(archive, number)).is_file():
            return
        yield one


def begun_by(step: Step) -> Path:
    """The file that says which step a network's folder was begun by."""
    run = Path(step.stays)
    return run.parent / f".{run.name}.begun"


def started(queue: Queue, step: Step) -> list[str]:
    """The command line of a step; a training run that has saved something goes on with it."""
    words, run = list(step.words), Path(step.stays)
    if words[0] == "windows":
        return [sys.executable, str(HERE / "windows.py"), *words[1:]]
    if words[0] == "train" and begun_by(step).is_file():
        if any(run.glob("checkpoints/step-*")):
            words = ["train", step.stays, "--resume", *(words[-2:] if queue.device is not None else [])]
        elif run.is_dir():
            shutil.rmtree(run)  # begun and stopped before anything was saved
    elif words[0] == "train":
        run.parent.mkdir(parents=True, exist_ok=True)
        atomic_text(begun_by(step), step.key)
    return [*UNMASK, *words]


def perform(queue: Queue, step: Step, seconds: float) -> str:
    """Run a step for so many seconds, then ask it to stop: "" where it is finished, else what became of it."""
    if problem := queue.in_the_way(step):
        return problem
    began = time.monotonic()
    if step.stays and begun_by(step).is_file() and at_its_end(Path(step.stays)):  # stopped before that was written down
        queue.write_down(step, began)
        return ""
    stdout = subprocess.PIPE if step.prints else None
    running = subprocess.Popen([*started(queue, step)], stdout=stdout, text=True)
    try:
        said, _ = running.communicate(timeout=max(1.0, seconds))
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as e:
        running.send_signal(signal.SIGTERM)
        try:
            running.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
        if isinstance(e, KeyboardInterrupt):
            raise Stopped("stopped: the same command goes on") from None
        return GOES_ON
    if running.returncode == Stopped.exit_code:
        return GOES_ON
    if running.returncode:
        return f"failed with exit code {running.returncode}"
    if step.prints:
        Path(step.prints).parent.mkdir(parents=True, exist_ok=True)
        atomic_text(Path(step.prints), said)
    queue.write_down(step, began)
    return ""


def work(queue: Queue, args: argparse.Namespace) -> dict[str, str]:
    """Run what fits; what became of the other jobs, by name."""
    until = time.monotonic() + (60 * args.minutes if args.minutes else float("inf"))
    told: dict[str, str] = {}
    for job in queue.jobs:
        if args.only and args.only not in job.name:
            continue
        for step in queue.due(job):
            left = until - time.monotonic() - GRACE  # in which it can stop
            if step.seconds > left and not (step.words[0] == "train" and left > 2 * GRACE):
                told[job.name] = f"waiting: {step.title} takes {step.seconds:.0f} s, {max(left, 0):.0f} are left"
                break
            print(f"{job.name}: {' '.join(step.words)}", file=sys.stderr, flush=True)
            try:
                problem = perform(queue, step, min(left, 1e6))
            finally:  # also where somebody stops it
                if args.back:
                    queue.take_back(args.back)
            if problem:
                told[job.name] = f"{step.title} {problem}"
                break
    return told


def states(queue: Queue, told: Mapping[str, str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, how in (("job", "left"), ("steps", "right"), ("seconds", "right"), ("state", "left")):
        table.add_column(name, justify=how, no_wrap=name != "state")  # type: ignore[arg-type]
    for job in queue.jobs:
        due = queue.due(job)
        state = told.get(job.name, "waiting" if due else "finished")
        seconds = f"{sum(step.seconds for step in due):,.0f}" if due else ""
        table.add_row(job.name, f"{len(job.steps) - len(due)}/{len(job.steps)}", seconds, state)
    return table


def send(queue: Queue, args: argparse.Namespace) -> int:
    """Copy what the jobs read into a folder, and say how large it is."""
    total, missing = 0, []
    wanted = dict.fromkeys(name for job in queue.jobs if not args.only or args.only in job.name for name in job.data)
    for pattern in wanted:
        found = sorted(Path(args.data).glob(pattern))
        missing += [pattern] if not found else []
        for file in found:
            target = args.pack / file.relative_to(args.data)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            total += file.stat().st_size
    print(f"{args.pack}: {total / 2**20:.1f} MiB")
    if missing:
        print(f"not in {args.data}: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/recorded"), help="the results (default runs/recorded)")
    parser.add_argument("--data", default=".", help="the folder with wiki/, multi30k/ and the sets of table 3")
    parser.add_argument("--minutes", type=float, help="run what fits (default: all)")
    parser.add_argument("--list", action="store_true", help="print what is finished and what is not, and run nothing")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="copy the data that the jobs read, and run nothing")
    parser.add_argument("--only", metavar="JOB", help="jobs with this in their name")
    parser.add_argument("--finished", type=Path, metavar="FILE.tar.gz", help="put its results in place first")
    parser.add_argument("--back", type=Path, metavar="FILE.tar.gz", help="keep all results there, after every step")
    parser.add_argument("--toy", action="store_true", help="tiny networks, a few texts: a rehearsal on a CPU")
    parser.add_argument("--file", type=Path, default=HERE / "recorded.toml", help="the queue")
    parser.add_argument("--device")
    args = parser.parse_args(words)
    queue = Queue(args.file.read_text(encoding="utf-8"), args.out, args.data, toy=args.toy, device=args.device)
    if args.only and not any(args.only in job.name for job in queue.jobs):
        parser.error(f"no job has {args.only!r} in its name: {', '.join(job.name for job in queue.jobs)}")
    if args.pack:
        return send(queue, args)
    if args.finished:
        args.out.mkdir(parents=True, exist_ok=True)
        queue.bring(args.finished)
    try:
        told = {} if args.list else work(queue, args)
    except (Stopped, KeyboardInterrupt):
        print("stopped: the same command goes on", file=sys.stderr)
        return Stopped.exit_code
    Console(highlight=False, markup=False).print(states(queue, told))
    if any("failed" in state for state in told.values()):
        return 1
    return Stopped.exit_code if told else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is asked to save first
    sys.exit(main())
