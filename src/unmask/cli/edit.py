"""Rewrite a span of a text in several lengths, ranked by the bound.

The rest of the text stays exactly as it is. The bounds are those of the whole texts, with the same draws for all; the
ranking compares bounds, not likelihoods.

Examples:
  unmask edit --text "The cat sat on the mat." --replace cat --with-length 1..3
  unmask edit MODEL --text "for item in things:" --replace things --with-length 3..8 --num 3
  unmask edit MODEL --text "a = b + b" --replace b --occurrence 2 --json
"""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import TYPE_CHECKING, Any

from unmask.cli import _naming, _sampling

if TYPE_CHECKING:
    from unmask.text.editing import Edit

TAKES_OVERRIDES = True  # a sampler's own options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model(parser)
    parser.add_argument("--text", required=True, help="the text; - reads it from standard input")
    parser.add_argument("--replace", required=True, metavar="SPAN", help="the span to rewrite")
    parser.add_argument(
        "--occurrence", type=int, metavar="N", help="which occurrence, if the span occurs several times"
    )
    parser.add_argument(
        "--with-length",
        type=_lengths,
        metavar="N..M",
        help="tokens of the replacement, such as 5 or 3..8 (default: as many as the span has)",
    )
    parser.add_argument(
        "--num",
        type=int,
        default=1,
        help="how many candidates to generate per length, and how many to show (default 1)",
    )
    parser.add_argument(
        "--rank",
        choices=("text", "token"),
        default="text",
        help="rank by the text's bound, or by its bound per token (default text)",
    )
    _sampling.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from unmask.model import load
    from unmask.text.editing import find_span, length_range

    constraint = _sampling.check(args)
    length_range(args.with_length, 1)
    _naming.refuse_text(args.model, "--text")
    text = _sampling.standard_input() if args.text == "-" else args.text
    find_span(text, args.replace, args.occurrence)
    model = load(args.model, device=args.device, dtype=args.dtype)
    sampler = _sampling.make_sampler(args, model)
    with _sampling.viewing(args, model) as view:
        edits = model.edit(
            text,
            args.replace,
            with_length=args.with_length,
            num=args.num,
            occurrence=args.occurrence,
            rank=args.rank,
            sampler=sampler,
            seed=args.seed,
            constraint=constraint,
            label=args.label,
            guidance=args.guidance,
            **view.listening,
        )
    if args.json:
        print(json.dumps({"edits": [_plain(e) for e in edits], "seed": args.seed}))
    else:
        print("\n\n".join(e.text for e in edits))
    view.save(chosen=[e.row for e in edits])
    return 0


def _plain(edit: Edit) -> dict[str, Any]:
    plain = vars(edit) | {"nats_per_token": edit.nats_per_token}
    del plain["row"]  # for a page
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()
    }  # JSON has no inf


def _lengths(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,7})(?:\.\.([0-9]{1,7}))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no length: write 5, or 3..8")
    return int(match[1]), int(match[2] or match[1])
