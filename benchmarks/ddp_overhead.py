"""Tokens per second of one process with two threads and of two gloo processes with one each, measured in turn.

python benchmarks/ddp_overhead.py [--rounds 3] [--hidden 256] [--batch 16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def rate(folder: Path, processes: int, args: argparse.Namespace, name: str) -> float:
    """The median of the later half of a short training's steps."""
    out = folder / name
    options = {
        "out": out,
        "steps": args.steps,
        "batch": args.batch,
        "data.train": "stdlib",
        "data.length": args.length,
        "data.cache": folder / "cache",
        "denoiser.hidden": args.hidden,
        "denoiser.blocks": args.blocks,
        "denoiser.heads": args.hidden // 64,
        "log_every": 1,
        "valid_every": 100_000,
        "valid_rows": 1,
        "sample_every": 0,
        "save_every": 100_000,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    several = [] if processes == 1 else ["--nproc", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": str(2 // processes)}
    command = [sys.executable, "-m", "unmask", "train", "demo", "--device", "cpu", *several, *words]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines if "loss" in line]
    return statistics.median(rates[len(rates) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rounds", 3), ("hidden", 256), ("blocks", 4), ("length", 256), ("batch", 16), ("steps", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    found: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            for processes, rates in found.items():
                rates.append(rate(Path(folder), processes, args, f"{processes}-{turn}"))
                print(f"{processes} process(es): {rates[-1]:,.0f} tokens/s", flush=True)
    one, two = (statistics.median(rates) for rates in found.values())
    print(f"one process, two threads: {one:,.0f} tokens/s; two processes: {two:,.0f} ({two / one:.2f}×)")


if __name__ == "__main__":
    main()
