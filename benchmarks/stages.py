"""Runs the stages of a TOML file, for work that takes longer than a machine is available: it stops and resumes.

    python benchmarks/stages.py benchmarks/glue/table4.toml --data /data --out runs/table4 --minutes 9 --jobs 3
    python benchmarks/stages.py benchmarks/glue/table4.toml --out runs/table4 --list
    python benchmarks/stages.py FILE --data /data --out new --minutes 9 --finished small.tar.gz --back small.tar.gz

The same command resumes where the last one ended. A finished stage has a file in OUT/stages. A stage still running when
the minutes are over is asked to stop (SIGTERM), keeps its state and resumes, with --resume or by itself. Exit codes: 0
everything is done, 75 there is more to do, 1 a stage failed. --back archives the small files after every stage (numbers
and predictions, no weights). --finished restores them on another machine, without overwriting anything. Missing weights
are trained again if a remaining stage reads them; measurements of the earlier weights are kept.

The keys of a stage: `unmask` or `python`, the words of its command; `resume`, a run folder, for which --resume is added
once it has begun; `into`, a file for its output; `makes`, what must exist for the stage to be done; `beside`, a name
shared by consecutive stages that may run at the same time. {data}, {out}, {here} and the [settings] are replaced by
their values; --set changes a setting. Commands run in the folder --data, so a path in a setting must be absolute or
relative to it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import unmask
from archives import only_begun, pack, unpack
from runs import at_its_end
from unmask.storage.atomic import atomic_text

GOES_ON = 75  # how a command of unmask ends that was asked to stop
GRACE = 45.0  # seconds in which a stage that is asked to stop may save
SMALL = ("*.json", "*.jsonl", "*.md", "*.csv", "*.svg")
SUFFIXES = {pattern[1:] for pattern in SMALL}
MOST = 1 << 22  # bytes of a small file


@dataclass(frozen=True)
class Stage:
    """A command. said: the same without the places, which may be others on another machine. resume, into, makes: paths,
    where the file says so; beside: the name of those that may run at once.
    """

    name: str
    words: tuple[str, ...]
    said: str
    resume: Path | None
    into: Path | None
    makes: tuple[Path, ...]
    beside: str

    @property
    def results(self) -> tuple[Path, ...]:
        """What is there once it is done. An output that no archive holds may have stayed elsewhere."""
        return (*self.makes, *(into for into in (self.into,) if into is not None and into.suffix in SUFFIXES))


class Stages:
    """What a file says is to be done, and what OUT says of it."""

    def __init__(self, file: Path, data: str, out: Path, changes: dict[str, str]) -> None:
        said = tomllib.loads(file.read_text(encoding="utf-8"))
        settings = {name: str(value) for name, value in said.get("settings", {}).items()}
        if unknown := changes.keys() - settings.keys():
            raise SystemExit(f"{file} has no setting {min(unknown)!r}; known: {', '.join(sorted(settings))}")
        self.out = out.absolute()
        places = {"data": os.path.abspath(data), "out": str(self.out), "here": str(file.parent.absolute())}
        self.settings = settings | changes
        self.values = self.settings | places
        self.stages = [self._stage(one) for one in said["stage"]]

    def _stage(self, said: dict[str, Any]) -> Stage:
        own = dict(said)
        name, beside = own.pop("name"), own.pop("beside", "")
        module = ["-m", "unmask"] if "unmask" in own else []
        text = own.pop("unmask", None) or own.pop("python")
        words, named = ((*module, *self._words(text, values)) for values in (self.values, self.settings))
        resume, into = own.pop("resume", None), own.pop("into", None)
        paths = {
            key: None if text is None else Path(filled(text, self.values)) for key, text in (("r", resume), ("i", into))
        }
        makes = tuple(Path(filled(text, self.values)) for text in own.pop("makes", ()))
        if own:
            raise SystemExit(f"stage {name}: unknown key {min(own)!r}")
        return Stage(name, words, shlex.join(named), paths["r"], paths["i"], makes, beside or name)

    def _words(self, text: str, values: dict[str, str]) -> list[str]:
        """A setting may be several words; a path with a space stays one."""
        words = []
        for word in shlex.split(text):
            alone = word.startswith("{") and word.endswith("}") and word[1:-1] in self.settings
            words += shlex.split(filled(word, values)) if alone else [filled(word, values)]
        return words

    def marker(self, stage: Stage) -> Path:
        return self.out / "stages" / f"{stage.name}.json"

    def done(self, stage: Stage) -> dict[str, Any] | None:
        """What is written down of a stage that is done, and whose things are there."""
        if not self.marker(stage).exists() or not all(path.exists() for path in stage.results):
            return None
        said: dict[str, Any] = json.loads(self.marker(stage).read_text(encoding="utf-8"))
        if said["words"] != stage.said:
            raise SystemExit(f"{stage.name} was done as `{said['words']}`, not `{stage.said}`: give another --out")
        return said

    def gives(self, stage: Stage) -> set[str]:
        """What of a stage's the words of later ones name and no archive holds: weights, and the run that has them."""
        heavy = {str(path) for path in stage.makes if path.suffix not in SUFFIXES}
        return heavy | ({str(stage.resume)} if stage.resume is not None else set())

    def left(self) -> list[Stage]:
        """What is to be done, in order. One that was done elsewhere and whose weights are not here is done again only
        where one that is left reads them."""
        left: list[Stage] = []
        for stage in reversed(self.stages):
            if self.done(stage) is not None:
                continue
            read = {word.removeprefix("hf:") for later in left for word in later.words}
            if read & self.gives(stage) or not self.done_elsewhere(stage):
                left.insert(0, stage)
        return left

    def done_elsewhere(self, stage: Stage) -> bool:
        """Whether an archive says that it is done, and all that is not here is what no archive holds."""
        if not self.marker(stage).exists() or any(
            path.suffix in SUFFIXES and not path.exists() for path in stage.results
        ):
            return False
        return bool(json.loads(self.marker(stage).read_text(encoding="utf-8"))["words"] == stage.said)

    def at_its_end(self, stage: Stage) -> bool:
        """Whether its run, begun by this very command, has made its last step: stopped before that was written down."""
        begun = self.marker(stage).with_suffix(".begun")
        known = begun.is_file() and begun.read_text(encoding="utf-8") == stage.said
        return known and stage.resume is not None and at_its_end(stage.resume)

    def write_down(self, stage: Stage, seconds: float) -> None:
        """That a stage is done."""
        said = {"words": stage.said, "seconds": round(seconds, 1)}
        atomic_text(self.marker(stage), json.dumps(said) + "\n")

    def small(self) -> Iterator[Path]:
        """Numbers, predictions and tables; one that is too large for that is told, and stays behind. Nothing of what is
        a model's: without its weights it would look as if it were there."""
        made = {path for stage in self.stages for path in stage.makes}
        for pattern in SMALL:
            for path in sorted(self.out.rglob(pattern)):
                heavy = {"model", "checkpoints"} & {*path.relative_to(self.out).parts} or made & {*path.parents}
                if heavy or not path.is_file():
                    continue
                if path.stat().st_size <= MOST:
                    yield path
                else:
                    print(f"{path} has more than {MOST / 2**20:.0f} MiB and stays behind", file=sys.stderr, flush=True)

    def take_back(self, archive: Path) -> None:
        """What is small, into an archive, whole or not at all."""
        pack(archive, self.small(), self.out)

    def bring(self, archive: Path) -> int:
        """Put what an archive holds in place where nothing is; how many files that are. What a stage has only begun is
        of weights that are not here, and stays away."""
        count = unpack(archive, self.out, lambda name: name.startswith("stages/") and name.endswith(".json"))
        begun = only_begun([(stage.words, self.marker(stage).exists()) for stage in self.stages], self.out)
        away = ("stages/", *begun)
        return count + unpack(
            archive, self.out, lambda name: Path(name).suffix in SUFFIXES and not name.startswith(away)
        )


def filled(text: str, values: dict[str, str]) -> str:
    """A text with values in the places of their names.

    >>> filled("{out}/{x}", {"out": "runs"})
    'runs/{x}'
    """
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


@dataclass
class Running:
    stage: Stage
    process: subprocess.Popen[bytes]
    log: Path
    began: float


def begin(stages: Stages, stage: Stage) -> Running:
    words = [
        *stage.words,
        *(["--resume"] if stage.resume is not None and (stage.resume / "checkpoints").exists() else []),
    ]
    log = stages.out / "stages" / f"{stage.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    printed = log.with_suffix(".out")
    atomic_text(log.with_suffix(".begun"), stage.said)
    with log.open("ab") as said, printed.open("wb") as out:
        how: dict[str, Any] = {"stdout": out, "stderr": said, "cwd": stages.values["data"], "env": environment()}
        process = subprocess.Popen([sys.executable, *words], **how)
    lost = "its weights are not here, and what was measured of those before stays"
    again = f", again: {lost if stages.gives(stage) else 'its output is not here'}"
    print(f"{stage.name}: begun{again if stages.marker(stage).exists() else ''}", flush=True)
    return Running(stage, process, log, time.monotonic())


def environment() -> dict[str, str]:
    """As here, with this very unmask, whatever the folder that a command runs in."""
    before = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(unmask.__file__).parents[1]), *before])}


def ended(stages: Stages, running: Running) -> bool:
    """Write down that a stage is done; False: there is more to do; one that failed ends everything."""
    stage, code = running.stage, running.process.returncode
    seconds = time.monotonic() - running.began
    printed = running.log.with_suffix(".out").read_text(encoding="utf-8")
    if code == GOES_ON or code == -signal.SIGTERM:
        print(f"{stage.name}: stopped after {seconds:.0f} s, to go on", flush=True)
        return False
    if code:
        tail = running.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        raise SystemExit("\n".join([f"{stage.name} failed with exit code {code}:", *tail]))
    if stage.into is not None:
        stage.into.parent.mkdir(parents=True, exist_ok=True)
        atomic_text(stage.into, printed)
    stages.write_down(stage, seconds)
    print(
        f"{stage.name}: done in {seconds:.0f} s",
        *([printed.rstrip()] if stage.into is None else []),
        sep="\n",
        flush=True,
    )
    return True


def work(stages: Stages, args: argparse.Namespace) -> bool:
    """Run what is left until the time is over; whether all is done."""
    until = time.monotonic() + 60 * args.minutes
    groups = [list(group) for _, group in groupby(stages.left(), lambda stage: stage.beside)]
    return all(run_group(stages, group, args, until) for group in groups)


def run_group(stages: Stages, waiting: list[Stage], args: argparse.Namespace, until: float) -> bool:
    """Stages that may run at once."""
    running: list[Running] = []
    whole = True
    try:
        while waiting or running:
            while waiting and len(running) < args.jobs and time.monotonic() < until - GRACE:
                if stages.at_its_end(waiting[0]):
                    stages.write_down(waiting.pop(0), 0.0)
                else:
                    running.append(begin(stages, waiting.pop(0)))
            if not running:
                return whole and not waiting  # no time is left for those that wait
            time.sleep(0.2)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                whole &= ended(stages, one)
                if args.back:
                    stages.take_back(args.back)
            if time.monotonic() >= until - GRACE and running:
                stop(running)
    finally:
        stop(running)
    return whole


def stop(running: list[Running]) -> None:
    """Ask them to save and end; one that does not in time is killed, and goes on from its last checkpoint."""
    for one in running:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
    until = time.monotonic() + GRACE - 5
    for one in running:
        try:
            one.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
            one.process.returncode = GOES_ON


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", default=".", help="the folder with the data; commands run in it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for so long; 0: not at all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="stages at once, where the file allows it")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", dest="changes")
    parser.add_argument("--list", action="store_true", help="print what is done and what is not, and run nothing")
    parser.add_argument("--finished", type=Path, metavar="FILE.tar.gz", help="put its small files in place first")
    parser.add_argument("--back", type=Path, metavar="FILE.tar.gz", help="keep all small files there")
    args = parser.parse_args(words)
    if odd := [one for one in args.changes if "=" not in one]:
        parser.error(f"--set takes NAME=VALUE, got {odd[0]!r}")
    stages = Stages(args.file, args.data, args.out, dict(one.split("=", 1) for one in args.changes))
    if args.finished:
        print(f"{stages.bring(args.finished)} files were put in place")
    if not args.list and work(stages, args):
        return 0
    left = stages.left()
    for stage in stages.stages:
        done = stages.done(stage)
        state = "done elsewhere" if done is None else f"done, {done['seconds']:.0f} s"
        print(f"{stage.name}: {'to do' if stage in left else state}")
    return 0 if args.list else GOES_ON


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(GOES_ON))  # what runs is asked to save first
    sys.exit(main())
