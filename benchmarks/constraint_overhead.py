"""The cost of a constraint: the time of a step with logits at all masks, and of the constrained draw that follows it.

Both are timed in turn in this process, on a network with random weights, and medians are reported. The draw opens about
`--opens` of the positions. The vocabulary is a byte-level BPE, trained here on Python's own sources.

    python benchmarks/constraint_overhead.py                  # V 50k, L 256, DiT small
    python benchmarks/constraint_overhead.py --length 64 --size nano --vocab 4096
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from unmask import constraints
from unmask.constraints.automaton import Automaton
from unmask.corpora.stdlib import Stdlib
from unmask.data.subwords import train_bpe
from unmask.data.tokenizers import Tokenizer
from unmask.denoisers.dit import DiT
from unmask.objectives.mdlm import MDLM
from unmask.samplers.ancestral import Ancestral
from unmask.sampling.canvas import Canvas
from unmask.sampling.constrained import Constrained
from unmask.sampling.loop import check_pair
from unmask.sampling.predictor import Query

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "born", "tags", "active"],
}


def automata(tokenizer: Tokenizer) -> dict[str, Automaton]:
    made = {
        "json schema": constraints.JsonSchema.of(PERSON),
        "regex": constraints.Regex(pattern=r"([A-Za-z]{1,12} ){1,14}[A-Za-z]{1,12}\."),
        "must contain": constraints.Contains(phrases=("import unmask", "masked diffusion", "def forward(self")),
        "forbidden words": constraints.Words(forbid=("import", "return", "class", "lambda", "yield", "global")),
    }
    return {name: constraint.automaton(tokenizer) for name, constraint in made.items()}


def measure(net: Any, automaton: Automaton, tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, Any]:
    tokens = torch.full((1, args.length), tokenizer.mask_id)
    canvas = Canvas.of(tokens, mask_id=tokenizer.mask_id, seed=0)
    canvas = Canvas(canvas.tokens, canvas.mask_id, canvas.key_B, constraint=automaton)
    sampler = Constrained(inner=Ancestral(steps=max(1, args.length // args.opens)))
    predictor = MDLM().predictor(net)
    check_pair(predictor, sampler, canvas)
    plain, draws = [], []
    for _ in range(args.repeats + 1):
        state = sampler.start(canvas)
        query = sampler.ask(state)
        assert isinstance(query, Query)
        assert int(query.wanted_RK.sum()) == args.length
        begin = time.perf_counter()
        prediction = predictor(query)
        middle = time.perf_counter()
        sampler.tell(state, prediction)
        plain.append(middle - begin)
        draws.append(time.perf_counter() - middle)
    step, draw = statistics.median(plain[1:]), statistics.median(draws[1:])
    return {
        "states": automaton.num_states,
        "classes": automaton.num_classes,
        "step_ms": 1000 * step,
        "draw_ms": 1000 * draw,
        "overhead": draw / step,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", help="of the DiT")
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--opens", type=int, default=2, help="positions that open in the step, about")
    parser.add_argument("--repeats", type=int, default=5, help="steps timed; the median counts")
    parser.add_argument("--corpus-mb", type=int, default=60, help="what the vocabulary is trained on")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    tokenizer = train_bpe(args.vocab, Stdlib(limit_mb=args.corpus_mb))
    torch.manual_seed(0)
    dit = DiT(size=args.size, dropout=0.0, zero_init=False)
    net = dit.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id).eval()
    torch.nn.init.normal_(net.output.weight, std=0.02)
    results = {}
    for name, automaton in automata(tokenizer).items():
        results[name] = measure(net, automaton, tokenizer, args)
    if args.json:
        print(json.dumps({"options": vars(args), "num_ids": tokenizer.num_ids} | results))
        return
    threads = torch.get_num_threads()
    print(f"DiT {args.size}, L {args.length}, V {tokenizer.num_ids}, {threads} threads, all masked\n")
    print(f"{'':<17}{'states':>8}{'classes':>9}{'step ms':>10}{'draw ms':>10}{'overhead':>10}")
    for name, r in results.items():
        numbers = f"{r['states']:>8}{r['classes']:>9}{r['step_ms']:>10.0f}{r['draw_ms']:>10.0f}"
        print(f"{name:<17}{numbers}{r['overhead']:>9.0%}")


if __name__ == "__main__":
    main()
