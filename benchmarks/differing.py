"""How many texts differ between an idle server and one under load, for the same requests and seeds.

    python benchmarks/differing.py [stories] [--device cuda] [--texts 200] [--at-once 16 64]

On a CPU none differ. On a GPU a matrix product of another shape may round differently, and a probability that changes
in its last bits occasionally changes a token.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from unmask import load
from unmask.samplers.ancestral import Ancestral
from unmask.server.compiling import Compiler
from unmask.server.engine import Call, Engine
from unmask.server.limits import Limits
from unmask.server.served_model import Served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="fp32", help="fp32 or bf16")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--at-once", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    model = load(args.model, device=args.device, dtype=args.dtype)
    compiler = Compiler(model.tokenizer)

    def texts(at_once: int, num: int = args.texts) -> list[str]:
        engine = Engine(model, max_batch=at_once)

        def one(seed: int) -> str:
            served = Served(engine, compiler, Limits(), Call())
            # lengths of their own, as requests have them: rows come and go
            length = 96 + seed * 37 % 96
            return served.generate(length=length, seed=seed, sampler=Ancestral(steps=args.steps))[0]

        try:
            with ThreadPoolExecutor(at_once) as pool:
                return list(pool.map(one, range(num)))
        finally:
            engine.close()

    try:
        alone = texts(1)
        again = texts(1, args.texts // 4)
        differ = _differ(alone[: len(again)], again)
        print(
            f"{args.texts} texts on {model.device}, {args.dtype}; a quarter again, alone: {differ} differ", flush=True
        )
        for at_once in args.at_once:
            print(f"alone and with {at_once} at once: {_differ(alone, texts(at_once))} differ", flush=True)
    finally:
        compiler.close()


def _differ(these: list[str], those: list[str]) -> str:
    count = sum(a != b for a, b in zip(these, those, strict=True))
    return f"{count} ({100 * count / len(these):.1f}%)"


if __name__ == "__main__":
    main()
