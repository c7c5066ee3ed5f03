"""Classify texts with a fine-tuned model.

Print the class and its probability, or the predicted number. MODEL is the folder of a fine-tuning run, or the model in
it. For a model of pairs, --pair gives the second text: one for all, or one for each. --data reads a TSV, CSV or JSON
lines file with the columns that the model was trained on, or a text file with one text per line; with --label-field the
predictions are scored as well.

Examples:
  unmask classify runs/reviews "a charming journey" "a dull one" --json
  unmask classify runs/pairs "A dog sleeps." --pair "An animal rests."
  unmask classify runs/reviews --data more.tsv --field sentence --label-field sentiment
  unmask classify runs/reviews - < letter.txt
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from unmask.cli import _sampling
from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.finetuning.classifier import Answer, Classifier
    from unmask.finetuning.examples import Example

TAKES_TEXTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the folder of a fine-tuning run, or of a fine-tuned model")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts; - reads one from standard input")
    parser.add_argument("--pair", action="append", metavar="TEXT", help="the second text: one for all, or one for each")
    parser.add_argument(
        "--data", metavar="FILE", help="TSV, CSV, JSON lines, or plain text with one text per line, also .gz .xz .zst"
    )
    parser.add_argument("--field", metavar="NAME", help="column or key of the text in --data (default: as in training)")
    parser.add_argument(
        "--pair-field", metavar="NAME", help="column or key of the second text (default: as in training)"
    )
    parser.add_argument(
        "--label-field", metavar="NAME", help="column or key of the label, against which the predictions are scored"
    )
    parser.add_argument("--columns", metavar="A,B,...", help="column names, if the file has no header line")
    parser.add_argument("--batch", type=int, default=32, help="texts per batch (default 32)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all probabilities")


def run(args: argparse.Namespace) -> int:
    from unmask.devices import pick_device
    from unmask.finetuning.classifier import load_classifier

    pick_device(args.device)
    _check(args)
    classifier = load_classifier(args.model, device=args.device)
    if args.data is None:
        texts = [_sampling.standard_input() if text == "-" else text for text in args.texts]
        answers = classifier.classify(texts, args.pair, batch=args.batch)
        scores: dict[str, float] = {}
    else:
        examples = _examples(args, classifier)
        answers = classifier.answers(examples, batch=args.batch)
        scores = _scores(classifier, examples, answers) if args.label_field else {}
    _print(args, classifier, answers, scores)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.data is None:
        if not args.texts:
            raise UsageError('nothing to classify: give texts, as in unmask classify FOLDER "a text", or --data FILE')
        for flag in ("field", "pair_field", "label_field", "columns"):
            if getattr(args, flag) is not None:
                raise UsageError(
                    f"--{flag.replace('_', '-')} says how --data is read: leave it out, or give --data FILE"
                )
    elif args.texts or args.pair:
        raise UsageError("--data brings its own texts and pairs: leave out those of the command")


def _examples(args: argparse.Namespace, classifier: Classifier) -> list[Example]:
    from unmask.corpora import sources
    from unmask.finetuning.examples import Example, columns_of, read_examples

    path = sources.existing(args.data)
    plain = not path.is_dir() and sources.ending(path) not in (*sources.TABLES, *sources.JSONL)
    named = args.field or args.pair_field or args.label_field or args.columns
    if plain and not classifier.task.pairs and not named:
        lines = ((number, line.strip()) for number, line in sources.lines(path))
        return [Example(line, None, None, f"{path}, line {number}") for number, line in lines if line]
    changed: dict[str, Any] = {"text": args.field, "pair": args.pair_field, "label": args.label_field}
    changed["columns"] = None if args.columns is None else tuple(args.columns.split(","))
    data = columns_of(classifier.task, **{name: value for name, value in changed.items() if value is not None})
    if data.pair is not None and not classifier.task.pairs:
        raise UsageError("this classifier takes single texts: leave out --pair-field")
    return read_examples(args.data, data, labelled=args.label_field is not None)


def _scores(classifier: Classifier, examples: list[Example], answers: list[Answer]) -> dict[str, float]:
    from unmask.finetuning.scores import SCORES, score_all
    from unmask.finetuning.splits import targets

    task = classifier.task
    goal = targets(examples, task.kind, task.labels)
    found = [float(task.labels.index(one.label)) if one.label is not None else one.value or 0.0 for one in answers]
    names = [name for name in SCORES[task.kind] if name != "f1" or len(task.labels) == 2]
    return score_all(names, task.kind, found, goal)


def _print(args: argparse.Namespace, classifier: Classifier, answers: list[Answer], scores: dict[str, float]) -> None:
    if args.json:
        more = {"scores": scores} if scores else {}
        print(json.dumps({"answers": [one.plain() for one in answers], **more}, ensure_ascii=False))
        return
    width = max((len(word) for word in classifier.labels), default=0)
    for one in answers:
        said = " ".join(f"{one.text}  |  {one.pair}".split() if one.pair is not None else one.text.split())
        short = said if len(said) <= 60 else said[:59] + "…"
        cut = f"  ({one.cut} tokens cut)" if one.cut else ""
        if one.label is None:
            print(f"{one.value:8.3f}  {short}{cut}")
        else:
            print(f"{one.label:<{width}}  {one.probabilities[one.label]:6.1%}  {short}{cut}")
    if scores:
        from unmask.finetuning.scores import TITLES

        print(f"{len(answers):,} examples: " + ", ".join(f"{TITLES[name]} {100 * x:.1f}" for name, x in scores.items()))
