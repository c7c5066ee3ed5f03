"""Convert a published model into a model folder.

SOURCE by MDLM's authors is a folder with config.json and safetensors files, or one .safetensors, .ckpt or .bin file:
their MDLM, SEDD (--kind sedd) or AR. SOURCE by SEDD's authors is a folder. A bare weights file does not describe the
network completely: sizes are read from its tensors, and the flags supply the rest; flags also override config.json. A
.ckpt or .bin file that holds more than tensors is refused unread, since reading it could run code.

hf:SOURCE is a transformers folder or a name on the hub, FILE.gguf a model of the Llama family. They include their
tokenizer and stay what they are, autoregressive models or encoders. To train them further no import is needed: unmask
train RECIPE --init hf:SOURCE.

Examples:
  unmask import mdlm-owt/ owt/ --tokenizer gpt2-tokenizer.json
  unmask import last.ckpt owt/ --tokenizer gpt2-tokenizer.json --ema --model-length 1024 --no-time-conditioning
  unmask import hf:HuggingFaceTB/SmolLM2-135M smollm2/ --model-length 1024
  unmask import SmolLM2-135M-Instruct.Q4_1.gguf smollm2/
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unmask.data.packing import Anchor
    from unmask.denoisers.network import Network


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="published folder, or a .safetensors, .ckpt or .bin file; hf:PATH_OR_ID of transformers, or a .gguf file",
    )
    parser.add_argument("out", metavar="OUT", help="model folder to write; must be new or empty")
    parser.add_argument(
        "--tokenizer",
        metavar="SPEC",
        help="the tokenizer that a model by MDLM's authors was trained with; other formats include theirs",
    )
    parser.add_argument(
        "--kind",
        choices=("mdlm", "sedd", "ar"),
        help="the kind of model in a file by MDLM's authors, if the file does not say "
        "(ar is recognised by its tensors)",
    )
    parser.add_argument("--ema", action="store_true", help="use the averaged weights of a .ckpt file")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="number of ids, including the mask")
    parser.add_argument("--hidden-dim", type=int, metavar="N", help="width of the network")
    parser.add_argument("--cond-dim", type=int, metavar="N", help="width of the conditioning vector")
    parser.add_argument("--n-blocks", type=int, metavar="N", help="number of blocks")
    parser.add_argument("--n-heads", type=int, metavar="N", help="number of attention heads (default: heads of 64)")
    parser.add_argument(
        "--model-length",
        type=int,
        metavar="N",
        help="length of the training rows; for hf: and .gguf the window, at most the published length",
    )
    parser.add_argument("--mask-id", type=int, metavar="N", help="id of the mask (default: the last)")
    parser.add_argument("--dropout", type=float, metavar="P", help="dropout for further training (default: 0.1)")
    parser.add_argument(
        "--time-conditioning",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether the network is conditioned on the noise level",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    from unmask.errors import UsageError

    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty; give the name of a new folder")
    if args.source.startswith("hf:") or args.source.endswith(".gguf"):
        return _pretrained(args, out)
    if args.tokenizer is None:
        raise UsageError(
            "give --tokenizer, the one that the model was trained with; of transformers' models: hf:SOURCE"
        )
    return _published(args, out)


def _pretrained(args: argparse.Namespace, out: Path) -> int:
    from unmask.errors import UsageError
    from unmask.model import Model
    from unmask.objectives.ar import AR
    from unmask.objectives.mdlm import MDLM
    from unmask.pretrained import read_pretrained
    from unmask.pretrained.registered import is_ours
    from unmask.pretrained.source import open_source
    from unmask.storage.model_folder import load_weights
    from unmask.storage.published import SETTINGS

    given = [key for key in ("tokenizer", *SETTINGS) if key != "model_length" and getattr(args, key) is not None]
    given += [key for key in ("ema", "kind") if getattr(args, key)]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(f"{args.source} says all of its network itself: leave out {flag}")
    source = open_source(args.source)
    if is_ours(source):
        return _ours(args, out)
    read = read_pretrained(source)
    length = args.model_length or read.length
    if not 1 <= length <= read.length:
        raise UsageError(f"--model-length {length} is not between 1 and the {read.length} positions that it knows")
    tokenizer, framed = read.tokenizer, read.denoiser.framed
    network = read.denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    read.denoiser.describe(network)
    load_weights(network, network.begins_anew() | dict(read.state), args.source)
    objective = AR() if read.causal else MDLM()
    anchor: Anchor = "both" if framed else "none"
    Model(denoiser=network, tokenizer=tokenizer, objective=objective, length=length, anchor=anchor).save(out)
    about = {"objective": "ar" if read.causal else "mdlm", "num_ids": tokenizer.num_ids, "mask_id": tokenizer.mask_id}
    return _tell(args, network, length, about, [])


def _ours(args: argparse.Namespace, out: Path) -> int:
    """A folder of `unmask push` or `unmask export --format hf`, which says all of the model, its objective included."""
    from unmask.errors import UsageError
    from unmask.model import load

    model = load(args.source, device="cpu", dtype="fp32")
    if args.model_length not in (None, model.length):
        raise UsageError(f"{args.source} says its own length, {model.length}: leave out --model-length")
    model.save(out)
    tokenizer, objective = model.tokenizer, type(model.objective).__name__.lower()
    about = {"objective": objective, "num_ids": tokenizer.num_ids, "mask_id": tokenizer.mask_id}
    return _tell(args, model.denoiser, model.length, about, [])


def _published(args: argparse.Namespace, out: Path) -> int:
    import sys

    from unmask.data.tokenizers import load_tokenizer
    from unmask.errors import UsageError
    from unmask.model import Model
    from unmask.storage.published import OBJECTIVES, SETTINGS, read_published

    tokenizer = load_tokenizer(args.tokenizer)
    settings = {key: getattr(args, key) for key in SETTINGS}
    published = read_published(
        Path(args.source),
        overrides=settings,
        ema=args.ema,
        kind=args.kind,
        begin_id=tokenizer.eot_id if tokenizer.bos_id is None else tokenizer.bos_id,
    )
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
    objective = OBJECTIVES[published.kind]()
    Model(denoiser=network, tokenizer=tokenizer, objective=objective, length=published.length).save(out)
    about = {
        "kind": published.kind,
        "num_ids": published.num_ids,
        "mask_id": published.mask_id,
        "conditioning": published.denoiser.conditioning,
    }
    return _tell(args, network, published.length, about, published.notes)


def _tell(args: argparse.Namespace, network: Network, length: int, about: dict[str, Any], notes: list[str]) -> int:
    import json

    parameters = sum(p.numel() for p in network.parameters())
    whole = {"out": str(Path(args.out)), "parameters": parameters, **about, "length": length, "notes": notes}
    print(json.dumps(whole) if args.json else whole["out"])
    return 0
