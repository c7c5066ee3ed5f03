"""The selective scan by length, against the plain recurrence and attention; its share of a copy's bandwidth, kernel by
kernel; and the bases per second of the networks in the DNA experiments.

    python benchmarks/scan.py docs/scan.svg [--lengths 1024 4096 16384 65536 131072] [--tokens 262144] [--device cuda]

Everything is measured in one run, forward and backward, in bf16 on a GPU. Each call has the same number of tokens at
every length, so a cost that does not depend on the length gives a flat line. The recurrence takes one torch step per
token and is left out beyond --longest-recurrence. On a GPU the networks are measured as they are and compiled, and the
times of single kernels come from a profile.
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
from torch.profiler import ProfilerActivity, profile

from unmask.axes import short
from unmask.config import OptimConfig
from unmask.data.batch import make_batch
from unmask.data.complement import complement_of
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers import Denoiser
from unmask.denoisers.caduceus import Caduceus
from unmask.denoisers.hyena import Hyena
from unmask.denoisers.mamba import Mamba
from unmask.denoisers.recurrent.scan import scan_step, selective_scan
from unmask.devices import fast_attention, few_threads, pick_device
from unmask.objectives import Objective
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.samplers.left_to_right import LeftToRight
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample
from unmask.training.compiling import compile_trunk
from unmask.training.optim import Updater, make_optimizer

HEAD = 64
COLOURS = {"chunked": "#2563eb", "recurrence": "#d97706", "attention": "#059669"}
DASHES = {"chunked": "none", "recurrence": "8 4", "attention": "2 4"}
WIDTH, HEIGHT, LEFT, TOP = 420, 280, 60, 40
ENOUGH = 4.0  # seconds of measuring one thing
SHOWN = 14  # kernels of a profile
KERNELS = ("_forward", "_backward", "_ends", "_chain")


class Clock:
    """Seconds of a call: the least of several rounds, after a call that is not counted.

    On a GPU a round queues calls until they take a while, so that it is not the host that is measured. No more rounds
    begin after ENOUGH seconds.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.cuda, self.repeats = device.type == "cuda", repeats

    def __call__(self, run: Callable[[], object]) -> float:
        self._round(run, 1)
        began, seconds = time.perf_counter(), [self._round(run, 1)]
        calls = max(1, min(50, int(0.05 / seconds[0]))) if self.cuda else 1
        while len(seconds) < self.repeats and time.perf_counter() - began < ENOUGH:
            seconds.append(self._round(run, calls))
        return min(seconds)

    def _round(self, run: Callable[[], object], calls: int) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        self._wait()
        return (time.perf_counter() - began) / calls

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def kernels(run: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Calls and seconds of each kernel of a GPU in one call, the longest first."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    spent: dict[str, tuple[int, float]] = {}
    for event in trace.events() or []:
        if event.device_type.name == "CUDA":
            count, seconds = spent.get(event.name, (0, 0.0))
            spent[event.name] = count + 1, seconds + event.device_time / 1e6
    return dict(sorted(spent.items(), key=lambda one: -one[1][1]))


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
    # Split at once: the gradient of each x[:, t] would be as large as x.
    for x_BE, step_BE, B_BN, C_BN in zip(*(t.unbind(dim=1) for t in (x, step, B, C)), strict=True):
        y, state = scan_step(x_BE, step_BE, A, B_BN, C_BN, D, state)
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
        ways: dict[str, tuple[list[Tensor], Callable[[], Tensor]]] = {
            "chunked": (given, lambda given=given: selective_scan(*given)[0])
        }
        if length <= args.longest_recurrence:
            ways["recurrence"] = given, lambda given=given: recurrence(*given)
        if length <= args.longest_attention:
            ways["attention"] = given[:1], lambda given=given: attention(given[0])
        for name, (read, way) in ways.items():
            result = {"way": name, "length": length, "rows": rows, **measured(way, read, clock, name == "chunked")}
            results.append(result)
            print(json.dumps({key: value for key, value in result.items() if key != "kernels"}), flush=True)
    return results


def measured(way: Callable[[], Tensor], read: list[Tensor], clock: Clock, own: bool) -> dict[str, Any]:
    """Seconds forward, and forward and backward; on a GPU also the most memory and, if `own`, each kernel's."""
    upstream = torch.ones_like(way())

    def both() -> None:
        torch.autograd.grad(way(), read, upstream)

    with torch.no_grad():
        result: dict[str, Any] = {"forward": clock(way)}
        of_kernels = {"forward": kernels(way)} if own and clock.cuda else {}
    if clock.cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    result["both"] = clock(both)
    if clock.cuda:
        result["bytes"] = torch.cuda.max_memory_allocated() - before
    if own and clock.cuda:
        result["kernels"] = {**of_kernels, "both": kernels(both)}
    return result


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
    print(f"\ncopy: {copied / 1e9:,.0f} GB/s; what the scan has to read and write, as a share of that")
    for r in results:
        if r["way"] != "chunked":
            continue
        tokens = r["rows"] * r["length"]
        read = tokens * (E * (wide + 4) + 2 * N * wide)  # x and step; B and C
        least = {"forward": read + tokens * E * wide}
        least["both"] = least["forward"] + read + tokens * E * wide + read  # and dy; all gradients
        shares = {key: size / r[key] / copied for key, size in least.items()}
        memory = f"; {r['bytes'] / tokens:,.0f} bytes of memory a token" if "bytes" in r else ""
        print(f"L {r['length']:,}: {shares['forward']:.1%} forward, {shares['both']:.1%} forward and backward{memory}")
        for key, own in r.get("kernels", {}).items():
            alone = sum(seconds for name, (_, seconds) in own.items() if name in KERNELS)
            print(f"  the kernels alone, {key}: {least[key] / alone / copied:.1%}")
            listed(own)
    if device.type == "cuda":
        exponentials(copied, least["forward"] / (tokens * E * N), device)


def exponentials(copied: float, each: float, device: torch.device) -> None:
    """The most that a kernel can reach that computes one exponential a state: a multiprocessor does 16 a clock."""
    chip = torch.cuda.get_device_properties(device)
    rate = 16 * chip.multi_processor_count * chip.clock_rate * 1e3  # clock_rate: the highest, in kHz
    print(f"{rate / 1e12:.1f}e12 exponentials/s at the highest clock leave at most {rate * each / copied:.0%} forward")


def listed(spent: dict[str, tuple[int, float]], most: int = 6) -> None:
    for name, (count, seconds) in list(spent.items())[:most]:
        print(f"    {1000 * seconds:9.3f} ms {count:5} x {name[:90]}")


def networks() -> dict[str, tuple[Denoiser, Objective]]:
    """The networks of the DNA experiments, each with an objective that trains it."""
    complement = complement_of(load_tokenizer("dna"))
    return {
        "mamba": (Mamba(), AR()),
        "hyena": (Hyena(), AR()),
        "caduceus": (Caduceus(equivariance="ps", complement=complement), MDLM(form="count")),
    }


def bases(name: str, args: argparse.Namespace, device: torch.device) -> None:
    """Training steps of a network on rows of 1,024 letters."""
    torch.manual_seed(0)
    (denoiser, objective), tokenizer = networks()[name], load_tokenizer("dna")
    net = denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id).to(device).train()
    optimizer, names = make_optimizer(net, OptimConfig(lr=1e-3, muon=False))
    updater, (rows, length) = Updater(optimizer, names, ema=None, clip=1.0), (args.model_rows, args.model_length)
    x_BL = torch.randint(0, 4, (rows, length), generator=torch.Generator().manual_seed(0))
    batch = make_batch(x_BL, seed=0, step=0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = objective.loss(net, batch)
        (loss.nats / loss.tokens).backward()
        norm = updater.grad_norm()
        updater.update(lr=1e-3, grad_norm=norm, nonfinite=~torch.isfinite(norm))

    number = sum(p.numel() for p in net.parameters())
    print(f"\n{name}, {type(objective).__name__}, {number:,} parameters, L {length:,}, {rows} rows:")
    for compiled in (False, True) if device.type == "cuda" else (False,):
        if compiled:
            compile_trunk(net, padding=False)
        began = time.perf_counter()
        step()
        first = time.perf_counter() - began
        seconds = Clock(device, args.repeats)(step)
        how = "compiled" if compiled else "as it is"
        print(f"  {how}: {rows * length / seconds:,.0f} bases/s in training; {1000 * seconds:.1f} ms a step", end="")
        print(f", the first one {first:.1f} s", flush=True)
    if device.type == "cuda":
        listed(kernels(step), SHOWN)


def writing(args: argparse.Namespace, device: torch.device) -> None:
    """Milliseconds a token of one text, which should not depend on how long it is."""
    torch.manual_seed(0)
    net = Mamba(hidden=128, blocks=4).build(num_ids=16, mask_id=15).to(device).eval()
    for length in args.written:
        canvas = Canvas.blank(num=1, length=length, mask_id=15, seed=1).to(device)
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
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(10**power)}</text>')
    for length in sorted({x for x, _ in every}):
        x = place(length, 10.0**y_lo)[0]
        out.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{length:,}</text>')
    for way, line in points.items():
        if not line:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in line))
        dashes = f'stroke-width="2" stroke-dasharray="{DASHES[way]}"'
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[way]}" {dashes}/>')
        out += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[way]}"/>' for x, y in (place(*p) for p in line)
        ]
        end_x, end_y = place(*line[-1])
        out.append(f'<text x="{end_x + 8:.1f}" y="{end_y + 4:.1f}" fill="{COLOURS[way]}">{way}</text>')
    out.append(f'<text x="{LEFT}" y="20" fill="#666">{where}</text>')
    out.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 38}">tokens a second, forward and backward, by length</text>')
    size = f'width="{LEFT + WIDTH + 80}" height="{TOP + HEIGHT + 50}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}', *out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", nargs="?", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536, 131072])
    parser.add_argument(
        "--networks", nargs="*", default=["mamba", "caduceus", "hyena"], choices=["mamba", "caduceus", "hyena"]
    )
    parser.add_argument("--written", type=int, nargs="*", default=[256, 2048])
    for name, value in {
        "tokens": 262144,
        "channels": 256,
        "states": 16,
        "repeats": 5,
        "longest_recurrence": 16384,
        "longest_attention": 131072,
        "model_rows": 64,
        "model_length": 1024,
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    device = pick_device(args.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    with few_threads(device):
        results = by_length(args, device)
        if args.svg is not None:
            args.svg.write_text(drawn(results, where), encoding="utf-8")
        print(f"\n{where}; forward / forward and backward\n\n{table(results)}\n")
        for way in ("chunked", "attention"):  # the recurrence's depends on how many rows share a step
            fits = ", ".join(f"{exponent(results, way, key):.2f} {key}" for key in ("forward", "both"))
            print(f"{way}: exponent of a row's time in L {fits}")
        bandwidth(results, args, device)
        for name in args.networks:
            bases(name, args, device)
        writing(args, device)


if __name__ == "__main__":
    main()
