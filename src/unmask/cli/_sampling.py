"""The options that generate, fill and edit share."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from unmask.cli._picture import Recorder
    from unmask.cli._trace import Trace
    from unmask.constraints import Constraint
    from unmask.model import Model
    from unmask.reporting.replay import Page
    from unmask.samplers import Sampler, Step

RUNNERS_UP = 4  # printed for each token
MAX_WINDOW = 1 << 20  # of a model that is not known yet
_OPTIONS = ("steps", "temperature", "top_k", "top_p", "window", "stride")


def steps_value(text: str) -> int | None:
    """A number of steps, or inf for one token a call."""
    if text in ("inf", "none"):
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps nor inf") from None


def add_arguments(parser: argparse.ArgumentParser, *, conditions: bool = True) -> None:
    """conditions: whether constraints, guidance and label are shown; a command that does not take them refuses them."""
    from unmask import samplers

    group = parser.add_argument_group(
        "sampling", "any option of the sampler is a flag; unmask samplers lists samplers and options"
    )
    group.add_argument(
        "--sampler",
        choices=samplers.room.names(),
        metavar="NAME",
        help="default: the model's own, such as ancestral",
    )
    group.add_argument(
        "--steps",
        type=steps_value,
        default=...,
        metavar="T",
        help="maximum number of network calls; inf: one token per call; "
        "with block, semi_ar and refine: of the inner sampler",
    )
    group.add_argument(
        "--temperature", type=float, help="below 1 sharpens, 0 takes the likeliest token (default: the model's)"
    )
    group.add_argument("--top-k", type=int, help="sample from the k likeliest tokens; 0: all (default: the model's)")
    group.add_argument(
        "--top-p",
        type=float,
        help="sample from the likeliest tokens with total probability p; 1: all (default: the model's)",
    )
    group.add_argument("--window", type=int, help="semi_ar: tokens written at a time (default: the model's)")
    group.add_argument("--stride", type=int, help="semi_ar: step of the window (default: half of it)")
    group.add_argument(
        "--guidance", type=float, metavar="W", help="follow the condition more closely; two network calls per step"
    )
    group.add_argument(
        "--label", metavar="CLASS", help="the text's class, as a word or number, for models trained with classes"
    )
    group.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    refused = [] if conditions else [a for a in group._group_actions if a.dest in ("guidance", "label")]
    group = _add_constraints(parser)
    if not conditions:
        group.description = None
        refused += group._group_actions
    for action in refused:
        action.help = argparse.SUPPRESS
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default fp32")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    views = parser.add_argument_group("views", "these do not affect the texts")
    views.add_argument("--watch", action="store_true", help="show the first text opening in the terminal")
    views.add_argument("--trace", metavar="FILE", help="write one line of JSON per step, while the command runs")
    views.add_argument("--html", metavar="FILE", help="write a page that replays how the masks of all texts opened")
    views.add_argument("--svg", metavar="FILE", help="write a picture of a few moments of the first text")
    options = [option for action in parser._actions for option in action.option_strings]
    parser.set_defaults(flags=[option.removeprefix("--") for option in options if option.startswith("--")])


def _add_constraints(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:

    group = parser.add_argument_group("constraints", "always met; of several constraints, all hold")
    group.add_argument(
        "--regex", metavar="PATTERN", action="append", help="the whole text matches this regular expression"
    )
    group.add_argument(
        "--json-schema", metavar="FILE", action="append", help="the text is JSON that this schema allows"
    )
    group.add_argument("--choices", metavar="A,B,C", action="append", help="the text is one of these")
    group.add_argument(
        "--must-contain", metavar="TEXT", action="append", help="the text contains this; may be repeated"
    )
    group.add_argument(
        "--must-not-contain", metavar="TEXT", action="append", help="the text does not contain this; may be repeated"
    )
    group.add_argument("--allow-words", metavar="A,B,C", action="append", help="the text has no words other than these")
    group.add_argument("--forbid-words", metavar="A,B,C", action="append", help="the text has none of these words")
    group.add_argument("--min-tokens", type=int, metavar="N", help="the text has at least N tokens")
    group.add_argument("--max-tokens", type=int, metavar="N", help="the text has at most N tokens")
    group.add_argument(
        "--constraint",
        metavar="JSON",
        action="append",
        help="a constraint with its options (unmask plugins constraints lists them), "
        """as in '{"name": "words", "forbid": ["I"], "ignore_case": true}'; may be repeated""",
    )
    group.add_argument(
        "--constrain",
        choices=("gap", "text"),
        default="gap",
        help="what the constraint applies to: each gap, or the whole text with its prompt (default gap)",
    )
    return group


def make_constraint(args: argparse.Namespace) -> list[Constraint] | None:
    """What the flags ask for; None where they ask for nothing."""
    from unmask import constraints

    over: dict[str, Any] = {"over": args.constrain}
    made: list[Constraint] = []
    made += [constraints.Regex(pattern=pattern, **over) for pattern in args.regex or ()]
    made += [constraints.JsonSchema(schema=_read_schema(path), **over) for path in args.json_schema or ()]
    made += [constraints.Choices(options=tuple(words.split(",")), **over) for words in args.choices or ()]
    if args.must_contain is not None:
        made.append(constraints.Contains(phrases=tuple(args.must_contain), **over))
    if args.must_not_contain is not None:
        made.append(constraints.Excludes(phrases=tuple(args.must_not_contain), **over))
    forbid = tuple(word for words in args.forbid_words or () for word in words.split(","))
    allowed = [tuple(words.split(",")) for words in args.allow_words or ()]
    if allowed or forbid:
        made.append(constraints.Words(allow=allowed[0] if allowed else None, forbid=forbid, **over))
    made += [constraints.Words(allow=words, **over) for words in allowed[1:]]
    if args.min_tokens is not None or args.max_tokens is not None:
        made.append(constraints.Length(least=args.min_tokens or 0, most=args.max_tokens, **over))
    made += [_read_constraint(text, over) for text in args.constraint or ()]
    return made or None


def _read_constraint(text: str, over: dict[str, Any]) -> Constraint:
    from unmask.constraints import Constraint
    from unmask.reader import from_dict

    try:
        data = json.loads(text) if text.lstrip().startswith("{") else {"name": text}
    except (ValueError, RecursionError) as e:
        raise UsageError(f"--constraint is not valid JSON: {e}") from None
    made: Constraint = from_dict(Constraint, over | data, "--constraint")
    return made


def _read_schema(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the schema {path}: {reason}") from None


def check(args: argparse.Namespace) -> list[Constraint] | None:
    """Refuse what no model could be asked for, before one is loaded. What the texts are constrained to comes back."""
    from unmask.data.tokenizers import load_tokenizer
    from unmask.devices import pick_device, pick_dtype

    _check_sampler(args)
    for name in ("num", "length"):
        if (value := getattr(args, name, None)) is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")
    if args.guidance is not None and not math.isfinite(args.guidance):
        raise UsageError(f"--guidance must be a finite number, got {args.guidance}")
    for flag in ("trace", "html", "svg"):
        if getattr(args, flag) is not None:
            _check_writable(flag, getattr(args, flag))
    pick_dtype(args.dtype, pick_device(args.device))
    constraint = make_constraint(args)
    for one in constraint or ():
        one.automaton(load_tokenizer("bytes"))  # a pattern's own automaton is kept: no work is done twice
    return constraint


def _check_sampler(args: argparse.Namespace) -> None:
    """Refuse options that fit none of the samplers that a model may have as its own."""
    from unmask.samplers import room
    from unmask.samplers.drawing import Drawing
    from unmask.sampling.factory import make_sampler as made

    refused: list[UsageError] = []
    for own in ("ancestral", "left_to_right", "posterior"):
        try:
            with _flags_named(args):
                made(args.sampler, _options(args), own=room.get(own)(), drawing=Drawing(), window=MAX_WINDOW)
            return
        except UsageError as e:
            refused.append(e)
    raise refused[0]


def make_sampler(args: argparse.Namespace, model: Model) -> Sampler:
    """The model's own sampler, or the one named, with its options (see `Model.make_sampler`)."""
    with _flags_named(args):
        return model.make_sampler(args.sampler, **_options(args))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of the sampler."""
    options = dict(args.overrides) | {k: getattr(args, k) for k in _OPTIONS if getattr(args, k) not in (None, ...)}
    return options | ({"steps": None} if args.steps is None else {})


@contextmanager
def _flags_named(args: argparse.Namespace) -> Iterator[None]:
    """An option that the sampler does not have is called by its flag, and may have meant any other flag."""
    from unmask.sampling.factory import UnknownOption

    try:
        yield
    except UnknownOption as e:
        flag = e.option.replace("_", "-")
        hint = did_you_mean(flag, {*(option.replace("_", "-") for option in e.known), *args.flags})
        raise UsageError(f"the sampler {e.cls.__name__} has no option --{flag}; {hint}") from None


class View:
    """What --watch, --trace, --html and --svg ask for: `listening`, the keywords of one listener, while the texts are
    written; `save` when they are printed, so that no text is lost to a file that cannot be written."""

    def __init__(self, args: argparse.Namespace, recorder: Recorder | None, page: Page | None) -> None:
        self.args, self.recorder, self.page = args, recorder, page
        self.listening: dict[str, Any] = {}
        self.trace: Trace | None = None

    def save(self, chosen: Iterable[int] = ()) -> None:
        """chosen: the rows that became the result, where several were tried."""
        if self.recorder is not None:
            self.recorder.save(Path(self.args.svg))
        if self.page is not None:
            self.page.chosen = list(chosen)
            self.page.save(Path(self.args.html))
        if self.trace is not None and self.trace.error is not None:
            raise self.trace.error


@contextmanager
def viewing(args: argparse.Namespace, model: Model) -> Iterator[View]:
    """The view, while its terminal and trace are open."""
    from unmask.cli._picture import Recorder
    from unmask.cli._terminal import watching
    from unmask.cli._trace import tracing
    from unmask.reporting.replay import Page

    tokenizer = model.tokenizer
    view = View(args, Recorder(tokenizer) if args.svg else None, Page(tokenizer) if args.html else None)
    with watching(tokenizer, enabled=args.watch) as watch, tracing(tokenizer, args.trace) as trace:
        all_of_them = (watch, trace, view.page, view.recorder)
        listeners: list[Callable[[Step], None]] = [see for see in all_of_them if see is not None]
        curious = any(see is not None for see in all_of_them[:3])

        def listen(step: Step) -> None:
            for see in listeners:
                see(step)

        view.listening = {"watch": listen if listeners else None, "runners_up": RUNNERS_UP if curious else 0}
        view.trace = trace
        yield view


def _check_writable(flag: str, name: str) -> None:
    """Said before the work, not after it."""
    if not name:
        raise UsageError(f"--{flag} needs the name of a file")
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"cannot write {name}: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {name}: there is no folder {path.parent}")
    if flag == "trace":  # opened at once, and also what is no file, such as a pipe
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # as a whole file is written: beside the old one
            pass
    except OSError as e:
        raise UsageError(f"cannot write {name}: {e.strerror} in the folder {path.parent}") from None


def standard_input() -> str:
    """What is piped in, without the newline that ends the last line of a file: no text of the user's own ends so."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as e:
        raise UsageError(f"standard input is not UTF-8 text at byte {e.start}; convert it") from None


def print_texts(texts: list[str], args: argparse.Namespace, extra: dict[str, Any]) -> None:
    """stdout carries the result alone: the texts, or one JSON object."""
    if args.json:
        print(json.dumps({"texts": texts, "seed": args.seed} | extra))
    else:
        print("\n\n".join(texts))
