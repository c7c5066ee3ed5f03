"""The effect of anchors: the bound without them, with a begin token, and with an end marker as well.

    python benchmarks/anchors.py chain [--steps 2000] [--device cuda]
    python benchmarks/anchors.py stories TRAIN.txt.xz VALID.txt.xz [--steps 1000] [--device cuda]

chain: a Markov source of known entropy. The first letter is an a; each further letter is the successor of the previous
one on a ring with probability `follow`, otherwise uniformly random. stories: the recipe of that name, shortened; it
also reports how many of 64 texts of 48 tokens begin as a story does, with a capital letter or a quotation mark.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from unmask.config import DataConfig, OptimConfig, RunConfig, load_config
from unmask.corpora.text import Text
from unmask.data.packing import Anchor, pack_texts, rows_of
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.evaluation.bound import Bound
from unmask.evaluation.evaluate import evaluate_rows
from unmask.objectives.mdlm import MDLM
from unmask.training.loop import train

ANCHORS: tuple[Anchor, ...] = ("none", "begin", "both")


def draw(num: int, length: int, letters: int, follow: float, seed: int) -> list[str]:
    """Texts of the source."""
    rng = np.random.default_rng(seed)
    x = np.zeros((num, length), dtype=np.int64)
    for i in range(1, length):
        follows = rng.random(num) < follow
        x[:, i] = np.where(follows, (x[:, i - 1] + 1) % letters, rng.integers(0, letters, num))
    return ["".join(chr(97 + c) for c in row) for row in x]


def entropy(length: int, letters: int, follow: float) -> float:
    """Nats of a text: the first letter is certain, each other one has the entropy of a step."""
    p = np.full(letters, (1 - follow) / letters)
    p[0] += follow
    return (length - 1) * float(-(p * np.log(p)).sum())


def shown(bound: Bound) -> str:
    low, high = (f"{x:.4f}" for x in bound.summary()["nats_per_token_ci95"])  # type: ignore[union-attr]
    return f"{bound.nats_per_token:.4f} | {low} – {high}"


def chain(args: argparse.Namespace, folder: str) -> None:
    source = (args.length, args.letters, args.follow)
    tokens = args.length + 1  # and the end of text, certain where the length is known
    truth = entropy(*source) / tokens
    print(f"the source's own entropy: {truth:.4f} nats/token")
    print("| anchor | seed | nats/token | 95% interval | over the truth | seconds |\n|" + " --- |" * 6)
    corpus = Path(folder) / "chain.txt"
    corpus.write_text("\n".join(draw(50_000, *source, seed=1)) + "\n", encoding="utf-8")
    for anchor in args.anchors:
        for seed in range(args.seeds):
            began = time.perf_counter()
            config = RunConfig(
                out=f"{folder}/{anchor}{seed}",
                seed=seed,
                steps=args.steps,
                batch=128,
                tokenizer="chars",
                data=DataConfig(
                    train=Text(path=str(corpus)), packing="sentence", length=tokens + 2, anchor=anchor, cache=folder
                ),
                denoiser=DiT(
                    hidden=64, blocks=2, heads=2, dropout=0, conditioning="none", qk_norm=True, zero_init=True
                ),
                objective=MDLM(form="count"),
                optim=OptimConfig(lr=5e-3, muon=True, betas=(0.9, 0.95), warmup=50, schedule="wsd", ema=0.99),
                valid_every=args.steps,
                save_every=args.steps,
                sample_every=0,
            )
            model = train(config, device=args.device)
            fresh = draw(2000, *source, seed=2)
            rows = pack_texts(fresh, load_tokenizer("chars"), "sentence", tokens + 2, anchor)
            bound = evaluate_rows(model.denoiser, model.objective, rows, num_samples=16, batch=250)
            over, seconds = bound.nats_per_token - truth, time.perf_counter() - began
            print(f"| {anchor} | {seed} | {shown(bound)} | {over:+.4f} | {seconds:.0f} |", flush=True)


def stories(args: argparse.Namespace, folder: str) -> None:
    print(
        f"{args.steps} steps\n| anchor | nats/token | 95% interval | begin as a story does | seconds |\n|"
        + " --- |" * 5
    )
    for anchor in args.anchors:
        began = time.perf_counter()
        overrides = {"out": f"{folder}/{anchor}", "data.anchor": anchor, "data.cache": folder, "steps": str(args.steps)}
        overrides |= {"data.train.path": args.train, "data.valid.path": args.valid, "valid_every": str(args.steps)}
        overrides |= {"save_every": str(args.steps), "sample_every": "0", "optim.warmup": "100"}
        config = load_config("stories", overrides | dict(option.split("=", 1) for option in args.set))
        model = train(config, device=args.device)
        rows = rows_of(config.data, model.tokenizer, "valid", anchor=anchor)
        bound = evaluate_rows(model.denoiser, model.objective, rows, num_samples=4, batch=128, max_rows=2000)
        texts = model.generate(64, 48, seed=0)
        good = sum(text[:1].isupper() or text[:1] in "\"'" for text in texts)
        print(f"| {anchor} | {shown(bound)} | {good} of 64 | {time.perf_counter() - began:.0f} |", flush=True)
        print("\n".join(f"  {text!r}" for text in texts[:4]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    one = kinds.add_parser("chain")
    one.add_argument("--length", type=int, default=16)
    one.add_argument("--letters", type=int, default=5)
    one.add_argument("--follow", type=float, default=0.8)
    one.add_argument("--seeds", type=int, default=1)
    one.set_defaults(run=chain, steps=2000)
    other = kinds.add_parser("stories")
    other.add_argument("train")
    other.add_argument("valid")
    other.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="options of the recipe")
    other.set_defaults(run=stories, steps=1000)
    for kind in (one, other):
        kind.add_argument("--anchors", nargs="+", choices=ANCHORS, default=ANCHORS)
        kind.add_argument("--steps", type=int, default=argparse.SUPPRESS)
        kind.add_argument("--device")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.run(args, folder)


if __name__ == "__main__":
    main()
