"""Train a small model on Python's own sources, then watch it write: about two minutes on two cores.

Nothing is downloaded: the corpus is the standard library on this disk. The model stays in ./demo-model.

Example:
  unmask demo
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="demo-model", help="where the run and its model go (default demo-model)")
    parser.add_argument("--steps", type=int, help="training steps (default: the recipe's)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU where there is one)")


PROMPT = "def read(self, size):\n"
SENTENCE = "    def [MASK:8](self, [MASK:6]):\n        return self.[MASK:8]\n"


def run(args: argparse.Namespace) -> int:
    from unmask.checkpoint import load_checkpoint
    from unmask.cli._terminal import TrainProgress, stderr, watching
    from unmask.config import load_config
    from unmask.model import load
    from unmask.samplers.ancestral import Ancestral
    from unmask.training import train

    say = stderr().print
    overrides = {"out": args.out} | ({} if args.steps is None else {"steps": str(args.steps)})
    config = load_config("demo", overrides)
    found = load_checkpoint(Path(args.out))
    if found is not None and found.step >= config.steps:
        say(f"{args.out} is trained already ({found.step} steps); delete it to train again")
        model = load(args.out, device=args.device)
    else:
        model = train(config, callbacks=[TrainProgress()], resume=found is not None, device=args.device)
    # From the file rather than from this process: a demo that was interrupted began in another one.
    lines = [json.loads(line) for line in (Path(args.out) / "metrics.jsonl").read_text().splitlines()]
    bits = [line["valid_bits_per_byte"] for line in lines if "valid_bits_per_byte" in line]
    print(f"validation bound: {bits[0]:.3f} bits/byte before training, {min(bits):.3f} after")
    sampler = Ancestral(steps=64, temperature=0.8)
    with watching(model.tokenizer, enabled=True) as watch:
        text = model.generate(prompt=PROMPT, sampler=sampler, watch=watch)[0]
    print(f"\ngenerated from {PROMPT!r}:\n{text}")
    with watching(model.tokenizer, enabled=True, pause=0.1) as watch:
        filled = model.fill(SENTENCE, sampler=Ancestral(steps=None, temperature=0.5), watch=watch)[0]
    print(f"\ngaps:\n{SENTENCE}filled:\n{filled}")
    print(f"The model is in {args.out}. Try:")
    program = "unmask" if shutil.which("unmask") else sys.argv[0]  # make runs it from .venv, which is not on the path
    print(f"  {program} generate {args.out} --prompt 'import ' --watch")
    print(f"  {program} fill {args.out} 'for [MASK:4] in range([MASK:3]):' --watch")
    print(f"  {program} train {args.out} --resume --steps {config.steps * 2}")
    return 0
