"""Train a model from a recipe.

RECIPE is a TOML or JSON file, the name of a built-in recipe (unmask recipes lists them), or a run's folder (with
--resume). The default is the recipe fast. A recipe with base = "fast" contains only the differences from it. --KEY
VALUE sets any recipe key, with dots for nested ones; plug-ins are selected by name.

Examples:
  unmask train --data.train text --data.train.path texts/ --tokenizer bpe:16384 --out runs/texts
  unmask train demo --out runs/try --steps 500 --optim.lr 1e-3 --objective.noise cosine
  unmask train runs/try --resume
  unmask train demo --nproc 4 --parallel fsdp
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from unmask.cli import _processes
from unmask.cli._options import print_options

if TYPE_CHECKING:
    from unmask.config import RunConfig

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        nargs="?",
        help="a recipe file, a built-in recipe's name, or a run's folder (default: the recipe fast)",
    )
    parser.add_argument("--resume", action="store_true", help="resume the run in the recipe's out folder")
    parser.add_argument(
        "--init",
        metavar="DIR",
        help="start from the weights of this model; "
        "hf:PATH_OR_ID: take network, weights, tokenizer and window from a model of transformers",
    )
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")
    _processes.add_arguments(parser)
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="with --nproc: restart from the last checkpoint up to N times",
    )
    parser.add_argument("--json", action="store_true", help="print this call's best validation as one JSON object")
    parser.add_argument("--options", action="store_true", help="list every --KEY with the recipe's value and choices")


def _config(args: argparse.Namespace) -> RunConfig:
    from unmask.config import built_in_recipe, load_config

    return load_config(args.recipe or built_in_recipe("fast"), args.overrides)


def run(args: argparse.Namespace) -> int:
    if args.options:
        print_options(_config(args), width=28)
        return 0
    if _processes.launched(args, max_restarts=args.max_restarts):
        return 0
    from unmask.cli._terminal import TrainProgress
    from unmask.evaluation.bound import Bound
    from unmask.training.callbacks import Callback
    from unmask.training.initial import check_said, is_pretrained
    from unmask.training.loop import train

    best: list[Bound] = []

    class Remember(Callback):
        def on_valid(self, step: int, bound: Bound) -> None:
            if step and not (best and best[0].nats_per_token <= bound.nats_per_token):
                best[:] = [bound]

    config = _config(args)
    if is_pretrained(args.init) and not args.resume:
        check_said(args.init, args.overrides)
    train(
        config,
        callbacks=[TrainProgress(), Remember()],
        resume=args.resume,
        init=args.init,
        device=args.device,
        timeout=args.timeout,
    )
    if os.environ.get("RANK", "0") != "0":
        return 0
    if args.json:
        print(json.dumps({"model": config.out, "steps": config.steps} | best[0].summary()))
    else:
        print(config.out)
    return 0
