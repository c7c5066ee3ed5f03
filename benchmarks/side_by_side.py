"""Training step and sampling against a plain textbook version, in one run on this machine's CPU.

Each measurement runs in a process of its own, so that its peak memory is its own; the two versions take turns.

    python benchmarks/side_by_side.py
    python benchmarks/side_by_side.py --hidden 128 --vocab 4096 --steps 64 --json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

JOBS = ("train textbook", "train unmask", "sample textbook", "sample unmask")


def measure(job: str, args: argparse.Namespace) -> dict[str, float]:
    """Runs in the child process: tokens a second, and peak memory above what Python with torch takes."""
    import torch

    import textbook
    from unmask.batch import make_batch
    from unmask.canvas import Canvas
    from unmask.config import OptimConfig
    from unmask.denoisers.dit import DiT
    from unmask.generate import sample
    from unmask.objectives.mdlm import MDLM
    from unmask.optim import make_optimizer
    from unmask.samplers.ancestral import Ancestral

    torch.manual_seed(0)
    config = DiT(hidden=args.hidden, blocks=args.blocks, heads=args.hidden // 64, dropout=0.0)
    base = peak_memory()
    net = config.build(num_ids=args.vocab + 1, mask_id=args.vocab)
    torch.nn.init.normal_(net.output.weight, std=0.02)
    x_BL = torch.randint(0, args.vocab, (args.batch, args.length))
    task, version = job.split()
    if task == "train":
        optimizer, _ = make_optimizer(net, OptimConfig())
        seconds = []
        for step in range(args.repeats + 1):
            begin = time.perf_counter()
            if version == "textbook":
                loss = textbook.loss(net, x_BL)
            else:
                total = MDLM().loss(net, make_batch(x_BL, seed=0, step=step))
                loss = total.nats / total.tokens
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - begin)
        elapsed = statistics.median(seconds[1:])
    else:
        net.eval()
        begin = time.perf_counter()
        if version == "textbook":
            calls = args.textbook_calls or args.steps
            textbook.sample(net, args.batch, args.length, args.steps, calls)
            elapsed = (time.perf_counter() - begin) * args.steps / calls
        else:
            canvas = Canvas.blank(num=args.batch, length=args.length, mask_id=args.vocab)
            tokens = sample(net, canvas, Ancestral(steps=args.steps)).tokens
            elapsed = time.perf_counter() - begin
            assert (tokens != args.vocab).all()
    return {"tokens_per_second": x_BL.numel() / elapsed, "peak_mib": (peak_memory() - base) / 2**20}


def peak_memory() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 256), ("blocks", 4), ("length", 256), ("vocab", 32768), ("steps", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="training steps timed; the median counts")
    parser.add_argument(
        "--textbook-calls",
        type=int,
        help="time only so many of the textbook's T equal calls and scale up (default: all)",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.job:
        print(json.dumps(measure(args.job, args)))
        return
    results: dict[str, Any] = {}
    for job in JOBS:
        print(f"measuring {job} ...", file=sys.stderr)
        child = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--job", job], check=True, capture_output=True, text=True
        )
        results[job] = json.loads(child.stdout)
    for task in ("train", "sample"):
        ours, plain = results[f"{task} unmask"], results[f"{task} textbook"]
        results[f"{task} ratio"] = {
            "speed": ours["tokens_per_second"] / plain["tokens_per_second"],
            "memory": ours["peak_mib"] / plain["peak_mib"],
        }
    if args.json:
        print(json.dumps({"options": vars(args)} | results))
        return
    if args.textbook_calls:
        print(f"textbook sampling: {args.textbook_calls} of its {args.steps} equal calls timed, scaled up")
    size = f"DiT {args.hidden}×{args.blocks}, L {args.length}, V {args.vocab}, T {args.steps}, batch {args.batch}"
    print(f"{size}\n\n{'':<17}{'tokens/s':>10}{'peak MiB':>10}")
    for job in JOBS:
        print(f"{job:<17}{results[job]['tokens_per_second']:>10.1f}{results[job]['peak_mib']:>10.0f}")
    for task in ("train", "sample"):
        ratio = results[f"{task} ratio"]
        print(f"{task}: {ratio['speed']:.2f}× the speed, {ratio['memory']:.2f}× the memory")


if __name__ == "__main__":
    main()
