"""Watch a built-in model write a story and fill gaps.

Masks turn into a story, then the gaps of a sentence are filled, in seconds on a CPU. Nothing is downloaded, trained or
written to disk.

Example:
  unmask demo
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from typing import Any

PROMPT = "Once upon a time"
SENTENCE = "The [MASK:2] was very sad because [MASK:6]. So she [MASK:5] and was happy again."
LENGTH, STEPS = 128, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from unmask.storage.built_in import DEFAULT

    parser.add_argument("--model", default=DEFAULT, help="a model folder or a built-in model's name (default stories)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same texts (default 0)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")


def run(args: argparse.Namespace) -> int:
    from unmask.cli._terminal import watching
    from unmask.model import load

    model = load(args.model, device=args.device)
    with watching(model.tokenizer, enabled=True) as watch:
        own: Any = model.sampler
        length = min(LENGTH, model.length)
        text = model.generate(1, length, PROMPT, sampler=replace(own, steps=STEPS), seed=args.seed, watch=watch)[0]
    print(f"a story of {length} tokens in {STEPS} steps:\n{text}")
    with watching(model.tokenizer, enabled=True, pause=0.1) as watch:
        sampler = replace(own, steps=None, temperature=0.7)
        filled = model.fill(SENTENCE, sampler=sampler, seed=args.seed, watch=watch)[0]
    print(f"\ngaps:\n{SENTENCE}\nfilled:\n{filled}\n\nTry:")
    program = "unmask" if shutil.which("unmask") else sys.argv[0]  # make runs it from .venv, which is not on the path
    print(f"  {program} generate {args.model} --prompt 'Tom found a red' --steps 64 --watch")
    print(f"  {program} fill {args.model} 'Mom said, \"[MASK:8]\" and they all [MASK:3].' --watch")
    print(
        f"  {program} edit {args.model} --text 'Tim ran to the park.' --replace 'the park' --with-length 2..5 --num 3"
    )
    return 0
