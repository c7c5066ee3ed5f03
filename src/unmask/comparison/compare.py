"""Train recipes side by side and report which differences are visible: the implementation of `unmask compare`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unmask.comparison.at_once import run_at_once
from unmask.comparison.plan import Plan, Planned, Protocol, check_reference, make_plan
from unmask.comparison.processes import run_apart
from unmask.comparison.quoted import figures_for
from unmask.comparison.report import write_report
from unmask.comparison.table import Table, make_table
from unmask.comparison.trial import FOLDER, Trial, read_trial
from unmask.comparison.work import Job, drop_checkpoints, run_trial
from unmask.devices import pick_device
from unmask.distributed.stopping import stop_requests
from unmask.distributed.world import World
from unmask.errors import Stopped, UsageError
from unmask.training.run_lock import one_writer


class Watcher:
    """Callbacks of a running comparison; override what you need. Only `stops` is called by two threads at a time."""

    def on_plan(self, plan: Plan, finished: list[Trial]) -> None:
        """Before the first trial: what will be run, and what is already finished."""

    def admits(self, trial: Planned) -> bool:
        """Whether the trial may start now; otherwise it is left for a later call."""
        return True

    def stops(self) -> bool:
        """Whether the running trials are to save their state and stop; asked several times a second, by any thread."""
        return False

    def on_begin(self, trial: Planned) -> None:
        """A trial starts or resumes."""

    def on_news(self, trial: Planned, news: Mapping[str, Any]) -> None:
        """A trial's progress: {"step", "loss", "rate"}, {"step", "valid"} or {"measuring", "done", "total"}."""

    def on_end(self, trial: Planned, result: Trial) -> None:
        """A trial has finished or failed."""

    def on_close(self) -> None:
        """No trial is running any more, for whatever reason."""


@dataclass(frozen=True)
class Comparison:
    """The result: the table, and the folder with results.md, results.json, results.csv and results.svg."""

    out: Path
    table: Table
    shared: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether every trial is finished."""
        return not self.table.failed and not self.table.waiting


def compare(
    recipes: Sequence[str | Path],
    *,
    tokens: int,
    out: str | Path,
    seeds: int | Sequence[int] = 1,
    overrides: Mapping[str, Any] | None = None,
    reference: str | None = None,
    valid_rows: int | None = None,
    draws: int = 8,
    seed: int = 0,
    also: Sequence[str] = (),
    device: str | None = None,
    jobs: int = 1,
    apart: bool = True,
    watch: Watcher | None = None,
) -> Comparison:
    """Train each recipe with each seed on the same tokens of the same data, and measure all with one protocol.

    Finished trials in `out` are not repeated, stopped ones resume; trials of earlier calls stay in the table.
    overrides: recipe keys set in all recipes, as in `load_config`. seed: seed of the measurements. jobs: number of
    concurrent trials; it only affects the timings. apart: run each trial in a process of its own, which has the
    plug-ins of --plugin; False: in this process, which has all registered classes, but where running out of memory
    may end all trials. A failed trial is reported in the table; a later call tries it again.

    >>> found = compare(["ar.toml", "mdlm.toml"], tokens=10**7, seeds=3, out="out")  # doctest: +SKIP
    >>> found.table.entries[1].verdict  # doctest: +SKIP
    'visible'
    """
    out, watch = Path(out), watch or Watcher()
    if jobs < 1 or (jobs > 1 and not apart):
        raise UsageError(f"jobs must be at least 1, and 1 without processes of their own (apart), got {jobs}")
    pick_device(device)  # refuse a missing device before anything is written
    protocol = Protocol(valid_rows=valid_rows, draws=draws, seed=seed, also=tuple(also))
    plan = make_plan(recipes, tokens=tokens, out=out, seeds=seeds, overrides=overrides, protocol=protocol)
    check_reference(reference, [*plan.systems, *(trial.system for trial in _others(plan))])
    with one_writer(out, World()), stop_requests() as asked_to_stop:
        plan.begin()
        done = [trial for planned in plan.trials if (trial := read_trial(out, planned.name)) and trial.finished]
        watch.on_plan(plan, done)
        names = {trial.name for trial in done}
        for planned in plan.trials:
            if planned.name in names:
                drop_checkpoints(planned.config)  # a kill may have prevented it
        halted = threading.Event()

        def stopping() -> bool:
            return halted.is_set() or asked_to_stop() or watch.stops()

        turn = _Turn(plan, reference, device, apart, jobs, watch, stopping)
        waiting = [planned for planned in plan.trials if planned.name not in names]
        try:
            run_at_once(waiting, turn.run, jobs, halted)
        except Stopped as stopped:
            _report(plan, reference)
            where = f" in {stopped}" if str(stopped) else ""
            raise Stopped(f"stopped{where}; the same command goes on there") from None
        finally:
            watch.on_close()
        return _report(plan, reference)


@dataclass(frozen=True)
class _Turn:
    """Runs one trial after the other; may be used by several threads."""

    plan: Plan
    reference: str | None
    device: str | None
    apart: bool
    jobs: int
    watch: Watcher
    stopping: Callable[[], bool]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, planned: Planned) -> None:
        with self.lock:
            if self.stopping():
                raise Stopped("")
            if not self.watch.admits(planned):
                return
            self.watch.on_begin(planned)
        try:
            result = self._result(planned)
        except Stopped:
            raise Stopped(planned.name) from None
        with self.lock:
            self.watch.on_end(planned, result)
            _report(self.plan, self.reference)

    def _result(self, planned: Planned) -> Trial:
        job = Job(
            **{key: getattr(planned, key) for key in ("name", "system", "seed", "fingerprint", "shared", "config")},
            protocol=self.plan.protocol,
            out=self.plan.out,
            device=self.device,
            at_once=self.jobs,
        )

        def tell(news: Mapping[str, Any]) -> None:
            with self.lock:
                self.watch.on_news(planned, news)

        return run_apart(job, tell, self.stopping) if self.apart else run_trial(job, tell)


def _others(plan: Plan) -> list[Trial]:
    """Results of trials that this call does not name: from earlier calls, or copied into the folder."""
    named = {trial.name for trial in plan.trials}
    files = sorted((plan.out / FOLDER).glob("[!.]*.json"))
    found = [read_trial(plan.out, file.stem) for file in files if file.stem not in named]
    return [trial for trial in found if trial is not None and trial.shared == plan.trials[0].shared]


def _report(plan: Plan, reference: str | None) -> Comparison:
    """Write the results available so far."""
    others = _others(plan)
    mine = {planned.name: read_trial(plan.out, planned.name) for planned in plan.trials}
    trials = [trial for trial in mine.values() if trial is not None] + others
    waiting = [name for name, trial in mine.items() if trial is None]
    systems = list(dict.fromkeys([*plan.systems, *(trial.system for trial in others)]))
    figures = figures_for(plan.shared["tokenizer"]["spec"])
    table = make_table(systems, trials, check_reference(reference, systems), waiting, figures)
    write_report(plan.out, table, plan.shared)
    return Comparison(plan.out, table, plan.shared)
