"""Curves of `benchmarks/gpu.py` as one SVG: tokens per second by batch size and by length.

python benchmarks/plot.py docs/speed.svg table.jsonl curves.jsonl
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, GAP = 360, 260, 70, 40, 90
COLOURS = {"train": "#2563eb", "sample": "#d97706"}
NAMES = {"train": "training", "sample": "sampling, T = 128"}


def read(paths: list[str]) -> list[dict[str, Any]]:
    lines = [json.loads(line) for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [r for r in lines if r["version"] == "unmask" and r["vocab"] == 50257 and r["task"] in COLOURS]


def rate(result: dict[str, Any]) -> float:
    return float(result["tokens"] / statistics.median(result["seconds"]))


def series(results: list[dict[str, Any]], task: str, axis: str) -> list[tuple[float, float]]:
    """By batch at L = 1024; by length at 32,768 tokens a step in training, one row in sampling."""
    points = {}
    for r in results:
        if r["task"] != task or (task == "sample" and r["steps"] != 128):
            continue
        on_axis = {
            "batch": r["length"] == 1024,
            "length": r["batch"] * r["length"] == 32768 if task == "train" else r["batch"] == 1,
        }
        if on_axis[axis]:
            points[float(r[axis])] = rate(r)
    return sorted(points.items())


def panel(results: list[dict[str, Any]], axis: str, left: float) -> list[str]:
    lines = {task: series(results, task, axis) for task in COLOURS}
    every = [point for line in lines.values() for point in line]
    x_lo, x_hi = math.log2(min(x for x, _ in every)), math.log2(max(x for x, _ in every))
    y_lo = math.floor(math.log10(min(y for _, y in every)))
    y_hi = math.ceil(math.log10(max(y for _, y in every)))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - x_lo) / (x_hi - x_lo or 1)
        up = (math.log10(y) - y_lo) / (y_hi - y_lo or 1)
        return left + WIDTH * across, TOP + HEIGHT * (1 - up)

    title = "batch, L = 1024" if axis == "batch" else "L (training: 32,768 tokens a step; sampling: one row)"
    out = [f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">{title}</text>']
    for power in range(y_lo, y_hi + 1):
        y = place(2**x_lo, 10**power)[1]
        out.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10**power:,}</text>')
    for x in sorted({x for x, _ in every}):
        across = place(x, 10**y_lo)[0]
        out.append(f'<text x="{across:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{x:.0f}</text>')
    for task, points in lines.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in points))
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[task]}" stroke-width="2"/>')
        for x, y in (place(*p) for p in points):
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[task]}"/>')
    return out


def main() -> None:
    target, *sources = sys.argv[1:]
    results = read(sources)
    width = 2 * (LEFT + WIDTH) + GAP - LEFT + 30
    body = [*panel(results, "batch", LEFT), *panel(results, "length", LEFT + WIDTH + GAP)]
    for i, task in enumerate(COLOURS):
        x = LEFT + i * 140
        body.append(
            f'<circle cx="{x}" cy="16" r="4" fill="{COLOURS[task]}"/><text x="{x + 10}" y="20">{NAMES[task]}</text>'
        )
    body.append(f'<text x="{LEFT + 300}" y="20" fill="#666">tokens a second, DiT small, V 50257, bf16, one H200</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + 55}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"><rect width="100%" height="100%" fill="white"/>'
    Path(target).write_text("\n".join([f"{head} {style}", *body, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
