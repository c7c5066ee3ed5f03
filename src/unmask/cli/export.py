"""Write a model in the layout that the authors of MDLM publish.

OUT gets config.json and model.safetensors under the published names. Only networks that this layout can express are
written: dit with conditioning constant or sigma, not causal, embeddings not tied. The tokenizer is not part of it.

Example:
  unmask export owt/ mdlm-owt/
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("out", metavar="OUT", help="folder to write; must be new or empty")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from unmask.denoisers.dit import DiTNetwork
    from unmask.errors import UsageError
    from unmask.model import load
    from unmask.objectives.mdlm import MDLM
    from unmask.storage.published import write_published

    model = load(args.model, device="cpu")
    if not isinstance(model.denoiser, DiTNetwork):
        raise UsageError(f"{args.model} has no published form: its denoiser is no dit")
    if not (isinstance(model.objective, MDLM) and model.objective.carry_over and model.objective.zero_masking):
        raise UsageError(f"{args.model} has no published form: it was not trained with the objective mdlm")
    write_published(model.denoiser, Path(args.out), length=model.length)
    print(json.dumps({"out": args.out}) if args.json else args.out)
    return 0
