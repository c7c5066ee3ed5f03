"""When a recipe reaches a validation bound: since the start of the command, in training time, in steps and in tokens.

    python benchmarks/time_to_quality.py demo --bound 3.0 --bound 2.5 --out runs/try --steps 600
    python benchmarks/time_to_quality.py --runs runs/a runs/b --bound 2.5 --plot compared.svg

The first form runs `unmask train` in a separate process, with empty Triton and Inductor caches (--warm: with the
existing ones). Options not listed here are passed to `unmask train`. Data that was packed earlier is not packed again.
The second form reads finished runs, by their folders or nothing but their metrics.jsonl, which records training seconds
but not when the command started.

A bound is reached between two validations, and the reported value is interpolated linearly between them. The gap of a
step is the time since the previous step was reported; on a GPU a step is reported one step late.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from unmask.cli._chart import Curve, draw
from unmask.reporting.metrics_file import METRICS, TokenCount

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends
POLL = 0.02  # seconds between two looks at the metrics
COLUMNS = ("seconds", "train_seconds", "step", "tokens")


@dataclass(frozen=True)
class Look:
    """A validation, and what it took to come there. seconds: since the command began, where somebody watched. tokens:
    None where no step was logged."""

    bound: float
    step: float
    tokens: float | None
    train_seconds: float
    seconds: float | None = None


@dataclass(frozen=True)
class Gap:
    seconds: float
    step: int  # the later of the two
    between: str  # what else was done, of a validation and a sample


class Metrics:
    """What a run writes down, line by line, and when each line came (None: nobody watched)."""

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.first_step: float | None = None
        self.gaps: list[tuple[Gap, float]] = []  # in all, and of it in training
        self._last: dict[str, Any] = {}  # the newest step
        self._tokens = TokenCount()
        self._between: list[str] = []

    def add(self, record: dict[str, Any], came: float | None = None) -> None:
        if "loss" in record:
            self._step(record, came)
        elif "valid_nats_per_token" in record:
            self._between.append("validation")
            if "train_seconds" not in record:
                raise SystemExit("the metrics do not tell seconds of training: an older unmask wrote them")
            bound, trained = record["valid_nats_per_token"], record["train_seconds"]
            step = record["step"]
            self.looks.append(Look(bound, step, self._tokens.at(step), trained, came))
        elif "sample" in record:
            self._between.append("sample")

    def _step(self, record: dict[str, Any], came: float | None) -> None:
        last, self._last = self._last, record
        self._tokens.add(record["step"], record["tokens"])
        for i in range(len(self.looks)):  # this step also tells the tokens of those since the last logged one
            self.looks[i] = replace(self.looks[i], tokens=self._tokens.at(self.looks[i].step))
        if not last:
            self.first_step = came
        elif record["seconds"] > last["seconds"]:  # else another process goes on
            gap = Gap(record["seconds"] - last["seconds"], record["step"], " and ".join(self._between))
            self.gaps.append((gap, record["train_seconds"] - last["train_seconds"]))
        self._between = []

    def reached(self, bound: float) -> Look | None:
        """Where the bound is met for the first time, on the straight line between two validations; None: nowhere.

        >>> metrics = Metrics()
        >>> metrics.looks = [Look(4.0, 0, 0, 0.0, 5.0), Look(3.0, 100, 6400, 10.0, 17.0)]
        >>> metrics.reached(3.5)
        Look(bound=3.5, step=50.0, tokens=3200.0, train_seconds=5.0, seconds=11.0)
        """
        if self.looks and self.looks[0].bound <= bound:
            return self.looks[0]
        for a, b in pairwise(self.looks):
            if b.bound <= bound:
                share = (a.bound - bound) / (a.bound - b.bound)
                ends = [(getattr(a, name), getattr(b, name)) for name in COLUMNS]
                between = [None if None in (x, y) else x + share * (y - x) for x, y in ends]
                return Look(bound, **dict(zip(COLUMNS, between, strict=True)))
        return None

    def longest(self) -> tuple[Gap, Gap] | None:
        """The longest gap between two logged steps, and the longest in training, where a run that stalls shows it."""
        if not self.gaps:
            return None
        in_training = max(self.gaps, key=lambda pair: pair[1])
        return max((gap for gap, _ in self.gaps), key=lambda gap: gap.seconds), Gap(
            in_training[1], in_training[0].step, in_training[0].between
        )


def lines_of(path: Path, begun: float, process: subprocess.Popen[bytes]) -> Iterator[tuple[dict[str, Any], float]]:
    """The whole lines of a file that is being written, each with the seconds since `begun`; until the process ends."""
    rest = b""
    while not path.exists() and process.poll() is None:
        time.sleep(POLL)
    if not path.exists():
        return
    with path.open("rb") as file:
        while True:
            over = process.poll() is not None  # asked first: what it wrote before it ended is read
            *lines, rest = (rest + file.read()).split(b"\n")
            came = time.monotonic() - begun
            for line in lines:
                yield json.loads(line), came
            if over:
                return
            time.sleep(POLL)


def end_with_parent() -> None:
    """In the new process: a kill of this command asks the run to stop, too, where the system can tell it (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def watch(recipe: str, out: Path, options: list[str], *, warm: bool) -> tuple[Metrics, int]:
    """Train in a process of its own and follow it; what it recorded, and its exit code.

    SIGTERM is passed on, and Ctrl-C reaches the run by itself: it saves and ends, and what is known by then is told.
    """
    if not any(word.split("=")[0] == "--log_every" for word in options):
        options = [*options, "--log_every", "1"]
    metrics = Metrics()
    with tempfile.TemporaryDirectory() as place:
        caches = {} if warm else {name: str(Path(place, name)) for name in CACHES}
        begun = time.monotonic()
        command = [sys.executable, "-m", "unmask", "train", recipe, "--out", str(out), *options]
        process = subprocess.Popen(command, env=os.environ | caches, stdout=sys.stderr, preexec_fn=end_with_parent)
        handlers = {signal.SIGTERM: lambda *_: process.terminate(), signal.SIGINT: signal.SIG_IGN}
        before = {sent: signal.signal(sent, handler) for sent, handler in handlers.items()}
        try:
            for record, came in lines_of(out / METRICS, begun, process):
                metrics.add(record, came)
        finally:
            if process.poll() is None:
                process.terminate()  # it saves
            code = process.wait()
            for sent, handler in before.items():
                signal.signal(sent, handler)
    return metrics, code


def read(run: Path) -> Metrics:
    """A run that is over, by its folder or its metrics.jsonl; lines that a kill cut off are left out."""
    metrics, path = Metrics(), run / METRICS if run.is_dir() else run
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise SystemExit(f"cannot read {path}: give the folder of a run, or its {METRICS}") from None
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            metrics.add(json.loads(line))
    return metrics


def table(name: str, metrics: Metrics, bounds: list[float]) -> list[str]:
    out = [name]
    if metrics.first_step is not None:
        out.append(f"the first step is told after {metrics.first_step:.1f} s")
    if longest := metrics.longest():
        whole, trained = longest
        beside = f", with a {whole.between}" if whole.between else ""
        out.append(f"longest gap between two logged steps: {whole.seconds:.2f} s before step {whole.step}{beside}")
        out.append(f"longest gap in training alone: {trained.seconds:.2f} s before step {trained.step}")
    if bounds:
        out.append(f"{'bound':>8} {'seconds':>10} {'training':>10} {'steps':>8} {'tokens':>14}  interpolated linearly")
    for bound in bounds:
        look = metrics.reached(bound)
        if look is None:
            best = min(metrics.looks, key=lambda look: look.bound, default=None)
            said = "no validation" if best is None else f"the best is {best.bound:.4f} at step {best.step:.0f}"
            out.append(f"{bound:>8.4f} not reached: {said}")
            continue
        seconds = "-" if look.seconds is None else f"{look.seconds:.1f}"
        tokens = "-" if look.tokens is None else f"{look.tokens:,.0f}"
        out.append(f"{bound:>8.4f} {seconds:>10} {look.train_seconds:>10.1f} {look.step:>8.0f} {tokens:>14}")
    return out


def plain(metrics: Metrics, bounds: list[float]) -> dict[str, Any]:
    longest = metrics.longest()
    return {
        "first_step_seconds": metrics.first_step,
        "longest_gap": None if longest is None else asdict(longest[0]),
        "longest_gap_in_training": None if longest is None else asdict(longest[1]),
        "reached": {str(bound): (look := metrics.reached(bound)) and asdict(look) for bound in bounds},
        "validations": [asdict(look) for look in metrics.looks],
    }


def picture(runs: dict[str, Metrics], epoch: float | None = None) -> str:
    """Bounds against seconds of training, and beside them against tokens, or epochs of so many tokens."""
    panels = []
    for across, of, unit in (
        ("seconds", "train_seconds", 1.0),
        ("epochs" if epoch else "tokens", "tokens", epoch or 1.0),
    ):
        curves = []
        for name, run in runs.items():
            points = [(getattr(look, of), look.bound) for look in run.looks]
            curves.append(Curve(name, [], [(x / unit, bound) for x, bound in points if x is not None]))
        up = "validation, nats per token" + (", by seconds of training" if across == "seconds" else "")
        panels.append(draw(curves, across=across, up=up))
    width, height = (int(panels[0].split(f'{word}="')[1].split('"')[0]) for word in (" width", " height"))
    inner = "".join(panel.replace("<svg ", f'<svg x="{i * width}" ', 1) for i, panel in enumerate(panels))
    size = f'viewBox="0 0 {2 * width} {height}" width="{2 * width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{inner}</svg>\n'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", nargs="?", help="what is trained; other options are those of `unmask train`")
    parser.add_argument("--out", help="the run's folder (default: a temporary one)")
    parser.add_argument("--warm", action="store_true", help="what was compiled before is used again")
    parser.add_argument("--bound", type=float, action="append", default=[], metavar="NATS", help="nats per token")
    parser.add_argument("--runs", nargs="+", type=Path, default=[], metavar="DIR", help="runs that are over")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the numbers, the validations among them")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="bound against seconds of training and tokens")
    parser.add_argument("--epoch", type=float, metavar="TOKENS", help="plot epochs of so many tokens instead of tokens")
    args, options = parser.parse_known_args()
    if (args.recipe is None) == (not args.runs) or (args.runs and options):
        parser.error("give a recipe with options of `unmask train`, or --runs and no others")
    if args.epoch is not None and not args.epoch > 0:
        parser.error(f"--epoch is a number of tokens above 0, got {args.epoch:g}")
    out = Path(args.out or Path(tempfile.mkdtemp(), "run"))
    if args.recipe is not None and (out / METRICS).exists():
        parser.error(f"{out} holds a run already: give another --out")
    for file in filter(None, (args.json, args.plot)):  # said before the training
        if not file.absolute().parent.is_dir():
            parser.error(f"cannot write {file}: give the name of a file in a folder that is there")
    runs, code = {str(run): read(run) for run in args.runs}, 0
    if args.recipe is not None:
        name = f"{args.recipe}, {'warm' if args.warm else 'cold'}, in {out}"
        runs[name], code = watch(args.recipe, out, options, warm=args.warm)
    for name, metrics in runs.items():
        print("\n".join(table(name, metrics, args.bound)))
    if args.json:
        numbers = {name: plain(metrics, args.bound) for name, metrics in runs.items()}
        args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if args.plot and any(metrics.looks for metrics in runs.values()):
        args.plot.write_text(picture(runs, args.epoch), encoding="utf-8")
    if code:
        print(f"unmask train ended with {code}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
