"""How likely texts are under a model: bits per byte, the fewer the likelier. For diffusion an upper bound.

Example:
  unmask score "The cat sat on the mat." "Mat the on sat cat the."
  unmask score runs/mine - < letter.txt
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from unmask.cli import _naming, _sampling

TAKES_TEXTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model_and_texts(parser, "texts; - reads one from standard input")
    parser.add_argument("--num-samples", type=int, default=64, help="draws of time and masks for each (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of times and masks (default 0)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU where there is one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from unmask.devices import pick_device
    from unmask.errors import UsageError
    from unmask.model import load

    if args.num_samples < 1:
        raise UsageError(f"--num-samples must be at least 1, got {args.num_samples}")
    pick_device(args.device)
    name, given = _naming.model_and_texts(args.given, 'a text, as in unmask score "The cat sat."')
    texts = [_sampling.standard_input() if text == "-" else text for text in given]
    if not all(texts):
        raise UsageError("an empty text has no bits per byte: give one that holds something")
    model = load(name, device=args.device)
    bounds = [model.score(text, seed=args.seed, num_samples=args.num_samples) for text in texts]
    found: list[dict[str, Any]] = []
    for text, bound in zip(texts, bounds, strict=True):
        lo, hi = (x * bound.tokens for x in bound.ci95)
        found.append({"text": text, "nats": bound.nats, "nats_ci95": [lo, hi], "tokens": bound.tokens})
        found[-1] |= {"bytes": bound.num_bytes, "bits_per_byte": bound.bits_per_byte, "exact": bound.exact}
    if args.json:
        print(json.dumps({"scores": found, "seed": args.seed, "draws": args.num_samples}))
        return 0
    for one in found:
        sign, half = ("", 0.0) if one["exact"] else ("≤ ", (one["nats_ci95"][1] - one["nats_ci95"][0]) / 2)
        spread = f" ± {half:.2f}" if half and math.isfinite(half) else ""
        line = " ".join(one["text"].split())
        shown = line if len(line) <= 60 else line[:59] + "…"
        bits, nats = f"{sign}{one['bits_per_byte']:.3f} bits/byte", f"{one['nats']:.2f}{spread} nats"
        print(f"{bits}  {nats}  {one['tokens']} tokens  {shown}")
    return 0
