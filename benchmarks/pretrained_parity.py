"""Bits per byte of a pretrained autoregressive model with unmask and with transformers, on the same rows.

    python benchmarks/pretrained_parity.py SOURCE TEXTS... [--rows 30] [--length 512] [--json FILE]

SOURCE is a transformers folder or a GGUF file. Each row of the texts' stream follows the token that begins a text, and
all of its tokens are scored. The largest difference between any two logits is reported as well.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.corpora.reading import read_like
from unmask.data.packing import build_rows
from unmask.denoisers.network import Network
from unmask.evaluation.evaluate import chosen_rows
from unmask.pretrained import Pretrained, read_pretrained
from unmask.storage.model_folder import load_weights


def our_network(read: Pretrained) -> Network:
    network = read.denoiser.build(num_ids=read.tokenizer.num_ids, mask_id=read.tokenizer.mask_id)
    load_weights(network, dict(read.state), "the source")
    return network.eval()


def their_network(source: Path) -> Any:
    import transformers

    where = {"gguf_file": source.name} if source.is_file() else {}
    folder = source.parent if source.is_file() else source
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()


def nats(logits_LI: Tensor, x_L: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits_LI.double(), x_L, reduction="sum"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    read = read_pretrained(str(args.source))
    ours, theirs = our_network(read), their_network(args.source)
    words, begin = theirs.config.vocab_size, ours.begin_id
    table = {}
    for texts in args.texts:
        rows = build_rows(read_like(texts), read.tokenizer, policy="wrap", length=args.length, anchor="none")
        indices = chosen_rows(rows, args.rows)
        taken = rows.take(indices)
        sums, seconds, most, tokens, num_bytes = [0.0, 0.0], [0.0, 0.0], 0.0, 0, 0
        for x, length in zip(taken.x, taken.valid_len, strict=True):
            x_1L = torch.from_numpy(x[:length])[None]
            with torch.no_grad():
                start = time.perf_counter()
                mine = ours(x_1L)[0, :, :words]
                middle = time.perf_counter()
                other = theirs(torch.nn.functional.pad(x_1L, (1, 0), value=begin)).logits[0, :-1]
                ends = (middle - start, time.perf_counter() - middle)
            seconds = [a + b for a, b in zip(seconds, ends, strict=True)]
            sums = [a + nats(logits, x_1L[0]) for a, logits in zip(sums, (mine, other), strict=True)]
            most = max(most, float((mine - other).abs().max()))
            tokens += int(length)
            num_bytes += len(
                read.tokenizer.decode([i for i in x_1L[0].tolist() if i != read.tokenizer.eot_id]).encode()
            )
        bits = [total / num_bytes / torch.log(torch.tensor(2.0, dtype=torch.float64)).item() for total in sums]
        table[texts] = {"rows": len(indices), "tokens": tokens, "bytes": num_bytes, "largest_difference": most}
        table[texts] |= {"unmask_bits_per_byte": bits[0], "transformers_bits_per_byte": bits[1]}
        table[texts] |= {"unmask_seconds": seconds[0], "transformers_seconds": seconds[1]}
        print(
            f"{texts}: {tokens:,} tokens, {num_bytes:,} bytes; bits per byte {bits[0]:.6f} through unmask, "
            f"{bits[1]:.6f} through transformers; logits differ by {most:.1e} at most; "
            f"{seconds[0]:.0f} s and {seconds[1]:.0f} s"
        )
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
