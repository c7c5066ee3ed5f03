"""The throughput of `unmask train`, with loader and reports, beside the bare step that `unmask bench train` measures.

    python benchmarks/loop.py [--device cuda] [--size small] [--length 1024] [--batch 32] [--steps 120]

The data is random bytes; the measured steps contain no validation and no saving. The loop's rate is over its second
half.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from unmask.bench import Job, run_job
from unmask.config import DataConfig, OptimConfig, RunConfig
from unmask.corpora.text import Text
from unmask.denoisers.dit import DiT
from unmask.devices import pick_device
from unmask.training.callbacks import Callback
from unmask.training.loop import train


class Clock(Callback):
    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step(self, report: Any) -> None:
        self.at.append(time.perf_counter())


def loop(args: argparse.Namespace, device: str, folder: Path) -> float:
    """Tokens a second."""
    letters = random.Random(0).choices(
        "abcdefghijklmnopqrstuvwxyz \n", k=(args.steps // 4 * args.batch + 8) * args.length
    )
    (folder / "text.txt").write_text("".join(letters), encoding="utf-8")
    cuda = device.startswith("cuda")
    never = 10 * args.steps
    config = RunConfig(
        out=str(folder / "run"),
        steps=args.steps,
        batch=args.batch,
        tokenizer="bytes",
        precision="bf16" if cuda else "fp32",
        compile=cuda,
        denoiser=DiT(size=args.size, dropout=0.1, qk_norm=False, zero_init=False),
        data=DataConfig(
            train=Text(path=str(folder / "text.txt")), length=args.length, held_out=0.01, cache=str(folder / "cache")
        ),
        optim=OptimConfig(lr=3e-4, muon=False, schedule="constant", ema=0.9999),
        log_every=1,
        valid_every=never,
        valid_rows=2,
        sample_every=0,
        save_every=never,
    )
    clock = Clock()
    train(config, callbacks=[clock], device=device)
    half = len(clock.at) // 2
    # the last step's numbers are read when all is done, validation and save included
    return (len(clock.at) - 2 - half) * args.batch * args.length / (clock.at[-2] - clock.at[half])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device")
    parser.add_argument("--size", default="small")
    for name, value in {"length": 1024, "batch": 32, "steps": 120}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    device = str(pick_device(args.device))
    with tempfile.TemporaryDirectory() as folder:
        rate = loop(args, device, Path(folder))
    print(
        f"unmask train, DiT {args.size}, V 257, L {args.length}, batch {args.batch} on {device}: {rate:,.0f} tokens/s",
        flush=True,
    )
    hidden, blocks, heads = DiT(size=args.size).dims
    cuda = device.startswith("cuda")
    job = Job(
        task="train",
        version="unmask",
        device=device,
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        length=args.length,
        vocab=256,
        batch=args.batch,
        precision="bf16" if cuda else "fp32",
        compile=cuda,
        repeats=5,
    )
    result = run_job(job)
    bare = result.tokens / sorted(result.seconds)[len(result.seconds) // 2]
    print(f"the bare step: {bare:,.0f} tokens/s; the loop has {rate / bare:.0%} of it")


if __name__ == "__main__":
    main()
