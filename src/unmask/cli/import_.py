"""Turn a model published by the authors of MDLM into a model folder.

SOURCE is a folder with config.json and safetensors files, or one .safetensors, .ckpt or .bin file. A bare file does not
say everything about the network: sizes are read off its tensors, the rest is given with the flags, which also go before
config.json. A .ckpt or .bin file that holds more than tensors is refused unread, since reading it could run code.

Example:
  unmask import mdlm-owt/ owt/ --tokenizer gpt2-tokenizer.json
  unmask import last.ckpt owt/ --tokenizer gpt2-tokenizer.json --ema --model-length 1024 --no-time-conditioning
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="published folder, or a .safetensors, .ckpt or .bin file")
    parser.add_argument("out", metavar="OUT", help="model folder to write; must be new or empty")
    parser.add_argument(
        "--tokenizer", metavar="SPEC", required=True, help="the tokenizer that the model was trained with"
    )
    parser.add_argument("--ema", action="store_true", help="take the averaged weights of a .ckpt file")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="number of ids, the mask included")
    parser.add_argument("--hidden-dim", type=int, metavar="N", help="width of the network")
    parser.add_argument("--cond-dim", type=int, metavar="N", help="width of the conditioning vector")
    parser.add_argument("--n-blocks", type=int, metavar="N", help="number of blocks")
    parser.add_argument("--n-heads", type=int, metavar="N", help="number of attention heads (default: heads of 64)")
    parser.add_argument("--model-length", type=int, metavar="N", help="length of the rows it was trained on")
    parser.add_argument("--mask-id", type=int, metavar="N", help="id of the mask (default: the last)")
    parser.add_argument("--dropout", type=float, metavar="P", help="dropout for further training (default: 0.1)")
    parser.add_argument(
        "--time-conditioning",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether the network is told the noise level",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    import json
    import sys
    from pathlib import Path

    from unmask.data.tokenizers import load_tokenizer
    from unmask.errors import UsageError
    from unmask.model import Model
    from unmask.objectives.mdlm import MDLM
    from unmask.storage.published import SETTINGS, read_published

    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty; give the name of a new folder")
    tokenizer = load_tokenizer(args.tokenizer)
    settings = {key: getattr(args, key) for key in SETTINGS}
    published = read_published(Path(args.source), overrides=settings, ema=args.ema)
    if tokenizer.num_ids != published.num_ids:
        raise UsageError(
            f"the tokenizer {args.tokenizer} has {tokenizer.num_ids} ids, the model {published.num_ids}, the mask "
            "included; give the tokenizer that the model was trained with"
        )
    if tokenizer.mask_id != published.mask_id:
        raise UsageError(
            f"the tokenizer's mask has id {tokenizer.mask_id}, the model's {published.mask_id}; "
            f"if the tokenizer is right add --mask-id {tokenizer.mask_id}"
        )
    for note in published.notes:
        print(note, file=sys.stderr)
    network = published.build()
    Model(denoiser=network, tokenizer=tokenizer, objective=MDLM(), length=published.length).save(out)
    if args.json:
        about = {
            "out": str(out),
            "parameters": sum(p.numel() for p in network.parameters()),
            "num_ids": published.num_ids,
            "mask_id": published.mask_id,
            "length": published.length,
            "conditioning": published.denoiser.conditioning,
            "notes": published.notes,
        }
        print(json.dumps(about))
    else:
        print(out)
    return 0
