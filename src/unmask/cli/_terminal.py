"""What a person sees while the machine works: on stderr, and only when stderr is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from unmask.config import RunConfig
from unmask.data.tokenizers import Tokenizer
from unmask.evaluation.bound import Bound
from unmask.evaluation.measurement import Measurement
from unmask.samplers import Step
from unmask.training.callbacks import Callback, Sample, StepReport

MASK_SIGN = "░"


def stderr() -> Console:
    return Console(stderr=True, highlight=False, markup=False)  # a path in brackets is no markup


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar called with (done, total); None where stderr is no terminal."""
    console = stderr()
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def draw_row(ids: list[int], tokenizer: Tokenizer, new: set[int], fixed: set[int], again: Container[int] = ()) -> Text:
    """One row: masks as shades, red where masked again; what just opened in colour, what was there in bold."""
    text = Text()
    run: list[int] = []
    style = ""

    def flush() -> None:
        if run:
            text.append(tokenizer.decode(run), style)
            run.clear()

    for position, token in enumerate(ids):
        if token == tokenizer.mask_id:
            flush()
            text.append(MASK_SIGN, "red" if position in again else "dim")
            continue
        if token == tokenizer.eot_id:
            flush()
            text.append("⏹\n", "dim")
            continue
        now = "bold green" if position in new else "bold" if position in fixed else ""
        if now != style:
            flush()
            style = now
        run.append(token)
    flush()
    return text


def draw_news(step: Step, tokenizer: Tokenizer, most: int = 3) -> Text:
    """What the first row got in this step, a line each: the token, its probability, and the network's runners-up."""
    text = Text()
    mine = (step.row_N == 0).nonzero().flatten().tolist()
    for i in mine[:most]:
        text.append(f"\n{tokenizer.token_text(int(step.token_N[i]))!r:<12}", "bold green")
        text.append(f" {step.log_prob_N[i].exp():6.1%}")
        if step.others is not None:
            pairs = zip(step.others.token_NK[i].tolist(), step.others.prob_NK[i].tolist(), strict=True)
            runners = ", ".join(f"{tokenizer.token_text(token)!r} {prob:.1%}" for token, prob in pairs)
            text.append(f"   network: itself {step.others.prob_N[i]:.1%}, {runners}", "dim")
    text.append(f"\nand {len(mine) - most} more" if len(mine) > most else "", "dim")
    return text


@contextmanager
def watching(tokenizer: Tokenizer, *, enabled: bool, pause: float = 0.0) -> Iterator[Callable[[Step], None] | None]:
    """Shows the first row's masks opening; None without a terminal or when not asked for."""
    console = stderr()
    if not (enabled and console.is_terminal):
        yield None
        return
    fixed: set[int] | None = None
    number = 0
    with Live(console=console, refresh_per_second=25, transient=True) as live:

        def show(step: Step) -> None:
            nonlocal fixed, number
            mine = step.row_N == 0
            new = set(step.position_N[mine].tolist())
            ids = step.tokens_BL[0].tolist()
            if fixed is None:
                fixed = {i for i, t in enumerate(ids) if t != tokenizer.mask_id and i not in new}
            again = set() if step.remasked is None else set(step.remasked[1][step.remasked[0] == 0].tolist())
            text = draw_row(ids, tokenizer, new, fixed, again)
            number += 1
            text.append(f"\n\nstep {number}, {ids.count(tokenizer.mask_id)} masks left", "dim")
            text.append(f", {len(again)} masked again" if again else "", "red")
            live.update(text.append_text(draw_news(step, tokenizer)))
            if pause:
                time.sleep(pause)

        yield show


SECONDS = 10.0  # between two lines of a log that nobody watches


class TrainProgress(Callback):
    """A bar with loss, tokens a second and time left; validations and samples as lines above it.

    Where stderr is no terminal the same as plain lines, a few a minute.
    """

    def __init__(self) -> None:
        self.console = stderr()
        self.bar: Progress | None = None
        self.steps = self.first = self.log_every = 1
        self.last_line = -SECONDS

    def on_start(self, config: RunConfig, info: dict[str, Any]) -> None:
        say = partial(self.console.print, soft_wrap=True)
        say(f"train: {info['train']}")
        say(f"valid: {info['valid']}")
        several = "" if info["processes"] == 1 else f" × {info['processes']} processes ({info['parallel']})"
        where = f"on {info['device']}{several} in {config.precision}"
        say(f"model: {info['parameters'] / 1e6:.2f}M parameters {where}, run folder {config.out}")
        for reason in info["skipped"]:
            say(f"passed over: {reason}")
        if info["resumed_step"]:
            say(f"going on from step {info['resumed_step']}")
        self.steps, self.first, self.log_every = config.steps, info["resumed_step"], config.log_every
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console)
            self.bar.start()
            self.task = self.bar.add_task("train", total=config.steps, completed=info["resumed_step"], numbers="")

    def on_step(self, report: StepReport) -> None:
        if self.bar is not None:
            numbers = f"loss {report.loss:6.3f}  {report.tokens_per_second:,.0f} tok/s"
            self.bar.update(self.task, completed=report.step, numbers=numbers)
        elif report.step == self.steps or (
            report.step % self.log_every == 0 and report.seconds - self.last_line >= SECONDS
        ):
            self.last_line = report.seconds
            left = report.seconds / (report.step - self.first) * (self.steps - report.step)
            self.console.print(
                f"step {report.step:>6}  loss {report.loss:.4f}, lr {report.lr:.2e}, "
                f"{report.tokens_per_second:,.0f} tok/s, eta {timedelta(seconds=round(left))}",
                soft_wrap=True,
            )

    def on_note(self, step: int, text: str) -> None:
        self.console.print(f"step {step:>6}  {text}", soft_wrap=True)

    def on_valid(self, step: int, bound: Bound) -> None:
        bits = "" if bound.bits_per_byte is None else f", {bound.bits_per_byte:.3f} bits/byte"
        self.console.print(
            f"step {step:>6}  valid {bound.nats_per_token:.4f} nats/token, {bound.ppl_key} {bound.ppl:.2f}{bits}"
        )

    def on_measured(self, step: int, name: str, measured: Measurement) -> None:
        interval = "" if measured.ci95 is None else " ({:.4f} – {:.4f})".format(*measured.ci95)
        self.console.print(f"step {step:>6}  valid {name} {measured.sign} {measured.value:.4f}{interval}")

    def on_sample(self, step: int, text: str) -> None:
        condition, written = "", text
        if isinstance(text, Sample):
            condition, written = "" if text.label is None else f" of {text.label}", text.continuation
            condition += f" after {text.prompt[-40:]!r}" if text.prompt else ""
        line = f"step {step:>6}  sample{condition}: {str(written)!r}"
        # A screen shows as much as fits a line; a log keeps all of it in one.
        how: dict[str, Any] = {"soft_wrap": True} if self.bar is None else {"overflow": "ellipsis", "no_wrap": True}
        self.console.print(line, **how)

    def on_save(self, step: int, path: Path) -> None:
        if self.bar is None:
            self.console.print(f"step {step:>6}  saved {path}", soft_wrap=True)

    def on_end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
