"""Generate texts with a model, from nothing or from a prompt.

With --out the texts are written to files in a folder, part-00000.jsonl and so on, with one line of JSON each (--format
parquet: one row of part-00000.parquet each). After a stop or kill the same command resumes. With --nproc, or torchrun,
several processes share the parts and write the same texts as one.

Examples:
  unmask generate --prompt "Once upon a time" --watch
  unmask generate MODEL --num 2 --length 256 --prompt "def " --watch
  unmask generate MODEL --length 16 --prompt "x = " --regex "[0-9]+"
  unmask generate runs/pairs --prompt "Who wrote it?" --continuation-only --json
  unmask generate MODEL --num 100000 --out texts --nproc 4
  unmask generate MODEL --num 100000 --out texts --format parquet --part-size 10000
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from unmask.cli import _naming, _processes, _sampling
from unmask.errors import Stopped, UsageError

if TYPE_CHECKING:
    from unmask.constraints import Constraint

TAKES_OVERRIDES = True  # a sampler's own options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model(parser)
    parser.add_argument("--num", type=int, default=1, help="number of texts per prompt (default 1)")
    parser.add_argument(
        "--length", type=int, help="tokens, including the prompt (default: the model's typical length, else its window)"
    )
    parser.add_argument("--prompt", action="append", help="the beginning of the text; may be repeated")
    parser.add_argument("--suffix", default="", help="the end of the text")
    parser.add_argument("--separator", help="string appended to every prompt (default: as in training)")
    parser.add_argument(
        "--continuation-only",
        action="store_true",
        help="print only the generated text, without prompt, separator and suffix",
    )
    group = parser.add_argument_group("writing to files")
    group.add_argument("--out", metavar="DIR", help="write the texts to files in this folder, or resume it")
    group.add_argument("--batch", type=int, metavar="N", help="texts per batch (default 64)")
    group.add_argument("--part-size", type=int, metavar="N", help="texts per file (default 256)")
    group.add_argument("--format", choices=("jsonl", "parquet"), help="file format (default jsonl)")
    _processes.add_arguments(group)
    _sampling.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    constraint = _sampling.check(args)
    _naming.refuse_text(args.model, "--prompt")
    if args.out is not None:
        return _write_many(args, constraint)
    for name in ("batch", "part_size", "format", "nproc"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for texts that go to a folder: give --out DIR")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("several processes write to a folder: give --out DIR")
    from unmask.model import load

    model = load(args.model, device=args.device, dtype=args.dtype)
    sampler = _sampling.make_sampler(args, model)
    with _sampling.viewing(args, model) as view:
        texts = model.generate(
            args.num,
            args.length,
            args.prompt or "",
            args.suffix,
            sampler=sampler,
            seed=args.seed,
            constraint=constraint,
            label=args.label,
            guidance=args.guidance,
            separator=args.separator,
            continuation_only=args.continuation_only,
            **view.listening,
        )
    prompts = args.prompt or [""]
    if args.continuation_only:  # apart from its text, each text's own
        prompts = [prompt for prompt in prompts for _ in range(args.num)]
    record = {"prompts": prompts, "suffix": args.suffix}
    end = model.separator if args.separator is None else args.separator
    _sampling.print_texts(texts, args, record | ({"separator": end} if end else {}))
    view.save()
    return 0


def _write_many(args: argparse.Namespace, constraint: list[Constraint] | None) -> int:
    for name in ("watch", "trace", "html", "svg"):
        if getattr(args, name):
            raise UsageError(f"--{name} is for texts that are printed: leave out --out, or --{name}")
    for name in ("batch", "part_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not args.out:
        raise UsageError("--out needs the name of a folder")
    if _processes.launched(args):
        return 0
    from unmask.cli._terminal import progress_bar, stderr
    from unmask.distributed.world import join_world
    from unmask.model import load
    from unmask.text.bulk import Order, generate_many

    given = {"batch": args.batch, "part": args.part_size, "format": args.format}
    with join_world(args.device, timeout=args.timeout) as world:
        model = load(args.model, device=world.device, dtype=args.dtype)
        order = Order(
            num=args.num,
            length=args.length,
            prompts=tuple(args.prompt or [""]),
            suffix=args.suffix,
            sampler=_sampling.make_sampler(args, model),
            seed=args.seed,
            constraint=None if constraint is None else tuple(constraint),
            label=args.label,
            guidance=args.guidance,
            separator=args.separator,
            continuation_only=args.continuation_only,
            **{name: value for name, value in given.items() if value is not None},
        )
        try:
            with progress_bar("generate") if world.first else nullcontext() as progress:
                note = partial(stderr().print, soft_wrap=True)
                generate_many(model, order, args.out, world=world, progress=progress, note=note)
        except Stopped as e:
            raise Stopped(f"{e}; go on with: unmask {shlex.join(args.words)}") from None
        if world.first:
            summary = {"out": args.out, "texts": order.total, "parts": len(order.parts)}
            print(json.dumps(summary) if args.json else args.out)
    return 0
