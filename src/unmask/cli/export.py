"""Write a model in the layout that the authors of MDLM publish, or those of SEDD.

OUT gets config.json and model.safetensors under the published names; the objective decides whose. Only networks that
the layout can express are written: dit with conditioning constant (mdlm) or sigma, not causal, embeddings not tied. The
tokenizer is not part of it.

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
    from unmask.noise.log_linear import LogLinear
    from unmask.objectives.mdlm import MDLM
    from unmask.objectives.sedd import SEDD
    from unmask.storage.published import Kind, write_published

    model = load(args.model, device="cpu")
    if not isinstance(model.denoiser, DiTNetwork):
        raise UsageError(f"{args.model} has no published form: its denoiser is no dit")
    objective = model.objective
    kind: Kind = "sedd" if isinstance(objective, SEDD) else "mdlm"
    if isinstance(objective, SEDD):
        if objective.state != "absorbing" or objective.noise != LogLinear():
            raise UsageError(f"{args.model} has no published form: that is absorbing, with log-linear noise")
    elif not (isinstance(objective, MDLM) and objective.carry_over and objective.zero_masking):
        raise UsageError(f"{args.model} has no published form: it was not trained with the objective mdlm or sedd")
    write_published(model.denoiser, Path(args.out), length=model.length, kind=kind)
    print(json.dumps({"out": args.out}) if args.json else args.out)
    return 0
