"""Measure a model on a text: perplexity or another metric.

Print perplexity, nats per token and bits per byte, each with a 95% interval, and the protocol. A diffusion model gives
an upper bound (≤), an autoregressive one the exact value (=); other numbers are estimates (≈). --metric selects another
metric; unmask plugins metrics lists them. Without --data a run is measured on its held-out data; --data is read as the
run reads its own texts.

--suite zero-shot measures several sets with one protocol, each with its detokenizer. The files are in --data-dir, or
fetched by name from the Hugging Face hub. With --out a suite that was stopped resumes without repeating a finished set.
--suite translation, style, infilling, last-word and planning score what a model writes: see docs/conditional.md.

--against OTHER measures both models with the same rows, masks and seeds and reports the difference. Because the two are
paired text by text, a difference far smaller than both intervals can be visible. Models with different tokenizers are
compared in bits per byte, which requires that both see the same texts. With --precision drawing continues until the
interval of the difference is that narrow; with --suite the difference is reported for every number of every set.

With --nproc, or torchrun, several processes share the batches and report the same numbers as one.

Examples:
  unmask eval runs/demo --max-rows 200
  unmask eval MODEL --data notes.txt --json
  unmask eval MODEL --data notes.txt --nproc 4
  unmask eval runs/pairs --data test.jsonl --field answer --prompt-field question
  unmask eval MODEL --data notes.txt --precision 0.01
  unmask eval runs/a --against runs/b --data notes.txt --precision 0.01
  unmask eval runs/a --against runs/b --suite zero-shot --data-dir sets --out results
  unmask eval MODEL --data notes.txt --metric '{"name": "masked_accuracy", "rate": 0.5}'
  unmask eval MODEL --suite zero-shot --data-dir sets --sets ptb wikitext --out results
  unmask eval runs/translation --suite translation --data-dir sets --out results
  unmask eval MODEL --suite infilling --data notes.txt --max-rows 50
  unmask eval MODEL --data notes.txt --metric '{"name": "order_likelihood", "sampler": {"name": "margin"}}'
"""

from __future__ import annotations

import argparse
import difflib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unmask.cli import _against, _naming, _processes, _reading, _suite

if TYPE_CHECKING:
    from unmask.config import DataConfig
    from unmask.corpora import Corpus
    from unmask.data.packing import Anchor, Policy, Rows
    from unmask.distributed.world import World
    from unmask.evaluation.against import Difference
    from unmask.evaluation.measurement import Measurement
    from unmask.metrics import Metric
    from unmask.metrics.perplexity import Perplexity
    from unmask.model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model(parser)
    parser.add_argument("--data", help=f"{_reading.DATA} (default: the run's held-out data)")
    parser.add_argument("--metric", help="a name, or a JSON object with name and options (default: perplexity)")
    parser.add_argument("--packing", choices=["wrap", "pad", "fill", "sentence"], help="default: as in training")
    parser.add_argument("--length", type=int, help="row length in tokens (default: the model's window)")
    parser.add_argument("--max-rows", type=int, help="evaluate this many rows, spread evenly (default: all)")
    parser.add_argument("--num-samples", type=int, help="draws of time and masks per row (default 4)")
    parser.add_argument(
        "--precision",
        type=float,
        help="keep drawing until the interval given the texts is ± this, in nats per token; "
        "with --against, the interval of the difference",
    )
    parser.add_argument("--estimator", help="count, time, T=<steps> or pseudo (default: the objective's own)")
    parser.add_argument(
        "--against", metavar="MODEL", help="another model, measured on the same rows and draws, and the difference"
    )
    parser.add_argument("--batch", type=int, help="rows per batch (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of times and masks (default 0)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")
    _reading.add_arguments(parser)
    _suite.add_arguments(parser)
    _processes.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.suite is None:
        _suite.refuse_without(args)
    else:
        _suite.check(args)  # before any process is started
    if _processes.launched(args):
        return 0
    from unmask.distributed.world import join_world

    with join_world(args.device, timeout=args.timeout) as world:
        return _evaluate(args, world)


def _evaluate(args: argparse.Namespace, world: World) -> int:
    from unmask.cli._terminal import progress_bar
    from unmask.corpora.sources import files_of
    from unmask.data.reading_bar import reading_bar
    from unmask.errors import UsageError
    from unmask.evaluation.against import evaluate_against
    from unmask.evaluation.evaluate import evaluate
    from unmask.model import load

    for flag in ("max_rows", "num_samples", "batch", "length"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')} must be at least 1, got {value}")
    if args.data is None and args.suite is None and (options := _reading.reading_options(args)):
        flag = f"--{min(options).replace('_', '-')}"
        raise UsageError(f"what a run held out is read as it was: leave out {flag}, or give --data")
    metric = _metric(args)
    _against.check(args, metric)
    if args.suite is not None:
        return _suite.run(args, cast("Perplexity", metric), world)
    if args.data is not None and args.data != "stdlib":
        files_of(args.data)
    model = load(args.model, device=world.device)
    if args.label_field and not model.denoiser.num_classes:
        raise UsageError(f"this model knows no classes: leave out {_reading.LABEL_FIELD}")
    trained = _reading.trained_on(args.model, needed=args.data is None)
    packing = args.packing or (model.packing if trained is None else trained.packing)
    anchor = model.anchor_of(packing)
    other = None if args.against is None else load(args.against, device=world.device)
    length = _against.length_of(args, model, other)
    with reading_bar() if world.first else nullcontext() as bar:
        corpus, rows, name = _measured_on(args, model, trained, packing, length, anchor, bar)
    against = (
        None
        if other is None
        else _against.other_of(args, other, model, rows, corpus, getattr(metric, "max_rows", None))
    )
    rows = rows.classed(model.labels) if model.denoiser.num_classes else rows
    about = {"data": name, "split": "all" if args.data is not None else "valid"}
    about |= _reading.treatment(corpus, rows, model, trained)
    world.arm()
    with progress_bar("evaluate") if world.first else nullcontext() as progress:
        how: dict[str, Any] = {"seed": args.seed, "about": about, "world": world, "progress": progress}
        both = None if against is None else evaluate_against(model, rows, against, cast("Perplexity", metric), **how)
        measured = evaluate(model, rows, metric=metric, **how) if both is None else both[0]
    for whose, one in ((args.model, measured), (args.against, None if both is None else both[1])):
        if one is not None and one.bound is not None:
            one.bound.check_finite(whose, name)
    if world.first:
        _show(args, measured, None if both is None else both[1:])
    return 0


def _show(args: argparse.Namespace, measured: Measurement, against: tuple[Measurement, Difference] | None) -> None:
    numbers = _numbers(measured)
    if not args.json:
        _print(measured)
    if against is not None:
        theirs, apart = against
        numbers["against"] = {"model": args.against} | _numbers(theirs)
        numbers["difference"] = apart.summary()
        if not args.json:
            print(f"\nagainst     {args.against}")
            _print(theirs)
            print("\n" + "\n".join(_against.told(args, apart)))
    if args.json:
        from unmask.machine import made_with

        print(json.dumps(numbers | {"made_with": made_with(args.words)}))


def _metric(args: argparse.Namespace) -> Metric:
    """The metric that --metric names, with the options that stand on the command line beside it."""
    from unmask.errors import UsageError, did_you_mean
    from unmask.evaluation.evaluate import make_metric
    from unmask.metrics import room
    from unmask.registry import fields_of

    known = ["count", "time", "exact", "pseudo", "T=1000"]
    if args.estimator not in known and difflib.get_close_matches(args.estimator or "", known[:-1]):
        raise UsageError(f"unknown estimator {args.estimator!r}; {did_you_mean(args.estimator, known)}")
    named = args.metric or "perplexity"
    try:
        data = json.loads(named) if named.lstrip().startswith("{") else {"name": named}
    except (ValueError, RecursionError) as e:
        raise UsageError(f"--metric is not valid JSON: {e}") from None
    name = data.pop("name", None)
    if name not in room.names():
        raise UsageError(f"--metric: unknown metric {str(name)[:40]!r}; {did_you_mean(str(name), room.names())}")
    options = {field.name for field in fields_of(room.get(name))}
    for flag in ("max_rows", "num_samples", "batch", "estimator", "precision"):
        if (value := getattr(args, flag)) is None:
            continue
        if flag not in options:
            raise UsageError(f"the metric {name} has no option --{flag.replace('_', '-')}: leave it out")
        data[flag] = value
    return make_metric(name, data)


def _numbers(measured: Measurement) -> dict[str, Any]:
    return ({} if measured.bound is None else measured.bound.summary()) | measured.summary()


def _print(measured: Measurement) -> None:
    bound = measured.bound
    if bound is None:
        print(measured)
    else:
        numbers = bound.summary()
        names = {bound.ppl_name: bound.ppl_key, "nats/token": "nats_per_token", "bits/byte": "bits_per_byte"}
        for label, key in names.items():
            value, interval = numbers[key], numbers[f"{key}_ci95"]
            spread = (
                "no interval: a single draw"
                if not isinstance(interval, list)
                else "95% interval {:.4f} – {:.4f}".format(*interval)
            )
            line = (
                f"{label:<11} {measured.sign} {value:.4f}   {spread}"
                if value is not None
                else f"{label:<11} not finite"
            )
            print(line)
        given = numbers["nats_per_token_ci95_given_texts"]
        if isinstance(given, list) and not bound.exact:
            print(f"given texts ± {(given[1] - given[0]) / 2:.4f} nats/token, over times and masks alone")
        rows = len(bound.tokens_B)
        print(f"tokens      {bound.tokens:,} in {rows:,} row{'s' * (rows > 1)}, {bound.num_bytes:,} bytes")
    protocol = {k: v for k, v in measured.protocol.items() if k not in ("corpus", "rows", "metric")}
    print("protocol    " + ", ".join(f"{k}={v}" for k, v in protocol.items()))
    print(f"corpus      {measured.protocol['corpus']}")


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
    caveat = "" if check_held_out(Path(args.model), rows) else ", if the data is as it was: no checkpoint tells"
    return trained.valid or trained.train, rows, f"held out by the run{caveat}"
