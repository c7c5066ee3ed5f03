"""Measure the speed and memory of training and sampling.

The tasks are train, sample, semi-ar (semi-autoregressive sampling) and ar (autoregressive sampling). Weights and tokens
are random. Each implementation runs in a process of its own, beside a plain textbook implementation of the same work.

Examples:
  unmask bench train --size small --length 1024 --batch 32
  unmask bench sample --size mini --length 256 --batch 8 --device cpu --calls 12
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=["train", "sample", "semi-ar", "ar"], help="what to measure")
    parser.add_argument("--size", help="size of the DiT: nano, micro, mini, tiny, small, medium (default small)")
    for name in ("hidden", "blocks", "heads"):
        parser.add_argument(f"--{name}", type=int, help="overrides the value of the size")
    parser.add_argument(
        "--conditioning",
        choices=["none", "constant", "level"],
        default="none",
        help="conditioning of the DiT (default none)",
    )
    parser.add_argument("--length", type=int, default=1024, help="length of a row, or of a window (default 1024)")
    parser.add_argument("--vocab", type=int, default=50257, help="vocabulary size (default 50257)")
    parser.add_argument("--batch", type=int, help="rows (default 32 for training, 1 for sampling)")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout in training (default 0.1)")
    parser.add_argument("--steps", type=int, default=128, help="number of sampling steps T (default 128)")
    parser.add_argument("--total", type=int, default=2048, help="tokens of a semi-autoregressive text (default 2048)")
    parser.add_argument("--stride", type=int, default=512, help="stride of the window (default 512)")
    parser.add_argument("--precision", choices=["bf16", "fp32"], help="default bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--compile", action="store_true", help="train with torch.compile instead of our kernels")
    parser.add_argument(
        "--repeats", type=int, default=5, help="number of measurements; the median is reported (default 5)"
    )
    parser.add_argument(
        "--calls",
        type=int,
        help="time this many of the textbook implementation's equal sampling calls, and extrapolate",
    )
    parser.add_argument("--no-textbook", action="store_true", help="measure only unmask")
    parser.add_argument("--profile", action="store_true", help="show where unmask's time goes, kernel by kernel")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    import sys

    from unmask.bench import Job, Result, run_job
    from unmask.devices import pick_device

    _check(args)
    device = pick_device(args.device)
    on_gpu = device.type == "cuda"
    common = _options(args, str(device), on_gpu=on_gpu)
    results: dict[str, Result] = {}
    for version in ("peak", "unmask") if args.no_textbook else ("peak", "textbook", "unmask"):
        print(f"measuring {version} ...", file=sys.stderr)
        compiled = version == "unmask" and args.task == "train" and args.compile
        wanted = args.profile and version == "unmask"
        results[version] = run_job(Job(version=version, compile=compiled, profile=wanted, **common))
    ceiling = results.pop("peak")
    flops_per_second = ceiling.flops / min(ceiling.seconds)
    rows = {name: summary(r, flops_per_second) for name, r in results.items()}
    if args.json:
        print(json.dumps({"options": common, "peak_tflops": flops_per_second / 1e12, **rows}))
        return 0
    _print_options(args, common, device_name(device), flops_per_second / 1e12)
    _print_table(rows)
    for name, result in results.items():
        if result.note:
            print(f"{name}: {result.note}")
    if args.profile:
        print_profile(results["unmask"].profile)
    return 0


def _check(args: argparse.Namespace) -> None:
    from unmask.errors import UsageError

    for name in ("length", "vocab", "batch", "steps", "total", "stride", "repeats", "calls"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")
    if args.task == "semi-ar" and args.stride > args.length:
        raise UsageError(f"--stride {args.stride} is beyond the window of --length {args.length}")


def _options(args: argparse.Namespace, device: str, *, on_gpu: bool) -> dict[str, Any]:
    """What all versions are measured with."""
    from unmask.denoisers.dit import DiT

    sizes = {"hidden": args.hidden, "blocks": args.blocks, "heads": args.heads}
    if args.hidden and not args.heads:
        sizes["heads"] = max(1, args.hidden // 64)
    hidden, blocks, heads = DiT(size=args.size or "small", **sizes).dims
    return {
        "task": args.task,
        "device": device,
        "hidden": hidden,
        "blocks": blocks,
        "heads": heads,
        "length": args.length,
        "vocab": args.vocab,
        "batch": args.batch or (32 if args.task == "train" else 1),
        "conditioning": args.conditioning,
        "dropout": args.dropout,
        "precision": args.precision or ("bf16" if on_gpu else "fp32"),
        "steps": args.steps,
        "total": args.total,
        "stride": args.stride,
        "repeats": args.repeats,
        "calls": args.calls,
    }


def _print_options(args: argparse.Namespace, common: dict[str, Any], device: str, ceiling: float) -> None:
    """What was measured, and the device's own matrix product in TFLOP/s."""
    from unmask.bench import flops

    formula = {"train": flops.TRAIN, "ar": flops.DECODE}.get(args.task, flops.DENOISE)
    sampled = f", T {args.steps}" if args.task in ("sample", "semi-ar") else ""
    dims = "×".join(str(common[name]) for name in ("hidden", "blocks", "heads"))
    size = f"DiT {dims}, L {args.length}, V {args.vocab}"
    print(f"{args.task}: {size}, batch {common['batch']}{sampled}")
    print(f"on {device}, {common['precision']}; MFU is against a large matrix product, {ceiling:.3g} TFLOP/s")
    print(f"FLOP = {formula}\n")


def _print_table(rows: dict[str, dict[str, Any]]) -> None:
    head = f"{'':<10}{'seconds':>10}{'(range)':>18}{'tok/s':>12}{'TFLOP/s':>9}{'MFU':>7}{'peak GB':>9}{'warm-up s':>11}"
    print(head)
    for name, row in rows.items():
        spread = f"({row['fastest']:.4g}–{row['slowest']:.4g})"
        print(
            f"{name:<10}{row['seconds']:>10.4g}{spread:>18}{row['tokens_per_second']:>12,.0f}{row['tflops']:>9.3g}"
            f"{row['mfu']:>7.1%}{row['peak_gb']:>9.2f}{row['warm_up']:>11.1f}"
        )
    if "textbook" in rows:
        plain, ours = rows["textbook"], rows["unmask"]
        memory = f", {ours['peak_gb'] / plain['peak_gb']:.2f}× the memory" if plain["peak_gb"] else ""
        print(f"\nunmask: {plain['seconds'] / ours['seconds']:.2f}× the speed{memory}")


def print_profile(entries: list[tuple[str, int, float]], most: int = 25) -> None:
    whole = sum(ms for _, _, ms in entries)
    print(f"\n{whole:.4g} ms in {sum(n for _, n, _ in entries):,} kernels:")
    for name, count, ms in entries[:most]:
        print(f"{ms:>9.3f} ms {ms / whole:>6.1%} {count:>7,} × {1000 * ms / count:>7.1f} µs  {name[:70]}")


def summary(result: Any, peak: float) -> dict[str, Any]:
    seconds = statistics.median(result.seconds)
    return {
        "seconds": seconds,
        "fastest": min(result.seconds),
        "slowest": max(result.seconds),
        "tokens_per_second": result.tokens / seconds,
        "tflops": result.flops / seconds / 1e12,
        "mfu": result.flops / seconds / peak,
        "peak_gb": result.peak_bytes / 1e9,
        "warm_up": result.warm_up,
        "note": result.note,
        "profile": result.profile,
    }


def device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
