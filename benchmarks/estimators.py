"""How much each estimator of the bound varies given the texts, at equal numbers of network calls.

    python benchmarks/estimators.py MODEL TEXTS [--rows 8] [--length 64] [--draws 96] [--precision 0.1] [--plot SVG]

plain: as in the papers' evaluations, an independent uniform time for each draw, with the weight -alpha'/(1-alpha).
time: the same with times spread evenly over groups of four draws of a row. T=1000: discrete steps, in the same groups.
count: the number of masks in place of a time, with each draw by itself and in groups, as `unmask eval` uses for a
network without time. The output gives the standard error of nats per token given the texts, its own 95% interval, and
how many calls of plain one call is worth. The last line gives what `unmask eval --precision` needs for an interval of
that width, beside the calls and seconds that plain needs for it. --plot draws the errors, in light or dark colours as
the reader's system is set; marks differ in shape, not only in colour.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.axes import short, ticks
from unmask.corpora.sources import from_path
from unmask.data.batch import Batch
from unmask.data.packing import Rows, pack_texts
from unmask.denoisers.network import evaluating
from unmask.errors import UnmaskError
from unmask.evaluation.bound import Bound
from unmask.evaluation.evaluate import batches_of, evaluate_rows
from unmask.evaluation.measurement import student_975
from unmask.metrics.perplexity import until_narrow
from unmask.model import Model, load
from unmask.objectives.draws import Draws, bound_draws

# How many draws of a row are spread evenly over time together, and the form of the bound.
WAYS = {
    "plain": (1, "time"),
    "time of 4": (4, "time"),
    "T=1000 of 4": (4, "T=1000"),
    "count alone": (1, "count"),
    "count of 2": (2, "count"),
    "count of 4": (4, "count"),
    "count of 8": (8, "count"),
    "count of 16": (16, "count"),
}


@torch.no_grad()
def estimates(model: Model, batch: Batch, name: str, draws: int) -> tuple[Tensor, float]:
    """[B, groups] independent estimates of each row, a group of draws each, and the seconds they took."""
    strata, form_name = WAYS[name]
    form = model.objective.with_estimator(form_name)
    began, made = time.perf_counter(), []
    with evaluating(model.denoiser):
        for group in bound_draws(batch.key_B, Draws(draws // strata, strata)):
            drawn = [replace(batch, key_B=key_j_B, time_B=time_B) for key_j_B, time_B in group]
            nats = [form.row_nats(model.denoiser, one).double().cpu() for one in drawn]
            made.append(torch.stack(nats).mean(dim=0))
    return torch.stack(made, dim=1), time.perf_counter() - began


def error_of(draws_BS: Tensor, tokens: int) -> dict[str, Any]:
    """The standard error of nats per token given the texts, and how far it is known: a 95% interval.

    The sum of the rows' variances is taken for chi-square, with the degrees of freedom of Satterthwaite.

    >>> error_of(torch.tensor([[0.0, 2.0], [4.0, 6.0]]), tokens=2)["error"] ** 2  # doctest: +ELLIPSIS
    0.5...
    """
    rows, columns = draws_BS.shape
    variance_B = draws_BS.double().var(dim=1) if columns > 1 else torch.zeros(1)
    squares = float(variance_B.square().sum())
    error = math.sqrt(float(variance_B.sum()) / columns) / tokens
    freedom = float(variance_B.sum()) ** 2 * (columns - 1) / squares if squares else 0.0
    if freedom < 2:
        raise SystemExit(f"{columns} groups of {rows} texts are too few to tell an error: give more --rows or --draws")
    ends = [error / math.sqrt(chi_square(freedom, z) / freedom) for z in (1.96, -1.96)]
    return {"error": error, "error_ci95": ends, "groups": rows * columns}


def chi_square(freedom: float, z: float) -> float:
    """The quantile of chi-square at that of the normal law, by Wilson and Hilferty; within 2% from 8 degrees on.

    >>> round(chi_square(10, 1.96), 1)  # 20.5
    20.5
    """
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


LEFT, RIGHT, TOP, WIDTH, ROW = 150, 190, 62, 420, 30
SHAPES = {"time": "circle", "T=1000": "square", "count": "diamond"}
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; } .note { fill: #57606a; } .grid { stroke: #d8dee4; }
  .bar { stroke: #1f2328; stroke-width: 1.4; } .mark { fill: #1f2328; stroke: #1f2328; }
  .alone { fill: #ffffff; stroke-width: 1.6; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .page { fill: #0d1117; } .note { fill: #9198a1; } .grid { stroke: #21262d; }
    .bar { stroke: #e6edf3; } .mark { fill: #e6edf3; stroke: #e6edf3; } .alone { fill: #0d1117; }
  }
"""


def draw(found: dict[str, dict[str, Any]], title: str) -> str:
    """A line for each estimator: its error with the interval, and what a call is worth in calls of the plain one.

    >>> one = {"error": 0.05, "error_ci95": [0.04, 0.06], "calls_of_plain": 1.0}
    >>> draw({"plain": one}, "of nothing")[:4]
    '<svg'
    """
    title = escape(title)
    high = 1.05 * max(one["error_ci95"][1] for one in found.values())
    bottom = TOP + ROW * len(found)

    def x_of(error: float) -> float:
        return LEFT + WIDTH * error / high

    body = [f'<text x="16" y="24">{title}</text>']
    body.append(f'<text class="note" x="{LEFT + WIDTH + 16}" y="{TOP - 14}">a call in calls of plain</text>')
    for tick in ticks(0, high):
        x = x_of(tick)
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
        body.append(f'<text class="note" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{short(tick)}</text>')
    for number, (name, one) in enumerate(found.items()):
        y = TOP + ROW * (number + 0.5)
        low, top = (x_of(end) for end in one["error_ci95"])
        body.append(f'<text x="{LEFT - 14}" y="{y + 4.5:.1f}" text-anchor="end">{name}</text>')
        for x1, x2, y1, y2 in ((low, top, y, y), (low, low, y - 4, y + 4), (top, top, y - 4, y + 4)):
            body.append(f'<line class="bar" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')
        strata, form = WAYS[name]
        body.append(mark(SHAPES[form], x_of(one["error"]), y, alone=strata == 1))
        body.append(f'<text x="{LEFT + WIDTH + 16}" y="{y + 4.5:.1f}">{one["calls_of_plain"]:.1f}</text>')
    key = "○ continuous time  □ T steps  ◇ count of masks; hollow: each draw by itself, filled: in groups"
    across = "standard error of nats per token given the texts, with its 95% interval"
    body.append(f'<text x="{LEFT}" y="{bottom + 40}">{across}</text>')
    body.append(f'<text class="note" x="{LEFT}" y="{bottom + 60}">{key}</text>')
    width, height = LEFT + WIDTH + RIGHT, bottom + 76
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    page = '<rect class="page" width="100%" height="100%" rx="6"/>'
    return "\n".join([f'{head} role="img"><title>{title}</title><style>{STYLE}</style>{page}', *body, "</svg>\n"])


def mark(shape: str, x: float, y: float, *, alone: bool) -> str:
    look = f'class="mark{" alone" if alone else ""}"'
    if shape == "circle":
        return f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    corners = {
        "square": [(-4.5, -4.5), (4.5, -4.5), (4.5, 4.5), (-4.5, 4.5)],
        "diamond": [(0, -6), (6, 0), (0, 6), (-6, 0)],
    }
    return f'<polygon {look} points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[shape])}"/>'


@torch.no_grad()
def to_precision(model: Model, rows: Rows, precision: float, plain: float) -> dict[str, float]:
    """What `unmask eval --precision` does, and how many calls of a text the plain estimator needs for that width.

    plain: its standard error of nats per token from one call of each text.
    """
    spent = 0.0

    def measure(draws: Draws) -> Bound:
        nonlocal spent
        began = time.perf_counter()
        bound = evaluate_rows(model.denoiser, model.objective, rows, num_samples=draws, batch=len(rows))
        spent += time.perf_counter() - began
        return bound

    bound, draws = until_narrow(measure, len(rows), precision)
    calls = (student_975(1000) * plain / bound.draws_half) ** 2  # of so many that Student's t is all but normal
    groups = {"groups": draws.groups, "size": draws.size}
    return {"half": bound.draws_half, "calls": draws.num, "seconds": spent, "calls_of_plain": calls, **groups}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, help="tokens of a text, the first ones (default: the model's window)")
    parser.add_argument("--draws", type=int, default=64, help="network calls of a row, a multiple of 16 (default 64)")
    parser.add_argument("--precision", type=float, default=0.05, help="in nats per token, to each side (default 0.05)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args(words)
    if args.draws % 16 or args.draws < 32:
        parser.error(f"--draws is a multiple of 16 from 32 on, so that all estimators get as many calls: {args.draws}")
    try:
        compare(args)
    except UnmaskError as e:
        raise SystemExit(str(e)) from None


def compare(args: argparse.Namespace) -> None:
    """Measure, print, and write what was asked for."""
    model = load(args.model)
    texts = [document.text for document in islice(from_path(args.texts).documents(), args.rows)]
    rows = pack_texts(texts, model.tokenizer, "pad", args.length or model.length, model.anchor)
    (batch,) = batches_of(model.denoiser, rows, seed=0, batch=len(rows))
    tokens = int(batch.num_tokens)
    found: dict[str, dict[str, Any]] = {}
    for name in WAYS:
        draws_BS, seconds = estimates(model, batch, name, args.draws)
        value = float(draws_BS.mean(dim=1).sum()) / tokens
        found[name] = {"nats_per_token": value, **error_of(draws_BS, tokens), "seconds": seconds}
    plain = found["plain"]["error"]
    title = f"{len(texts)} texts, {tokens:,} tokens, {args.draws} network calls a text"
    print(title)
    print(f"{'estimator':<12} {'nats/token':>10} {'error':>8} {'95% of it':>17} {'calls of plain':>15} {'seconds':>8}")
    for name, one in found.items():
        one["calls_of_plain"] = (plain / one["error"]) ** 2
        spread = "{:.4f} – {:.4f}".format(*one["error_ci95"])
        numbers = f"{one['nats_per_token']:>10.4f} {one['error']:>8.4f} {spread:>17} {one['calls_of_plain']:>15.2f}"
        print(f"{name:<12} {numbers} {one['seconds']:>8.1f}")
    last = to_precision(model, rows, args.precision, plain * args.draws**0.5)
    last["seconds_of_plain"] = last["calls_of_plain"] * found["plain"]["seconds"] / args.draws
    print(
        f"--precision {args.precision}: ± {last['half']:.4f} after {last['calls']:.0f} calls a text "
        f"({last['groups']:.0f} groups of {last['size']:.0f}), {last['seconds']:.1f} s; plain: "
        f"{last['calls_of_plain']:.0f} calls, {last['seconds_of_plain']:.1f} s: "
        f"{last['calls_of_plain'] / last['calls']:.1f} times the calls, "
        f"{last['seconds_of_plain'] / last['seconds']:.1f} times the seconds"
    )
    if args.plot:
        args.plot.write_text(draw(found, f"{args.model}: {title}"), encoding="utf-8")
    if args.json:
        precision = {"asked": args.precision, **last}
        args.json.write_text(json.dumps(found | {"precision": precision}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
