"""A comparison on a terminal: a line for each trial while it runs, then the table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from unmask.axes import short
from unmask.cli._terminal import SECONDS, stderr
from unmask.comparison.compare import Comparison, Watcher
from unmask.comparison.plan import Plan, Planned
from unmask.comparison.report import best_cell, flops_cell, gap_cell, half_cell, ppl_cell
from unmask.comparison.table import Entry
from unmask.comparison.trial import Trial

BAR = 10


@dataclass
class _Running:
    """A trial that is at work: since when, from which step on, and how far it is."""

    name: str
    began: float = field(default_factory=time.monotonic)
    first: int = 0
    step: int = 0
    words: str = "begins"
    told: float = -SECONDS  # when its last line was printed

    def seconds_left(self, steps: int) -> tuple[float, float] | None:
        """Of itself and of another one like it; its beginning tells too little."""
        done = self.step - self.first
        if done * 20 < steps:
            return None
        one = (time.monotonic() - self.began) / done * steps
        return one * (1 - self.step / steps), one


class Lines(Watcher):
    """One line a trial, kept when it is over; the running ones move, and the last says what is left."""

    def __init__(self, jobs: int = 1) -> None:
        self.console, self.jobs = stderr(), jobs
        self.live: Live | None = None
        self.running: dict[str, _Running] = {}
        self.total, self.over, self.steps, self.width = 0, 0, 1, 1

    def on_plan(self, plan: Plan, finished: list[Trial]) -> None:
        self.total, self.over = len(plan.trials), len(finished)
        self.steps, self.width = plan.shared["steps"], max(len(trial.name) for trial in plan.trials)
        many = f"{len(plan.systems)} systems, {self.total} trials of {short(plan.shared['tokens'])} tokens"
        done = f", {self.over} of them finished before" if self.over else ""
        at_once = f", {self.jobs} at once" if self.jobs > 1 else ""
        self.console.print(f"{many} ({self.steps:,} steps){done}{at_once}", soft_wrap=True)

    def on_begin(self, trial: Planned) -> None:
        self.running[trial.name] = _Running(trial.name)
        if self.console.is_terminal:
            if self.live is None:
                self.live = Live(console=self.console, transient=True, auto_refresh=False)
                self.live.start()
            self._draw()

    def on_news(self, trial: Planned, news: Mapping[str, Any]) -> None:
        one = self.running[trial.name]
        if "measuring" in news:
            share = f" {news['done']}/{news['total']} rows" if "done" in news else ""
            one.step, one.words = self.steps, f"measuring{share}"
        elif "loss" in news:
            one.step, one.words = news["step"], f"loss {news['loss']:.3f} {_rounded(news['rate'])} tok/s"
        elif "valid" in news:
            one.step, one.words = news["step"], f"valid {news['valid']:.3f}"
        else:
            one.first = news["step"]
            return
        if self.live is not None:
            self._draw()
        elif time.monotonic() - one.told >= SECONDS:
            one.told = time.monotonic()
            line = f"{one.name}  step {one.step:,} of {self.steps:,}, {one.words}; {self._left()}"
            self.console.print(line, soft_wrap=True)

    def _draw(self) -> None:
        lines = []
        for one in self.running.values():
            filled = round(BAR * one.step / self.steps)
            bar = "━" * filled + "╌" * (BAR - filled)
            lines.append(Text(f"{one.name:<{self.width}} {bar} {one.words}", no_wrap=True, overflow="ellipsis"))
        assert self.live is not None
        if lines:
            lines[-1].append(f"  {self._left()}")
        self.live.update(Group(*lines), refresh=True)

    def _left(self) -> str:
        """What is left: trials, and the time if each takes what the running ones do."""
        more = self.total - self.over - len(self.running)
        words = f"{more} more" if more else "the last"
        known = [pair for one in self.running.values() if (pair := one.seconds_left(self.steps)) is not None]
        if not known:
            return words
        seconds = max(own for own, _ in known) + more / self.jobs * max(one for _, one in known)
        return f"{words}, {timedelta(seconds=round(seconds))} left"

    def on_end(self, trial: Planned, result: Trial) -> None:
        self.running.pop(trial.name)
        self.over += 1
        if self.live is not None and self.running:
            self._draw()
        else:
            self.on_close()
        if result.finished:
            words = f"{result.nats_per_token:.4f} nats/token at step {result.best_step:,}, {result.seconds:.1f} s"
            words += f", {_rounded(result.tokens_per_second)} tok/s"
        else:
            words = f"{result.state}: {result.reason}"
        self.console.print(f"{trial.name:<{self.width}} {words}  ({self.over}/{self.total})", soft_wrap=True)

    def on_close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


def print_table(found: Comparison, console: Console | None = None) -> None:
    """Levels and gaps, and below what they cost: two grids that fit 80 columns."""
    console = console or Console(highlight=False, markup=False)
    table = found.table
    roomy = console.width - max(len(entry.system) for entry in table.entries) > 66
    grid = Grid(box=None, pad_edge=False, padding=(0, 2 if roomy else 1, 0, 0))
    for name, where in (("system", "left"), ("seeds", "right"), ("PPL", "right"), ("nats/token", "left")):
        grid.add_column(name, justify=where, no_wrap=True)  # type: ignore[arg-type]
    grid.add_column(f"gap to {table.reference}", no_wrap=True)
    grid.add_column("")
    for entry in table.entries:
        spread = f" {half_cell(entry.nats)}" if roomy else ""
        nats = "–" if entry.nats is None else f"{entry.nats.value:.4f}{spread}"
        gap = f"{gap_cell(entry)} {half_cell(entry.gap)}".strip()
        grid.add_row(entry.system, str(len(entry.seeds)), ppl_cell(entry), nats, gap, _verdict(entry, found))
    console.print(grid)
    costs = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    costs.add_column("system", overflow="fold")
    for name in ("params", "no emb.", "FLOP", "passes", "seconds", "tok/s", "epochs", "best step"):
        costs.add_column(name, justify="right", no_wrap=name != "best step")
    for entry in (e for e in table.entries if e.cost):
        cost = entry.cost
        sizes = [_rounded(cost["parameters"]), _rounded(cost["parameters_without_embeddings"])]
        spent = [flops_cell(cost["flops"]), f"{cost['passes']:.3g}", f"{cost['seconds']:.1f}"]
        spent += [_rounded(cost["tokens_per_second"]), f"{cost['epochs']:.2f}", best_cell(entry, "step")]
        costs.add_row(entry.system, *sizes, *spent)
    console.print()
    console.print(costs)
    for trial in table.failed:
        console.print(f"{trial.name} {trial.state}: {trial.reason}", soft_wrap=True)
    console.print(f"\n{found.out}/results.md, .json, .csv, .svg", soft_wrap=True)


def _rounded(value: float) -> str:
    return short(float(f"{value:.3g}"))


def _verdict(entry: Entry, found: Comparison) -> str:
    if entry.nats is not None:
        return entry.verdict
    failed = [trial for trial in found.table.failed if trial.system == entry.system]
    return failed[0].state if failed else "not run yet"
