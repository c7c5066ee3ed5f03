"""What saving costs training: no save, synchronous and background saves, in turn within one run of the usual loop.

    python benchmarks/save_overhead.py --rounds 4

Every interval of steps begins with a save of its kind and is timed until the next one begins. "blocked" is how long the
loop itself waits. "slower" compares an interval with one without a save; it includes the CPU time that a background
thread takes from training.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from unmask.config import DataConfig, OptimConfig, RunConfig
from unmask.corpora.text import Text
from unmask.denoisers.dit import DiT
from unmask.training.checkpoint.saving import Saver
from unmask.training.loop import train

KINDS = ("none", "sync", "async")


class Turns:
    """Stands in for `Saver.save`: the first save warms up, then the kinds take turns."""

    def __init__(self) -> None:
        self.real = Saver.save
        self.began: list[float] = []
        self.blocked: list[float] = []
        self.kinds: list[str] = []

    def save(self, saver: Saver, *args: Any, **options: Any) -> None:
        began = time.perf_counter()
        # Each round in another order, so that no kind always follows the same one.
        number = len(self.began) - 1
        kind = "async" if number < 0 else KINDS[(number + number // 3) % 3]
        saver.wait()
        saver.background = kind == "async"
        if kind != "none":
            self.real(saver, *args, **options)
        self.began.append(began)
        self.blocked.append(time.perf_counter() - began)
        self.kinds.append(kind)

    def table(self) -> list[str]:
        took = [after - before for before, after in zip(self.began, self.began[1:], strict=False)]
        rows = list(zip(self.kinds, took, self.blocked, strict=False))[1:]  # not the one that warmed up
        median = {kind: statistics.median(t for k, t, _ in rows if k == kind) for kind in KINDS}
        lines = [f"{'save':<6} {'interval':>10} {'slower':>8} {'blocked':>10} {'of it':>7}"]
        for kind in KINDS:
            blocked = statistics.median(b for k, _, b in rows if k == kind)
            slower = median[kind] / median["none"] - 1
            share = blocked / median["none"]
            lines.append(f"{kind:<6} {median[kind]:>9.2f}s {slower:>8.1%} {blocked:>9.3f}s {share:>7.2%}")
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--interval", type=int, default=50, help="steps between saves")
    parser.add_argument("--rounds", type=int, default=4, help="intervals of each kind")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    turns = Turns()
    Saver.save = lambda self, *a, **k: turns.save(self, *a, **k)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as place:
        text = Path(place, "lines.txt")
        text.write_text("".join(f"line {i} of many, {i * i} is its square\n" for i in range(20_000)))
        config = RunConfig(
            out=str(Path(place, "run")),
            steps=args.interval * (3 * args.rounds + 2),
            batch=args.batch,
            denoiser=DiT(size=args.size, dropout=0.1, qk_norm=False, zero_init=False),
            data=DataConfig(train=Text(path=str(text)), length=args.length, cache=str(Path(place, "cache"))),
            optim=OptimConfig(lr=3e-4, muon=False, warmup=10, schedule="constant"),
            valid_every=10**9,
            valid_rows=1,
            sample_every=0,
            save_every=args.interval,
            async_save=False,  # so that an interval is as asked for; `Turns` decides how each save is made
            keep=1,
            log_every=10**9,
        )
        train(config, device=args.device)
    print(
        f"{args.size} on {args.device}, {torch.get_num_threads()} threads, batch {args.batch} x {args.length}, "
        f"a save every {args.interval} steps, median of {args.rounds}"
    )
    print("\n".join(turns.table()))


if __name__ == "__main__":
    main()
