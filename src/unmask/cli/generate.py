"""Write texts with a model, from nothing or from a prompt.

Example:
  unmask generate demo-model --num 2 --length 256 --prompt "def " --watch
  unmask generate demo-model --length 16 --prompt "x = " --regex "[0-9]+"
"""

from __future__ import annotations

import argparse

from unmask.built_in import DEFAULT
from unmask.cli import _sampling

TAKES_OVERRIDES = True  # a sampler's own options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT, help="a folder or a built-in model (default stories)")
    parser.add_argument("--num", type=int, default=1, help="how many texts for each prompt (default 1)")
    parser.add_argument(
        "--length", type=int, help="tokens, prompt included (default: typical, else the model's window)"
    )
    parser.add_argument("--prompt", action="append", help="how the text begins; may be given several times")
    parser.add_argument("--suffix", default="", help="how the text ends")
    _sampling.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from unmask.model import load

    model = load(args.model, device=args.device, dtype=args.dtype)
    sampler = _sampling.make_sampler(args, model)
    constraint = _sampling.make_constraint(args)
    with _sampling.shown(args, model) as view:
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
            **view.listening,
        )
    _sampling.print_texts(texts, args, {"prompts": args.prompt or [""], "suffix": args.suffix})
    view.save()
    return 0
