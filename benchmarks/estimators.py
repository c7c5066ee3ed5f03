"""How much each estimator of the bound varies given the texts, at equal network calls.

    python benchmarks/estimators.py MODEL TEXTS [--rows 8] [--draws 64] [--precision 0.05] [--json FILE] [--plot FILE]

plain: what the papers' evaluations do, an independent uniform time for each draw, the weight -alpha'/(1-alpha). time:
the same with times spread evenly over groups of four draws of a row. T=1000: steps. count: the number of masks instead
of a time, each alone and in groups, as `unmask eval` takes them for a network without time. Told is the standard error
of nats per token given the texts, and how many calls plain needs for as narrow an interval, for each. Last comes what
`unmask eval --precision` needs for an interval of that width, beside the calls and seconds of plain for the same.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.cli._chart import Curve, draw
from unmask.corpora.sources import from_path
from unmask.data.batch import Batch
from unmask.data.packing import Rows, pack_texts
from unmask.denoisers.network import evaluating
from unmask.evaluation.bound import Bound
from unmask.evaluation.evaluate import batches_of, evaluate_rows
from unmask.evaluation.measurement import student_975
from unmask.metrics.perplexity import until_narrow
from unmask.model import Model, load
from unmask.objectives.draws import Draws, bound_draws

# How many draws of a row are spread evenly over time together, and the form of the bound.
WAYS = {
    "plain": (1, "time"),
    "time": (4, "time"),
    "T=1000": (4, "T=1000"),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--draws", type=int, default=64, help="network calls of a row, a multiple of 16")
    parser.add_argument("--precision", type=float, default=0.05, help="in nats per token, to each side (default 0.05)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    model = load(args.model)
    texts = [document.text for document in islice(from_path(args.texts).documents(), args.rows)]
    rows = pack_texts(texts, model.tokenizer, "pad", model.length, model.anchor)
    (batch,) = batches_of(model.denoiser, rows, seed=0, batch=len(rows))
    tokens = int(batch.num_tokens)
    found: dict[str, dict[str, Any]] = {}
    for name in WAYS:
        draws_BS, seconds = estimates(model, batch, name, args.draws)
        columns = draws_BS.shape[1]
        error = float((draws_BS.var(dim=1).sum() / columns).sqrt()) / tokens
        found[name] = {"nats_per_token": float(draws_BS.mean(dim=1).sum()) / tokens, "error": error, "seconds": seconds}
    plain = found["plain"]["error"]
    print(f"{len(texts)} texts, {tokens} tokens, {args.draws} calls a text")
    print(f"{'estimator':<12} {'nats/token':>10} {'error':>8} {'calls of plain':>15} {'seconds':>8}")
    for name, one in found.items():
        one["calls_of_plain"] = (plain / one["error"]) ** 2
        numbers = f"{one['nats_per_token']:>10.4f} {one['error']:>8.4f} {one['calls_of_plain']:>15.2f}"
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
    found["precision"] = {"asked": args.precision, **last}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        calls = [8, 16, 32, 64, 128, 256]
        curves = [
            Curve(name, [], [(n, found[name]["error"] * (args.draws / n) ** 0.5) for n in calls]) for name in WAYS
        ]
        args.plot.write_text(draw(curves, across="calls a text", up="standard error, nats per token"), encoding="utf-8")


if __name__ == "__main__":
    main()
