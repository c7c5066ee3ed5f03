"""The queue of experiments.toml: runs the next unfinished trials for the given minutes.

    python benchmarks/experiments.py --list --out runs/experiments
    python benchmarks/experiments.py --minutes 9 --jobs 3 --data /data --out runs/experiments [--only "Table 8"]
    python benchmarks/experiments.py --minutes 9 --data /data --out new --finished small.tar.gz --back small.tar.gz

The run folders hold the state. A new machine has none of them: --finished restores the small files of finished trials,
so that they are not repeated, and --back archives all small files, rewritten after every trial. Checkpoints are not
archived, so a trial that does not fit into the remaining minutes is skipped, with the reason. --begin starts it
nevertheless: on a machine that keeps its files, the next call goes on with it. At the end of the minutes whatever still
runs saves its state and stops, which takes some seconds. A trial's duration is estimated from other trials of the same
system and size, or from experiments.toml. --jobs: trials of one setting that share the device. Two calls whose
experiments (--only) have no setting in common may share --out and the device; each needs its own --back.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from archives import pack, unpack
from unmask.axes import short
from unmask.cli._compared import Lines
from unmask.cli.compare import number
from unmask.comparison.compare import Watcher, compare
from unmask.comparison.plan import TOKENIZER, Planned
from unmask.comparison.stored import PLAN
from unmask.comparison.trial import FOLDER, RUNS, Trial, read_trial
from unmask.errors import Stopped, UnmaskError
from unmask.reporting.metrics_file import METRICS

HERE = Path(__file__).parent
SYSTEMS = HERE / "systems"
# At most so many seconds of a trial are beside its training steps: start, packing, validations, measuring.
OVERHEAD = 60.0
FEW = 4  # the newest trials, of which the slowest tells these seconds
RESULTS = ("results.md", "results.json", "results.csv", "results.svg")


@dataclass(frozen=True)
class Setting:
    """What the trials of a folder have in common."""

    name: str
    tokens: int
    options: dict[str, str]
    tokens_per_second: float
    reference: str
    draws: int = 8
    also: tuple[str, ...] = ()
    valid_rows: int | None = None  # measured ones; None: all
    prepare_seconds: float = 0.0  # that the first trial on a machine takes longer: tokenizer, packing

    def as_fast_as(self, other: Setting) -> bool:
        """Whether a trial here tells how fast one of `other` is: only the amount of text may differ, and a trial here
        must not be much shorter, since the rate of a short trial is mostly that of its start.
        """
        mine, theirs = ({k: v for k, v in one.options.items() if k != "data.share"} for one in (self, other))
        return mine == theirs and 4 * self.tokens >= other.tokens


@dataclass(frozen=True)
class Item:
    """A trial of the queue; experiments: those that want it, the first of which decides its place."""

    setting: Setting
    system: str
    seed: int
    experiments: list[str]

    @property
    def name(self) -> str:
        return f"{self.system}-s{self.seed}"


class Queue:
    """What is to be done, and what the folder says of it."""

    def __init__(self, text: str, out: Path, systems: Path = SYSTEMS, jobs: int = 1) -> None:
        data = tomllib.loads(text)
        self.out, self.systems, self.jobs = out, systems, jobs
        self.rates, self.overhead = data.get("rates", {}), OVERHEAD
        self.settings = {name: _setting(name, data["setting"]) for name in data["setting"]}
        self.items = list(self._items(data["experiment"]))

    def _items(self, experiments: list[dict[str, Any]]) -> Iterator[Item]:
        items: dict[tuple[str, str, int], Item] = {}
        for experiment in experiments:
            most = max(experiment["systems"].values())
            for seed in range(most):  # every system once before any comes again
                for system, seeds in experiment["systems"].items():
                    if seed < seeds:
                        key = experiment["setting"], system, seed
                        item = items.setdefault(key, Item(self.settings[key[0]], system, seed, []))
                        item.experiments.append(experiment["name"])
        yield from items.values()

    def trial(self, item: Item) -> Trial | None:
        """What became of it."""
        return read_trial(self.out / item.setting.name, item.name)

    def seconds(self, item: Item) -> float:
        """How long it will take, or the rest of it if it has begun."""
        setting = item.setting
        new = not (self.out / setting.name / TOKENIZER).exists()  # of all that is there, no archive brings it
        rest = setting.tokens * (1 - self.begun(item)) / self.rate(item)
        return self.overhead + rest + setting.prepare_seconds * new

    def rate(self, item: Item) -> float:
        """Tokens per second: those of a finished trial of the system at this size, or those stated, scaled by what the
        finished trials of other systems reached of theirs.

        Until as many at once have been measured, trials that share the device are taken to gain nothing by it.
        """
        setting = item.setting

        def stated(system: str) -> float:
            return setting.tokens_per_second * self.rates.get(system, 1.0)

        known = [(other.setting, self.trial(other)) for other in self.items if other.setting.as_fast_as(setting)]
        done = [(where, trial) for where, trial in known if trial is not None and trial.finished]
        done.sort(key=lambda pair: (pair[1].at_once == self.jobs, pair[0] == setting, pair[0].tokens))
        own = [trial for _, trial in done if trial.system == item.system]
        if own:
            return own[-1].tokens_per_second * (1 if own[-1].at_once == self.jobs else own[-1].at_once / self.jobs)
        alike = [trial for _, trial in done if trial.at_once == self.jobs]
        if alike:
            return stated(item.system) * sum(t.tokens_per_second / stated(t.system) for t in alike) / len(alike)
        return stated(item.system) / self.jobs

    def begun(self, item: Item) -> float:
        """The part of its training that a stopped trial has saved."""
        checkpoints = self.out / item.setting.name / RUNS / item.name / "checkpoints"
        steps = [int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")]
        options = item.setting.options
        tokens = max(steps, default=0) * int(options["batch"]) * int(options["data.length"])
        return min(1.0, tokens / item.setting.tokens)

    def run(self, items: list[Item], data: str, device: str | None, watch: Watcher) -> None:
        """Trials of one setting, each of their systems with each of their seeds."""
        setting = items[0].setting
        known = {other.system for other in self.items if self.trial(other) and other.setting == setting}
        systems = systems_of(items)
        compare(
            [self.systems / f"{system}.toml" for system in systems],
            tokens=setting.tokens,
            out=self.out / setting.name,
            seeds=list(dict.fromkeys(item.seed for item in items)),
            overrides={key: str(value).replace("{data}", data) for key, value in setting.options.items()},
            draws=setting.draws,
            valid_rows=setting.valid_rows,
            also=setting.also,
            reference=setting.reference if setting.reference in known.union(systems) else None,
            device=device,
            jobs=self.jobs,
            watch=watch,
        )

    def bring(self, small: Path) -> int:
        """Put what an archive holds of trials in place where there is nothing; how many they are."""
        places = {f"{item.setting.name}/{FOLDER}/{item.name}.json" for item in self.items}
        count = unpack(small, self.out, places.__contains__)
        unpack(small, self.out, {f"{name}/{PLAN}" for name in self.settings}.__contains__)
        unpack(small, self.out, {self._curve(item).as_posix() for item in self._finished()}.__contains__)
        return count

    def take_back(self, small: Path) -> None:
        """Put what is small into an archive, whole or not at all: plans, trials and results, and curves of finished
        trials."""
        files = [file for name in self.settings for file in sorted((self.out / name).glob(f"{FOLDER}/[!.]*.json"))]
        files += [self.out / name / file for name in self.settings for file in (PLAN, *RESULTS)]
        files += [self.out / self._curve(item) for item in self._finished()]
        pack(small, filter(Path.exists, files), self.out)

    def _finished(self) -> list[Item]:
        return [item for item in self.items if (done := self.trial(item)) is not None and done.finished]

    @staticmethod
    def _curve(item: Item) -> Path:
        return Path(item.setting.name, RUNS, item.name, METRICS)


def _setting(name: str, settings: dict[str, Any]) -> Setting:
    own = dict(settings[name])
    other = settings[own.pop("like")] if "like" in own else {}
    whole = other | own | {"options": other.get("options", {}) | own.get("options", {})}
    also = tuple(whole.pop("also", ()))
    return Setting(name, number(whole.pop("tokens")), whole.pop("options"), also=also, **whole)


def states(queue: Queue, skipped: dict[str, str]) -> Table:
    """A short table: each trial once, under the first experiment that wants it."""
    table = Table(box=None, pad_edge=False)
    for name in ("trial", "setting", "tokens", "minutes", "state"):
        table.add_column(name, no_wrap=name != "state", justify="right" if name in ("tokens", "minutes") else "left")
    before = ""
    for item in queue.items:
        done = queue.trial(item)
        begun = queue.begun(item)
        words = skipped.get(place(item), f"begun, {begun:.0%}" if begun else "waiting")
        if done is not None:
            words = f"{done.nats_per_token:.4f} nats/token" if done.finished else f"{done.state}: {done.reason}"
        elif not (queue.systems / f"{item.system}.toml").exists():
            words = "no recipe"
        first = item.experiments[0]
        if first != before:
            table.add_row(first, style="bold")
        minutes = f"{queue.seconds(item) / 60:.1f}"
        table.add_row(f"  {item.name}", item.setting.name, short(item.setting.tokens), minutes, words)
        before = first
    return table


class Minutes(Lines):
    """Begins what fits the time that is left, stops when it is over, and keeps what is small after every trial."""

    def __init__(self, queue: Queue, args: argparse.Namespace, skipped: dict[str, str]) -> None:
        super().__init__(args.jobs)
        self.queue, self.back, self.begin, self.skipped = queue, args.back, args.begin, skipped
        self.until = time.monotonic() + 60 * args.minutes
        self.items: dict[str, Item] = {}  # of this call of `compare`, by the trial's name
        self.began: dict[str, float] = {}
        self.beside: deque[float] = deque(maxlen=FEW)  # seconds beside the training steps of the last trials

    def admits(self, trial: Planned) -> bool:
        item = self.items[trial.name]
        needed, left = self.queue.seconds(item), self.until - time.monotonic()
        fits = needed <= left or (self.begin and left > OVERHEAD / 2)  # less is spent before the first step
        if not fits:
            words = f"skipped: takes {needed / 60:.1f} minutes, {max(left, 0) / 60:.1f} are left"
            self.skipped[place(item)] = words
        return fits

    def stops(self) -> bool:
        return time.monotonic() > self.until

    def on_begin(self, trial: Planned) -> None:
        super().on_begin(trial)
        if not Path(trial.config.out).exists():  # one that goes on trained some of its seconds before
            self.began[trial.name] = time.monotonic()

    def on_end(self, trial: Planned, result: Trial) -> None:
        super().on_end(trial, result)
        began = self.began.pop(trial.name, None)
        if result.finished and began is not None:
            self.beside.append(time.monotonic() - began - result.seconds)
            self.queue.overhead = min(OVERHEAD, max(self.beside))
        self.keep()

    def keep(self) -> None:
        if self.back:
            self.queue.take_back(self.back)


def place(item: Item) -> str:
    return f"{item.setting.name}/{item.name}"


def waiting(queue: Queue, args: argparse.Namespace, skipped: dict[str, str]) -> Iterator[list[Item]]:
    """What is to be run, in order: neighbours of one setting together, where each system has the same seeds."""
    todo = []
    for item in queue.items:
        done = queue.trial(item)
        if args.only and not set(args.only) & set(item.experiments):
            continue
        if done is not None and (done.finished or not args.again):
            continue
        if (queue.systems / f"{item.system}.toml").exists():
            todo.append(item)
        else:
            skipped[place(item)] = "no recipe"
    together: list[Item] = []
    for _, group in groupby(todo, lambda item: (item.setting.name, item.seed)):
        items = list(group)
        if together and (together[0].setting, systems_of(together)) != (items[0].setting, systems_of(items)):
            yield together
            together = []
        together += items
    if together:
        yield together


def systems_of(items: list[Item]) -> list[str]:
    return list(dict.fromkeys(item.system for item in items))


def work(queue: Queue, args: argparse.Namespace) -> dict[str, str]:
    """Run what fits; why the rest was skipped, by its name."""
    skipped: dict[str, str] = {}
    watch = Minutes(queue, args, skipped)
    for group in waiting(queue, args, skipped):
        # One whose recipe does not fit the setting would refuse all of its group: then each goes by itself.
        for items in [group, *([item] for item in group if len(group) > 1)]:
            watch.items = {item.name: item for item in items}
            try:
                queue.run(items, args.data, args.device, watch)
                watch.keep()
                if items == group:
                    break
            except Stopped:
                watch.keep()
                if not watch.stops():
                    raise
                return skipped
            except UnmaskError as e:
                if len(items) == 1:
                    skipped[place(items[0])] = f"refused: {e}"
    return skipped


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for each setting is in it")
    parser.add_argument("--data", default=".", help="the folder with wiki/ and stories/")
    parser.add_argument("--minutes", type=float, default=0.0, help="run for so long; 0: nothing")
    parser.add_argument("--begin", action="store_true", help="also start what does not fit: a later call goes on there")
    parser.add_argument("--list", action="store_true", help="print what is done and what is not, and run nothing")
    parser.add_argument("--only", metavar="EXPERIMENT", action="append", help="of this one alone; may be repeated")
    parser.add_argument("--again", action="store_true", help="also what has failed before")
    parser.add_argument("--finished", type=Path, metavar="FILE.tar.gz", help="put its finished trials in place")
    parser.add_argument("--back", type=Path, metavar="FILE.tar.gz", help="keep all small files there")
    parser.add_argument("--file", type=Path, default=HERE / "experiments.toml", help="the queue")
    parser.add_argument("--systems", type=Path, default=SYSTEMS, help="the folder of the recipes")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trials at once")
    parser.add_argument("--device")
    args = parser.parse_args(words)
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    try:
        queue = Queue(args.file.read_text(encoding="utf-8"), args.out, args.systems, args.jobs)
    except (OSError, ValueError) as e:
        parser.error(f"cannot read the queue {args.file}: {e}")
    except KeyError as e:
        parser.error(f"the queue {args.file} does not say {e}")
    if unknown := set(args.only or []) - {name for item in queue.items for name in item.experiments}:
        parser.error(f"no experiment is called {min(unknown)!r}")
    if args.finished:
        print(f"{queue.bring(args.finished)} finished trials were put in place", file=sys.stderr)
    try:
        skipped = {} if args.list else work(queue, args)
    except Stopped as e:
        print(e, file=sys.stderr)
        return e.exit_code
    Console(highlight=False, markup=False).print(states(queue, skipped))
    return int(any(words.startswith("refused") for words in skipped.values()))


if __name__ == "__main__":
    sys.exit(main())
