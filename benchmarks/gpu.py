"""The GPU table and the curves of RESULTS.md: each row is measured in its own process and written as one JSON line.

    python benchmarks/gpu.py table --out table.jsonl
    python benchmarks/gpu.py curves --out curves.jsonl
    python benchmarks/gpu.py huggingface

Then, on any machine: python benchmarks/plot.py docs/speed.svg table.jsonl curves.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

from unmask.bench import Job, run_job

SMALL = Job(
    task="train",
    version="unmask",
    device="cuda",
    hidden=768,
    blocks=12,
    heads=12,
    length=1024,
    vocab=50257,
    batch=32,
    repeats=5,
    calls=8,
)


def table() -> Iterator[Job]:
    for batch in (32, 64):
        yield replace(SMALL, batch=batch, profile=True)
    for batch, steps in ((1, 128), (1, 1000), (16, 128), (16, 1000), (64, 128)):
        yield replace(SMALL, task="sample", batch=batch, steps=steps, profile=batch < 64 and steps == 128)
    yield replace(SMALL, task="semi-ar", batch=1, steps=1000)
    for batch in (1, 64):
        yield replace(SMALL, task="ar", batch=batch, calls=64)


def curves() -> Iterator[Job]:
    """Against the batch at L = 1024, and against L: at 32,768 tokens a step in training, one row in sampling."""
    for batch in (1, 4, 16):
        yield replace(SMALL, batch=batch)
    for length in (256, 4096, 8192):
        yield replace(SMALL, length=length, batch=32768 // length)
    yield replace(SMALL, vocab=256, length=8192, batch=4)  # a small vocabulary and long rows
    for batch in (4, 8, 32):
        yield replace(SMALL, task="sample", batch=batch, repeats=3)
    for length in (256, 512, 2048, 4096, 8192):
        yield replace(SMALL, task="sample", batch=1, length=length, repeats=3)
    yield replace(SMALL, task="sample", vocab=256, length=8192, batch=1, repeats=3)


def huggingface(batch: int, tokens: int = 128) -> float:
    """Seconds for 1,023 tokens by GPT2LMHeadModel.generate with its cache, bf16, scaled up from the first `tokens`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config()).to("cuda", torch.bfloat16).eval()
    prompt = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    options = {"do_sample": True, "top_k": 0, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
    seconds = 0.0
    for _ in range(2):  # the first warms up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        net.generate(prompt, **options)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    return seconds * 1023 / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table", "curves", "huggingface"])
    parser.add_argument("--out")
    parser.add_argument("--task", action="append", help="only these: train, sample, semi-ar, ar")
    parser.add_argument("--no-textbook", action="store_true", help="ours alone")
    args = parser.parse_args()
    if args.what == "huggingface":
        for batch in (1, 64):
            print(f"generate, batch {batch}: {huggingface(batch):.1f} s for 1,023 tokens", flush=True)
        return
    jobs = table() if args.what == "table" else curves()
    ceiling = run_job(replace(SMALL, version="peak"))
    peak = ceiling.flops / min(ceiling.seconds)
    print(f"matrix product {peak / 1e12:.0f} TFLOP/s")
    with open(args.out, "w", encoding="utf-8") as out:
        for job in jobs:
            if args.task and job.task not in args.task:
                continue
            versions = ("textbook", "unmask") if args.what == "table" and not args.no_textbook else ("unmask",)
            plain = 0.0
            for version in versions:
                result = run_job(replace(job, version=version, profile=job.profile and version == "unmask"))
                line = asdict(replace(job, version=version)) | asdict(result) | {"peak_flops": peak}
                out.write(json.dumps(line) + "\n")
                out.flush()
                seconds = statistics.median(result.seconds)
                plain = plain or seconds
                print(
                    f"{job.task:<8}{version:<9} B {job.batch:<3} L {job.length:<5} V {job.vocab:<6} T {job.steps:<5}"
                    f"{seconds:>9.4f} s ({min(result.seconds):.4f}–{max(result.seconds):.4f}) "
                    f"{result.tokens / seconds:>9,.0f} tok/s  {result.flops / seconds / peak:>5.1%} MFU  "
                    f"{result.peak_bytes / 1e9:>5.1f} GB  {plain / seconds:.1f}×",
                    flush=True,
                )


if __name__ == "__main__":
    main()
