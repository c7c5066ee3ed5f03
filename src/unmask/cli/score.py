"""Score how likely texts are under a model, in bits per byte.

Lower means likelier; for diffusion models the score is an upper bound. With --prompt it is the score of the text given
the prompt, which is neither noised nor scored. --data scores each text of a file, read as unmask eval reads it. For
DNA, --csv and --plot give the cost of each base, also in regions of --fasta.

Examples:
  unmask score "The cat sat on the mat." "Mat the on sat cat the."
  unmask score runs/mine - < letter.txt
  unmask score runs/pairs "A poet." "A potato." --prompt "Who wrote it?"
  unmask score runs/pairs --data test.jsonl --field answer --prompt-field question --json
  unmask score runs/dna --fasta genome.fa.gz --region chr20:60001-61000 --csv bases.csv --plot bases.svg
"""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from unmask.cli import _bases, _naming, _reading, _sampling
from unmask.errors import NonFiniteError, UsageError, did_you_mean
from unmask.evaluation import SCORE_DRAWS
from unmask.storage.built_in import DEFAULT

if TYPE_CHECKING:
    from unmask.corpora import Document
    from unmask.model import Model

TAKES_TEXTS = True
MISSING = 'a text, as in unmask score "The cat sat."'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model_and_texts(parser, "texts; - reads one from standard input")
    parser.add_argument("--prompt", action="append", help="the prompt of the texts: one for all, or one for each")
    parser.add_argument(
        "--label", metavar="CLASS", help="the texts' class, as a word or number, for models trained with classes"
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        default=SCORE_DRAWS,
        help=f"draws of time and masks per text (default {SCORE_DRAWS})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of times and masks (default 0)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")
    parser.add_argument("--data", help=f"{_reading.DATA}; its texts are scored")
    _reading.add_arguments(parser)
    _bases.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from unmask.devices import pick_device
    from unmask.model import load

    if args.num_samples < 1:
        raise UsageError(f"--num-samples must be at least 1, got {args.num_samples}")
    pick_device(args.device)
    if _bases.asked(args):
        return _bases.run(args)
    if args.data is None:
        name, texts = _naming.model_and_texts(args.arguments, MISSING)
        texts = [_sampling.standard_input() if text == "-" else text for text in texts]
        _check(args, texts)
        model = load(name, device=args.device)
        documents = _documents(args, model, texts)
    else:
        if len(args.arguments) > 1 or args.prompt or args.label is not None:
            raise UsageError("--data brings its own texts, prompts and labels: leave out those of the command")
        name = args.arguments[0] if args.arguments else DEFAULT
        model = load(name, device=args.device)
        corpus = _reading.corpus_of(args, model, _reading.trained_on(name, needed=False))
        documents = [document for document in corpus.documents() if document.text]
        _check_labels(model, documents, asked=bool(args.label_field))
    scores = [_score(args, model, document) for document in documents]
    broken = [number for number, one in enumerate(scores, 1) if one["nats"] is None]
    if args.json:
        print(json.dumps({"scores": scores, "seed": args.seed, "draws": args.num_samples}))
    else:
        _print(scores)
    if broken:
        of = f"text {broken[0]}" + (f" and {len(broken) - 1} more" if broken[1:] else "")
        raise NonFiniteError(f"the model gives no finite number for {of}: see its weights")
    return 0


def _print(scores: list[dict[str, Any]]) -> None:
    for one in scores:
        line = " ".join(one["text"].split())
        shortened = line if len(line) <= 60 else line[:59] + "…"
        if one["nats"] is None:
            print(f"not finite  {one['tokens']} tokens  {shortened}")
            continue
        ends = one["nats_ci95"]
        sign, half = ("", 0.0) if one["exact"] else ("≤ ", 0.0 if ends is None else (ends[1] - ends[0]) / 2)
        spread = f" ± {half:.2f}" if half else ""
        bits = "nothing scored" if one["bits_per_byte"] is None else f"{sign}{one['bits_per_byte']:.3f} bits/byte"
        nats = f"{one['nats']:.2f}{spread} nats"
        print(f"{bits}  {nats}  {one['tokens']} tokens  {shortened}")


def _check(args: argparse.Namespace, texts: list[str]) -> None:
    if others := [name for name in _reading.reading_options(args) if name != "separator"]:
        raise UsageError(f"--{others[0].replace('_', '-')} is for the texts of a file: give --data FILE")
    if not all(texts):
        raise UsageError("an empty text has no bits per byte: give one that holds something")
    if args.prompt and len(args.prompt) not in (1, len(texts)):
        raise UsageError(f"{len(args.prompt)} prompts for {len(texts)} texts: give one for all, or one for each")
    if args.separator is not None and not args.prompt:
        raise UsageError("--separator stands between prompt and text: give --prompt")


def _documents(args: argparse.Namespace, model: Model, texts: list[str]) -> list[Document]:
    """The texts with what stands before them, as a corpus gives them."""
    from unmask.corpora import Document

    end = model.separator if args.separator is None else args.separator
    heads = [prompt + end for prompt in args.prompt or ()] or [""]
    heads = heads * len(texts) if len(heads) == 1 else heads
    label = args.label if args.label in model.labels else model.class_of(args.label)
    return [Document(text, head, label) for text, head in zip(texts, heads, strict=True)]


def _check_labels(model: Model, documents: list[Document], *, asked: bool) -> None:
    """Refuse labels that the model does not know, as `unmask eval` does."""
    if not model.denoiser.num_classes:
        if asked:
            raise UsageError(f"this model knows no classes: leave out {_reading.LABEL_FIELD}")
        return
    for label in dict.fromkeys(document.label for document in documents):
        if model.labels and label is not None and label not in model.labels:
            raise UsageError(
                f"the label {str(label)[:40]!r} is none of the model's; {did_you_mean(str(label), model.labels)}"
            )


def _score(args: argparse.Namespace, model: Model, document: Document) -> dict[str, Any]:
    """What a document's text costs given its prompt, of which the separator is a part already."""
    bound = model.score(
        document.text,
        prompts=document.prompt or None,
        separator="",
        label=document.label if model.denoiser.num_classes or args.data is None else None,
        seed=args.seed,
        num_samples=args.num_samples,
    )
    lo, hi = (x * bound.tokens for x in bound.ci95)
    record: dict[str, Any] = {"text": document.text} | ({"prompt": document.prompt} if document.prompt else {})
    record |= {"label": document.label} if document.label is not None and model.denoiser.num_classes else {}
    good = math.isfinite(bound.nats)  # JSON has neither NaN nor infinity
    record |= {"nats": bound.nats if good else None, "nats_ci95": [lo, hi] if math.isfinite(hi - lo) else None}
    record |= {"tokens": bound.tokens, "bytes": bound.num_bytes}
    return record | {"bits_per_byte": bound.bits_per_byte if good else None, "exact": bound.exact}
