"""Export a model in the layout of MDLM, SEDD or transformers.

--format mdlm: write config.json and model.safetensors with the published names of MDLM's or SEDD's authors, depending
on the objective. Only networks that the layout can express are written: dit with conditioning constant (MDLM's layout
only) or sigma, not causal, with untied embeddings. The tokenizer is not included.

--format hf: write a transformers folder. An encoder is exported as the masked language model that it is
(BertForMaskedLM, ...), with its tokenizer's files; transformers.pipeline("fill-mask", model=OUT) reads it without
unmask. An autoregressive llama is exported as LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM, depending on its
biases and norms; pipeline("text-generation", model=OUT) reads it without unmask. All other models are read in the same
way after import unmask.hf, which registers classes for them. unmask import hf:OUT converts the last two kinds back with
bitwise identical weights. Standard error says which class it is, and why.

Examples:
  unmask export owt/ mdlm-owt/
  unmask export runs/bert bert-mdlm/ --format hf
  unmask export stories stories-hf/ --format hf
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unmask.model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder")
    parser.add_argument("out", metavar="OUT", help="folder to write; must be new or empty")
    parser.add_argument("--format", choices=("mdlm", "hf"), default="mdlm", help="layout of OUT (default mdlm)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    import json
    import sys

    from unmask.model import load

    model = load(args.model, device="cpu")
    if args.format == "hf":
        from unmask.pretrained.export import write_transformers

        said = {"as": write_transformers(model, Path(args.out))}
        if not args.json:
            print(said["as"], file=sys.stderr)
    else:
        said = {}
        _write_published(model, args.model, Path(args.out))
    print(json.dumps({"out": args.out, **said}) if args.json else args.out)
    return 0


def _write_published(model: Model, name: str, out: Path) -> None:
    from unmask.denoisers.dit import DiTNetwork
    from unmask.errors import UsageError
    from unmask.noise.log_linear import LogLinear
    from unmask.objectives.mdlm import MDLM
    from unmask.objectives.sedd import SEDD
    from unmask.storage.published import Kind, write_published

    if not isinstance(model.denoiser, DiTNetwork):
        raise UsageError(f"{name} has no published form: its denoiser is no dit")
    objective = model.objective
    kind: Kind = "sedd" if isinstance(objective, SEDD) else "mdlm"
    if isinstance(objective, SEDD):
        if objective.state != "absorbing" or objective.noise != LogLinear():
            raise UsageError(f"{name} has no published form: that is absorbing, with log-linear noise")
    elif not (isinstance(objective, MDLM) and objective.carry_over and objective.zero_masking):
        raise UsageError(f"{name} has no published form: it was not trained with the objective mdlm or sedd")
    write_published(model.denoiser, out, length=model.length, kind=kind)
