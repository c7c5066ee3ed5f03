"""Fill the gaps of a text, marked as [MASK].

[MASK] is one token, [MASK:5] is five, [MASK:3..8] is whichever length fits best. The rest stays as it is.

Examples:
  unmask fill "Once upon [MASK:2] there was a [MASK]."
  unmask fill MODEL "def [MASK:8](self):" --watch
  unmask fill MODEL "x = [MASK:1..8]" --choices True,False,None
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from unmask.cli import _naming, _sampling

if TYPE_CHECKING:
    from unmask.text.editing import Way


TAKES_OVERRIDES = True  # a sampler's own options
TAKES_TEXTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model_and_texts(parser, "texts with gaps; - reads one from standard input")
    _sampling.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from unmask.model import load
    from unmask.text.editing import fill

    constraint = _sampling.check(args)
    name, texts = _naming.model_and_texts(args.arguments, 'a text with a gap, as in unmask fill "The [MASK:2] sat."')
    model = load(name, device=args.device, dtype=args.dtype)
    sampler = _sampling.make_sampler(args, model)
    texts = [_sampling.standard_input() if text == "-" else text for text in texts]
    with _sampling.viewing(args, model) as view:
        filled = fill(
            model,
            texts,
            sampler=sampler,
            seed=args.seed,
            constraint=constraint,
            label=args.label,
            guidance=args.guidance,
            **view.listening,
        )
    ranked = [[_plain(way) for way in one.ways] or None for one in filled]
    _sampling.print_texts([one.text for one in filled], args, {"ranked": ranked} if any(ranked) else {})
    view.save(chosen=[one.row for one in filled])
    return 0


def _plain(way: Way) -> dict[str, Any]:
    return {"text": way.text, "nats": way.nats if math.isfinite(way.nats) else None, "tokens": way.tokens}
