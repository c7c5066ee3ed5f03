"""Measure a model on a text: perplexity, nats per token, bits per byte, each with a 95% interval.

Diffusion models give an upper bound, autoregressive ones the exact value. The protocol is printed beside the numbers.
Without --data a training run is measured on what it has held out; --data is read as the run reads its own texts.

Several processes (--nproc, or torchrun) share the batches and give the numbers that one process gives.

Example:
  unmask eval runs/demo --max-rows 200
  unmask eval demo-model --data notes.txt --json
  unmask eval demo-model --data notes.txt --nproc 4
  unmask eval runs/pairs --data test.jsonl --field answer --prompt-field question
"""

from __future__ import annotations

import argparse
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.cli import _naming, _processes, _reading

if TYPE_CHECKING:
    from unmask.config import DataConfig
    from unmask.corpora import Corpus
    from unmask.data.packing import Anchor, Policy, Rows
    from unmask.distributed.world import World
    from unmask.model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model(parser)
    parser.add_argument("--data", help=f"{_reading.DATA} (default: what a run has held out)")
    parser.add_argument("--packing", choices=["wrap", "pad", "sentence"], help="default: as the model was trained")
    parser.add_argument("--length", type=int, help="row length in tokens (default: the model's window)")
    parser.add_argument("--max-rows", type=int, help="evaluate this many rows, spread evenly (default: all)")
    parser.add_argument("--num-samples", type=int, default=4, help="draws of time and masks for each row (default 4)")
    parser.add_argument("--estimator", help="count, time or T=<steps> (default: the objective's own)")
    parser.add_argument("--batch", type=int, default=16, help="rows at a time (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="of times and masks (default 0)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU where there is one)")
    _reading.add_arguments(parser)
    _processes.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if _processes.launched(args):
        return 0
    from unmask.distributed.world import join_world

    with join_world(args.device, timeout=args.timeout) as world:
        return _evaluate(args, world)


def _evaluate(args: argparse.Namespace, world: World) -> int:
    from unmask.cli._terminal import progress_bar
    from unmask.corpora.sources import existing
    from unmask.data.packing import reading_bar
    from unmask.errors import UsageError, did_you_mean
    from unmask.evaluation.evaluate import evaluate_rows
    from unmask.model import load

    for name in ("max_rows", "num_samples", "batch", "length"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.data is None and (options := _reading.given(args)):
        flag = f"--{min(options).replace('_', '-')}"
        raise UsageError(f"what a run held out is read as it was: leave out {flag}, or give --data")
    if args.estimator is not None and not re.fullmatch(r"count|time|exact|T=[0-9]+", args.estimator):
        known = ["count", "time", "exact", "T=1000"]
        raise UsageError(f"unknown estimator {args.estimator!r}; {did_you_mean(args.estimator, known)}")
    if args.data is not None and args.data != "stdlib":
        existing(args.data)
    model = load(args.model, device=world.device)
    if args.label_field and not model.denoiser.num_classes:
        raise UsageError(f"this model knows no classes: leave out {_reading.LABEL_FIELD}")
    trained = _reading.trained_on(args.model, needed=args.data is None)
    packing = args.packing or (model.packing if trained is None else trained.packing)
    anchor = "none" if packing == "wrap" else model.anchor
    length = args.length or model.length
    if length > model.length:
        raise UsageError(f"--length {length} is beyond the model's window of {model.length} tokens")
    with reading_bar() if world.first else nullcontext() as bar:
        corpus, rows, measured = _measured_on(args, model, trained, packing, length, anchor, bar)
    rows = rows.classed(model.labels) if model.denoiser.num_classes else rows
    estimator = args.estimator or model.objective.estimator(model.denoiser)
    world.arm()
    with progress_bar("evaluate") if world.first else nullcontext() as progress:
        bound = evaluate_rows(
            model.denoiser,
            model.objective,
            rows,
            seed=args.seed,
            num_samples=args.num_samples,
            max_rows=args.max_rows,
            batch=args.batch,
            estimator=estimator,
            progress=progress,
            world=world,
        )
    if not world.first:
        return 0
    exact = estimator == "exact"
    protocol = {
        "data": measured,
        "corpus": rows.report.sentence(),
        "rows": len(bound.tokens_B),
        "packing": packing,
        "anchor": anchor,
        **_reading.treatment(corpus, rows, model, trained),
        "length": length,
        "estimator": estimator,
        "draws_per_row": 1 if exact else args.num_samples,
        "tokenizer": f"{type(model.tokenizer).__name__.lower()} of {model.tokenizer.num_ids} ids",
        "seed": args.seed,
        "kind": "exact" if exact else "upper bound",
        # Diffusion sees where padding begins, so a padded row is bounded given its length; autoregression is not told.
        "given": "row lengths" if not exact and packing != "wrap" else "nothing",
    }
    if args.json:
        print(json.dumps(bound.summary() | {"protocol": protocol}))
        return 0
    numbers = bound.summary()
    sign = "" if exact else "≤ "
    for label, key in (("perplexity", "ppl"), ("nats/token", "nats_per_token"), ("bits/byte", "bits_per_byte")):
        value, interval = numbers[key], numbers[f"{key}_ci95"]
        spread = (
            "no interval: a single draw"
            if not isinstance(interval, list)
            else "95% interval {:.4f} – {:.4f}".format(*interval)
        )
        print(f"{label:<11} {sign}{value:.4f}   {spread}" if value is not None else f"{label:<11} not finite")
    print(f"tokens      {bound.tokens:,} in {len(bound.tokens_B):,} rows, {bound.num_bytes:,} bytes")
    print("protocol    " + ", ".join(f"{k}={v}" for k, v in protocol.items() if k not in ("corpus", "rows")))
    print(f"corpus      {protocol['corpus']}")
    return 0


def _measured_on(
    args: argparse.Namespace,
    model: Model,
    trained: DataConfig | None,
    packing: Policy,
    length: int,
    anchor: Anchor,
    bar: Any,
) -> tuple[Corpus, Rows, str]:
    """The rows, the corpus they are of, and what the protocol calls it."""
    from unmask.data.packing import build_rows, rows_of
    from unmask.errors import UsageError
    from unmask.training.checkpoint.resume import check_held_out

    if args.data is not None:
        corpus = _reading.corpus_of(args, model, trained)
        how: dict[str, Any] = {"policy": packing, "length": length, "anchor": anchor, "progress": bar}
        return corpus, build_rows(corpus, model.tokenizer, **how), args.data
    if trained is None:
        raise UsageError(
            f"say what {args.model} is measured on: give --data FILE; only a run's folder knows what it held out"
        )
    if (packing, length) != (trained.packing, trained.length):
        raise UsageError(
            "what a run held out is measured as it was packed: leave out --packing and --length, or give --data"
        )
    rows = rows_of(trained, model.tokenizer, "valid", anchor=anchor, progress=bar)
    told = "" if check_held_out(Path(args.model), rows) else ", if the data is as it was: no checkpoint tells"
    return trained.valid or trained.train, rows, f"held out by the run{told}"
