"""MDLM, D3PM and autoregression on one text, with the defaults of `unmask train` and with other settings.

    python benchmarks/defaults.py shakespeare.txt [--steps 600] [--tokenizer bpe:1024] [--objectives mdlm d3pm ar]
    python benchmarks/defaults.py shakespeare.txt --recipe paper                # a recipe in place of the defaults
    python benchmarks/defaults.py shakespeare.txt --try optim.lr=3e-3 --try optim.lr=1e-2 optim.ema=0.99
    python benchmarks/defaults.py shakespeare.txt --all denoiser.size=nano batch=16             # the same for every row

The last part of the text is held out. Perplexity per token is measured there with the weights of the best validation;
it is exact for autoregression and an upper bound for the others. Seconds are training time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from unmask.config import load_config
from unmask.data.packing import rows_of
from unmask.evaluation.evaluate import evaluate_rows
from unmask.training.loop import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file, also compressed")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tokenizer", default="bpe:1024")
    parser.add_argument("--objectives", nargs="+", default=["mdlm", "d3pm", "ar"])
    parser.add_argument("--recipe", help="default: an empty one")
    parser.add_argument("--all", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--try", nargs="+", action="append", dest="tries", metavar="KEY=VALUE")
    parser.add_argument("--device")
    args = parser.parse_args()
    print(f"{'perplexity':>10} {'bits/byte':>9} {'seconds':>8}  objective  settings", flush=True)
    for changes in args.tries or [[]]:
        for objective in args.objectives:
            with tempfile.TemporaryDirectory() as folder:
                given = dict(change.split("=", 1) for change in [*args.all, *changes])
                print(_row(args, Path(folder), objective, given), " ".join(changes) or "as they are", flush=True)


def _row(args: argparse.Namespace, folder: Path, objective: str, given: dict[str, str]) -> str:
    empty = folder / "empty.toml"
    empty.touch()
    overrides = {
        "out": str(folder / "run"),
        "steps": str(args.steps),
        "tokenizer": args.tokenizer,
        "data.train": "text",
        "data.train.path": args.text,
        "data.held_out": "0.1",
        "objective": objective,
        "denoiser.causal": str(objective == "ar").lower(),
        "sample_every": "0",
        "valid_every": str(max(1, args.steps // 4)),
        "save_every": str(args.steps),
    }
    if objective != "mdlm":  # the others have no such options
        given = {key: value for key, value in given.items() if not key.startswith("objective.")}
    config = load_config(args.recipe or empty, overrides | given)
    began = time.perf_counter()
    model = train(config, device=args.device)
    seconds = time.perf_counter() - began
    rows = rows_of(config.data, model.tokenizer, "valid")
    bound = evaluate_rows(model.denoiser, config.objective, rows, num_samples=8).summary()
    return f"{bound['ppl']:10.1f} {bound['bits_per_byte']:9.3f} {seconds:8.0f}  {objective:<9} "


if __name__ == "__main__":
    main()
