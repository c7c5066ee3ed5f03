"""Fill the gaps of a text: [MASK] is one token, [MASK:5] five; all else stays as it is.

Example:
  unmask fill demo-model "def [MASK:8](self):" --watch
  unmask fill demo-model "x = [MASK:4]" --choices True,None
"""

from __future__ import annotations

import argparse
import sys

from unmask.cli import _sampling
from unmask.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model folder, or a training run's")
    parser.add_argument("text", nargs="+", help="texts with gaps; - reads one from standard input")
    _sampling.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from unmask.model import load

    model = load(args.model, device=args.device, dtype=args.dtype)
    sampler = _sampling.make_sampler(args, model)
    constraint = _sampling.make_constraint(args)
    texts = [_standard_input() if text == "-" else text for text in args.text]
    with _sampling.shown(args, model) as watch:
        filled = model.fill(
            texts, sampler=sampler, seed=args.seed, constraint=constraint, guidance=args.guidance, watch=watch
        )
    _sampling.print_texts(filled, args, {})
    return 0


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as e:
        raise UsageError(f"standard input is not UTF-8 text at byte {e.start}; convert it") from None
