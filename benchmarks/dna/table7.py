"""The paper's Table 7: every pretrained model on the suite genomic-benchmarks, one page with the gaps to one of them.

    python benchmarks/dna/table7.py runs/dna/table6/runs/*-s0 --data-dir DATA --out runs/table7 --reference mdlm-s0
    python benchmarks/dna/table7.py runs/dna/* --data-dir DATA --out runs/table7 --tasks cohn --folds 2 --seeds 1

A system's folder in --out has its name; what is finished there is not repeated, so the same command goes on after a
kill or Ctrl-C. A model that cannot be fine-tuned is told and does not stop the others; the exit code is then 1. Options
that follow are those of unmask finetune, over benchmarks/dna/classify.toml.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from unmask.cli.finetune import lines_on_stderr
from unmask.errors import Stopped, UnmaskError
from unmask.finetuning.config import FinetuneConfig, load_finetune_config
from unmask.finetuning.results import ABOUT
from unmask.finetuning.suites.run import SuiteResult, finetune_suite
from unmask.storage.atomic import atomic_text

RECIPE = Path(__file__).parent / "classify.toml"
SUITE = "genomic-benchmarks"


def overrides(words: list[str]) -> dict[str, str]:
    """--KEY VALUE pairs.

    >>> overrides(["--seeds", "1", "--optim.lr", "2e-3"])
    {'seeds': '1', 'optim.lr': '2e-3'}
    """
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        sys.exit(f"options of unmask finetune are pairs of --KEY VALUE, got {' '.join(words)}")
    return {key[2:]: value for key, value in zip(words[::2], words[1::2], strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--reference", help="the name of the model to which gaps are taken (default: the last)")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--device")
    args, rest = parser.parse_known_args()
    names = [model.resolve().name for model in args.models]
    if len({*names}) < len(names):
        sys.exit("two models have the same name: give each folder one of its own")
    reference = args.reference or names[-1]
    if reference not in names:
        sys.exit(f"--reference {reference} is none of {', '.join(names)}")
    own = overrides(rest)

    def config(name: str) -> FinetuneConfig:
        return load_finetune_config(args.recipe, own | {"out": str(args.out / name)})

    def run(name: str, against: list[Path]) -> SuiteResult:
        model = args.models[names.index(name)]
        how = {"data_dir": args.data_dir, "tasks": args.tasks, "device": args.device}
        return finetune_suite(model, config(name), suite=SUITE, against=against, watch=lines_on_stderr(), **how)

    failed = []
    for name in names:
        print(f"{name}:", file=sys.stderr)
        try:
            failed += [] if run(name, []).ok else [name]
        except Stopped:
            raise
        except UnmaskError as e:
            print(f"unmask: {name} is left out: {e}", file=sys.stderr)
            failed.append(name)
    others = [args.out / name for name in names if name != reference]
    there = [folder for folder in others if any(folder.glob(f"*/{ABOUT}"))]
    if any((args.out / reference).glob(f"*/{ABOUT}")):
        run(reference, there)  # nothing is trained again
        atomic_text(args.out / "table7.md", (args.out / reference / f"{SUITE}.md").read_text(encoding="utf-8"))
        print(f"{args.out / 'table7.md'}: {len(there) + 1} of {len(names)} models")
    if failed:
        sys.exit(f"not whole: {', '.join(failed)}")


if __name__ == "__main__":
    try:
        main()
    except UnmaskError as e:
        print(f"unmask: {e}", file=sys.stderr)
        sys.exit(e.exit_code)
