"""Run many (way, seed) pairs, several processes on one device, and write a JSON line after each.

    python -m ways.run --tokens tokens.npz.xz --out runs.jsonl --processes 4 --seeds 3 --seconds 540
    python -m ways.run --tokens tokens.npz.xz --out runs.jsonl --ways baseline plain half --seeds 5
    python -m ways.run --tokens tokens.npz.xz --out runs.jsonl --best 12 --seeds 3     # more seeds for what looked best
    python -m ways.run --tokens tokens.npz.xz --out runs.jsonl --ways plain+relu2 --seeds 3          # both at once
    python -m ways.run --tokens tokens.npz.xz --out runs.jsonl --time 30                      # seconds, each way alone
    python -m ways.run --tokens bytes.npz.xz --out rehearsal.jsonl --setting tiny --device cpu

What is in the file already is not run again. All ways have their first seed before any has its second.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing as mp
import sys
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch

from unmask.devices import few_threads, pick_device
from ways.catalogue import SETTINGS, WAYS, Setting, way_named
from ways.command import run_command
from ways.data import Tokens
from ways.results import TIMED, Line, add_line, read_lines
from ways.table import best_ways
from ways.training import HeldOut, run_way, time_way

Pair = tuple[str, int]  # a way's name and a seed


@dataclass(frozen=True)
class Job:
    """What every process needs to know."""

    setting: Setting
    tokens: Path
    out: Path
    device: str | None
    processes: int
    timed_steps: int
    deadline: float  # time.time() at which no run may still be going


def done_pairs(out: Path, setting: Setting) -> set[Pair]:
    """The pairs whose lines are whole; one that failed is tried again."""
    return {(line["way"], line["seed"]) for line in read_lines(out, setting.name, setting.steps) if "error" not in line}


def work(job: Job, todo: list[Pair], following: Synchronized[int]) -> None:
    """Take the next pair until none is left or the time is over."""
    device = pick_device(job.device)
    tokens = Tokens.load(job.tokens)
    held_out = HeldOut(tokens, job.setting)
    longest = 0.0
    with few_threads(device):
        while time.time() + longest < job.deadline:
            with following.get_lock():
                index, following.value = following.value, following.value + 1
            if index >= len(todo):
                return
            name, seed = todo[index]
            began = time.time()
            line: Line = {"way": name, "seed": seed, "setting": job.setting.name, "setting_steps": job.setting.steps}
            try:
                if seed == TIMED:
                    line |= time_way(way_named(name), job.setting, tokens, device, job.timed_steps)
                else:
                    line |= run_way(way_named(name), seed, job.setting, tokens, device, held_out)
            except Exception as error:
                traceback.print_exc()
                line |= {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            taken = time.time() - began
            longest = max(longest, taken)
            add_line(job.out, line | {"seconds": round(taken, 2), "processes": job.processes})
            nats = line["curve"][-1][2] if "curve" in line else None
            print(f"{index + 1}/{len(todo)} {name} seed {seed}: {nats} in {taken:.1f} s", flush=True)
            if "CUDA error" in str(line.get("error")):
                sys.exit(1)  # nothing runs after it in this process; another takes its place


def run_all(job: Job, todo: list[Pair]) -> None:
    context = mp.get_context("spawn")
    following = context.Value("i", 0)
    if job.processes == 1:
        work(job, todo, following)
        return

    def start() -> Any:
        process = context.Process(target=work, args=(job, todo, following))
        process.start()
        return process

    workers = [start() for _ in range(min(job.processes, len(todo)))]
    while workers:
        process = workers.pop(0)
        process.join()
        if process.exitcode and following.value < len(todo) and time.time() < job.deadline:
            workers.append(start())


def chosen_pairs(args: argparse.Namespace, setting: Setting) -> list[Pair]:
    names = args.ways or list(WAYS)
    if args.best is not None:
        names = best_ways(read_lines(args.out, setting.name, setting.steps), args.best)
    for name in names:
        way_named(name)  # said before the first run
    seeds = [TIMED] if args.time else range(args.seeds)
    done = done_pairs(args.out, setting)
    return [(name, seed) for seed in seeds for name in names if (name, seed) not in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="what ways.prepare wrote")
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines, which is added to")
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--steps", type=int, help="of the baseline; default: the setting's")
    parser.add_argument("--looks", type=int, metavar="N", help="evaluations of a run, evenly; default: the setting's")
    parser.add_argument("--ways", nargs="+", help="default: all, in the order of the catalogue")
    parser.add_argument("--best", type=int, metavar="N", help="the N best of the file, beside the baseline")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 to this number less 1")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run is begun that would end later")
    parser.add_argument("--time", type=int, default=0, metavar="STEPS", help="measure seconds, each way alone")
    parser.add_argument("--device")
    args = parser.parse_args()
    if not args.tokens.is_file():
        parser.error(f"cannot read {args.tokens}: give --tokens what ways.prepare wrote")
    setting = SETTINGS[args.setting]
    looks = tuple((i + 1) / args.looks for i in range(args.looks)) if args.looks else setting.looks
    setting = replace(setting, steps=args.steps or setting.steps, looks=looks)
    todo = chosen_pairs(args, setting)
    processes = 1 if args.time else args.processes
    job = Job(setting, args.tokens, args.out, args.device, processes, args.time, time.time() + args.seconds)
    print(f"{len(todo)} runs by {processes} processes; {torch.__version__} on {pick_device(args.device)}", flush=True)
    run_all(job, todo)


if __name__ == "__main__":
    run_command(main)
