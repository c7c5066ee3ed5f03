"""Regenerate the least confident tokens of finished texts, in rounds.

Examples:
  unmask refine "The cat sat on on mat." --share 0.2
  unmask refine MODEL "def read(self): retrun self.x" --share 0.2 --rounds 3
"""

from __future__ import annotations

import argparse

from unmask.cli import _naming, _sampling

TAKES_OVERRIDES = True  # a sampler's own options
TAKES_TEXTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model_and_texts(parser, "finished texts; - reads one from standard input")
    parser.add_argument(
        "--share", type=float, default=0.1, help="share of the tokens that a round regenerates (default 0.1)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds (default 2)")
    _sampling.add_arguments(parser, conditions=False)


def run(args: argparse.Namespace) -> int:
    from unmask.errors import UsageError
    from unmask.model import load
    from unmask.samplers.refine import Refine

    if _sampling.check(args) is not None or (args.guidance, args.label) != (None, None):
        raise UsageError("refine takes no constraint, guidance or label: use edit or fill for them")
    Refine(share=args.share, rounds=args.rounds)
    name, texts = _naming.model_and_texts(
        args.arguments, 'a finished text, as in unmask refine "The cat sat on on mat."'
    )
    model = load(name, device=args.device, dtype=args.dtype)
    sampler = _sampling.make_sampler(args, model)
    texts = [_sampling.standard_input() if text == "-" else text for text in texts]
    with _sampling.viewing(args, model) as view:
        refined = model.refine(
            texts, share=args.share, rounds=args.rounds, sampler=sampler, seed=args.seed, **view.listening
        )
    _sampling.print_texts(refined, args, {"given": texts})
    view.save()
    return 0
