"""The selective scan by length, against the plain recurrence and attention; its share of a copy's bandwidth; and the
bases per second of a Mamba of the size in the DNA experiments.

    python benchmarks/scan.py docs/scan.svg [--lengths 1024 4096 16384 65536 131072] [--tokens 131072] [--device cuda]

Everything is measured in one run, forward and backward, in bf16 on a GPU. Each call has the same number of tokens at
every length, so a cost that does not depend on the length gives a flat line. The recurrence takes one torch step per
token and is left out beyond --longest-recurrence.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.config import OptimConfig
from unmask.data.batch import make_batch
from unmask.denoisers.mamba import Mamba
from unmask.denoisers.recurrent.scan import scan_step, selective_scan
from unmask.devices import fast_attention, few_threads, pick_device
from unmask.objectives.ar import AR
from unmask.samplers.left_to_right import LeftToRight
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample
from unmask.training.optim import Updater, make_optimizer

HEAD = 64
COLOURS = {"chunked": "#2563eb", "recurrence": "#d97706", "attention": "#059669"}
WIDTH, HEIGHT, LEFT, TOP = 420, 280, 80, 40


class Clock:
    """Seconds of a call: the least of several, after one that is not counted."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.cuda, self.repeats = device.type == "cuda", repeats

    def __call__(self, run: Callable[[], object]) -> float:
        seconds = []
        for _ in range(1 + self.repeats):
            self._wait()
            began = time.perf_counter()
            run()
            self._wait()
            seconds.append(time.perf_counter() - began)
        return min(seconds[1:])

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def inputs(rows: int, length: int, args: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """x, step, A, B, C and D, as a mixer makes them."""
    dtype, E, N = (torch.bfloat16 if device.type == "cuda" else torch.float32), args.channels, args.states
    draws = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=draws)

    x, B, C = (draw(rows, length, width).to(dtype) for width in (E, N, N))
    step, A = 0.1 * draw(rows, length, E).abs(), -torch.arange(1.0, N + 1, device=device).expand(E, N).contiguous()
    return [t.requires_grad_() for t in (x, step, A, B, C, draw(E))]


def recurrence(x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    state, each = step.new_zeros(len(x), A.shape[1], A.shape[0]), []
    for t in range(x.shape[1]):
        y, state = scan_step(x[:, t], step[:, t], A, B[:, t], C[:, t], D, state)
        each.append(y)
    return torch.stack(each, dim=1)


def attention(x: Tensor) -> Tensor:
    """Causal, of as many channels; queries, keys and values are there already, as the scan's inputs are."""
    heads = x.unflatten(-1, (-1, HEAD)).transpose(1, 2)
    with fast_attention():
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def by_length(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    clock, results = Clock(device, args.repeats), []
    for length in args.lengths:
        rows = max(1, args.tokens // length)
        given = inputs(rows, length, args, device)
        ways: dict[str, Callable[[], Tensor]] = {"chunked": lambda given=given: selective_scan(*given)[0]}
        if length <= args.longest_recurrence:
            ways["recurrence"] = lambda given=given: recurrence(*given)
        if length <= args.longest_attention:
            ways["attention"] = lambda given=given: attention(given[0])
        for name, way in ways.items():
            upstream = torch.ones_like(way())

            def both(way: Callable[[], Tensor] = way, upstream: Tensor = upstream) -> None:
                way().backward(upstream)

            with torch.no_grad():
                forward = clock(way)
            result = {"way": name, "length": length, "rows": rows, "forward": forward, "both": clock(both)}
            results.append(result)
            print(json.dumps(result), flush=True)
    return results


def exponent(results: list[dict[str, Any]], way: str, key: str) -> float:
    """Of a row's seconds in its length, fitted in logarithms; linear is 1."""
    points = [(math.log(r["length"]), math.log(r[key] / r["rows"])) for r in results if r["way"] == way]
    if len(points) < 2:
        return math.nan
    (x_mean, y_mean) = (statistics.mean(axis) for axis in zip(*points, strict=True))
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)


def bandwidth(results: list[dict[str, Any]], args: argparse.Namespace, device: torch.device) -> None:
    """What the scan must read and write, against a copy of 1 GiB (64 MiB on a CPU)."""
    source = torch.empty((1 << 28) if device.type == "cuda" else (1 << 24), device=device)
    target = torch.empty_like(source)
    copied = 2 * 4 * source.numel() / Clock(device, args.repeats)(lambda: target.copy_(source))
    wide, E, N = (2 if device.type == "cuda" else 4), args.channels, args.states
    print(f"\ncopy: {copied / 1e9:,.0f} GB/s")
    for r in results:
        if r["way"] != "chunked":
            continue
        tokens = r["rows"] * r["length"]
        read = tokens * (E * (wide + 4) + 2 * N * wide)  # x and step; B and C
        forward = read + tokens * E * wide
        both = forward + read + tokens * E * wide + tokens * (E * (wide + 4) + 2 * N * wide)  # and dy; all gradients
        shares = forward / r["forward"] / copied, both / r["both"] / copied
        print(f"L {r['length']:,}: {shares[0]:.1%} of it forward, {shares[1]:.1%} forward and backward")


def bases(args: argparse.Namespace, device: torch.device) -> None:
    """Training steps of a 468K Mamba on rows of 1,024 letters."""
    torch.manual_seed(0)
    length, letters = args.model_length, 4
    net = Mamba(hidden=128, blocks=4).build(num_ids=16, mask_id=15).to(device).train()
    optimizer, names = make_optimizer(net, OptimConfig(lr=1e-3, muon=False))
    updater, rows = Updater(optimizer, names, ema=None, clip=1.0), args.model_rows
    x_BL = torch.randint(0, letters, (rows, length), generator=torch.Generator().manual_seed(0))
    batch = make_batch(x_BL, seed=0, step=0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = AR().loss(net, batch)
        (loss.nats / loss.tokens).backward()
        norm = updater.grad_norm()
        updater.update(lr=1e-3, grad_norm=norm, nonfinite=~torch.isfinite(norm))

    seconds = Clock(device, args.repeats)(step)
    number, rate = sum(p.numel() for p in net.parameters()), rows * length / seconds
    print(f"\nMamba of {number:,} parameters, L {length:,}, {rows} rows: {rate:,.0f} bases/s in training")


def writing(args: argparse.Namespace, device: torch.device) -> None:
    """Milliseconds a token of one text, which should not depend on how long it is."""
    torch.manual_seed(0)
    net = Mamba(hidden=128, blocks=4).build(num_ids=16, mask_id=15).to(device).eval()
    for length in args.written:
        canvas = Canvas.blank(num=1, length=length, mask_id=15, seed=1)
        seconds = Clock(device, 1)(lambda canvas=canvas: sample(net, canvas, LeftToRight()))
        print(f"writing {length:,} tokens: {1000 * seconds / length:.2f} ms a token")


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| L | rows | " + " | ".join(f"{way}, s" for way in COLOURS) + " |", "|" + " --- |" * (2 + len(COLOURS))]
    for length in sorted({r["length"] for r in results}):
        own = {r["way"]: r for r in results if r["length"] == length}
        cells = [f"{own[way]['forward']:.4f} / {own[way]['both']:.4f}" if way in own else "–" for way in COLOURS]
        lines.append(f"| {length:,} | {own['chunked']['rows']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def drawn(results: list[dict[str, Any]], where: str) -> str:
    """Tokens a second, forward and backward, by length, both on logarithmic axes."""
    points = {
        way: sorted((r["length"], r["rows"] * r["length"] / r["both"]) for r in results if r["way"] == way)
        for way in COLOURS
    }
    every = [point for line in points.values() for point in line]
    (x_lo, x_hi), y_all = (min(x for x, _ in every), max(x for x, _ in every)), [math.log10(y) for _, y in every]
    y_lo, y_hi = math.floor(min(y_all)), math.ceil(max(y_all))

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / x_lo) / (math.log(x_hi / x_lo) or 1)
        return LEFT + WIDTH * across, TOP + HEIGHT * (1 - (math.log10(y) - y_lo) / (y_hi - y_lo or 1))

    out = []
    for power in range(y_lo, y_hi + 1):
        y = place(x_lo, 10.0**power)[1]
        out.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10**power:,}</text>')
    for length in sorted({x for x, _ in every}):
        x = place(length, 10.0**y_lo)[0]
        out.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{length:,}</text>')
    for i, (way, line) in enumerate(points.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in line))
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[way]}" stroke-width="2"/>')
        out += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[way]}"/>' for x, y in (place(*p) for p in line)
        ]
        out.append(f'<text x="{LEFT + 110 * i}" y="20" fill="{COLOURS[way]}">{way}</text>')
    out.append(f'<text x="{LEFT + 330}" y="20" fill="#666">{where}</text>')
    out.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 38}">tokens a second, forward and backward, by length</text>')
    size = f'width="{LEFT + WIDTH + 60}" height="{TOP + HEIGHT + 50}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}', *out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", nargs="?", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536, 131072])
    parser.add_argument("--written", type=int, nargs="+", default=[256, 2048])
    for name, value in {
        "tokens": 131072,
        "channels": 256,
        "states": 16,
        "repeats": 5,
        "longest_recurrence": 16384,
        "longest_attention": 131072,
        "model_rows": 128,
        "model_length": 1024,
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    device = pick_device(args.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    with few_threads(device):
        results = by_length(args, device)
        print(f"\n{where}; forward / forward and backward\n\n{table(results)}\n")
        for way in ("chunked", "attention"):  # the recurrence's depends on how many rows share a step
            fits = ", ".join(f"{exponent(results, way, key):.2f} {key}" for key in ("forward", "both"))
            print(f"{way}: exponent of a row's time in L {fits}")
        bandwidth(results, args, device)
        bases(args, device)
        writing(args, device)
    if args.svg is not None:
        args.svg.write_text(drawn(results, where), encoding="utf-8")


if __name__ == "__main__":
    main()
