"""Does a change make anything slower? Measures the rows of the GPU table with two versions of the sources in turn.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before/src

Both versions run on the same machine. Each measures each row twice, every time in a separate process; the medians are
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import gpu
from unmask.bench import Job


def seconds(job: Job, src: Path) -> list[float]:
    command = [sys.executable, "-m", "unmask.bench.jobs", json.dumps(asdict(job))]
    path = os.pathsep.join([str(src.resolve()), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{src}: {done.stderr[-500:]}")
    measured: list[float] = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the sources to compare with: a folder that holds unmask/")
    parser.add_argument("--rows", help="numbers of the rows, as 0,2,4; all without it")
    args = parser.parse_args()
    rows = {int(number) for number in args.rows.split(",")} if args.rows else None
    after = Path(__file__).parent.parent / "src"
    print("| row | before, s | after, s | change |\n| --- | --- | --- | --- |")
    for number, job in enumerate(gpu.table()):
        if rows is not None and number not in rows:
            continue
        taken: dict[Path, list[float]] = {args.before: [], after: []}
        for src in (args.before, after) * 2:
            taken[src] += seconds(replace(job, profile=False), src)
        old, new = (statistics.median(values) for values in taken.values())
        name = f"{job.task}, batch {job.batch}" + (f", {job.steps} steps" if job.task in ("sample", "semi-ar") else "")
        print(f"| {name} | {old:.4f} | {new:.4f} | {new / old - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
