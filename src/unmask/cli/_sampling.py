"""The options that generate, fill and edit share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import Public, UsageError, did_you_mean

if TYPE_CHECKING:
    from unmask.cli._page import Page
    from unmask.cli._picture import Recorder
    from unmask.cli._trace import Trace
    from unmask.constraints import Constraint
    from unmask.model import Model
    from unmask.noise import Noise
    from unmask.samplers import Sampler, Step
    from unmask.samplers.drawing import Drawing

RUNNERS_UP = 4  # shown for each token
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from unmask import samplers

    group = parser.add_argument_group(
        "sampling", "any option of the sampler, see unmask plugins samplers; these among them:"
    )
    group.add_argument(
        "--sampler", choices=samplers.room.names(), help="default: ancestral; left_to_right for AR models"
    )
    group.add_argument(
        "--steps",
        type=steps_value,
        default=...,
        metavar="T",
        help="network calls at most, inf: one token a call; of block, semi_ar, refine: of the inner sampler",
    )
    group.add_argument(
        "--temperature", type=float, help="below 1 sharper, 0 the likeliest token (default: the model's)"
    )
    group.add_argument("--top-k", type=int, help="draw among the k likeliest tokens; 0: all (default: the model's)")
    group.add_argument(
        "--top-p",
        type=float,
        help="draw among the likeliest tokens that hold p; 1: all (default: the model's)",
    )
    group.add_argument("--window", type=int, help="semi_ar: tokens written at a time (default: the model's)")
    group.add_argument("--stride", type=int, help="semi_ar: how far the window moves (default: half of it)")
    group.add_argument(
        "--guidance", type=float, metavar="W", help="follow what is given more closely; two calls a step"
    )
    group.add_argument(
        "--label", metavar="CLASS", help="the text's class, its word or number, for models trained with classes"
    )
    group.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    _add_constraints(parser)
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU where there is one)")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default fp32")
    parser.add_argument("--watch", action="store_true", help="show the masks opening in the terminal")
    parser.add_argument("--trace", metavar="FILE", help="write each step as a line of JSON while it runs")
    parser.add_argument("--html", metavar="FILE", help="write a page that replays how the masks opened")
    parser.add_argument("--svg", metavar="FILE", help="draw the first text opening, as a picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = [option for action in parser._actions for option in action.option_strings]
    parser.set_defaults(flags=[option.removeprefix("--") for option in options if option.startswith("--")])


def _add_constraints(parser: argparse.ArgumentParser) -> None:
    from unmask import constraints

    group = parser.add_argument_group("constraints", "always met; several must all hold")
    group.add_argument("--regex", metavar="PATTERN", action="append", help="all of it matches this regular expression")
    group.add_argument("--json-schema", metavar="FILE", action="append", help="it is JSON that this schema allows")
    group.add_argument("--choices", metavar="A,B,C", action="append", help="it is one of these")
    group.add_argument("--must-contain", metavar="TEXT", action="append", help="it contains this; may be repeated")
    group.add_argument("--allow-words", metavar="A,B,C", action="append", help="it has no other words than these")
    group.add_argument("--forbid-words", metavar="A,B,C", action="append", help="it has none of these words")
    group.add_argument("--min-tokens", type=int, metavar="N", help="it has at least so many tokens")
    group.add_argument("--max-tokens", type=int, metavar="N", help="it has at most so many tokens")
    group.add_argument(
        "--constraint",
        metavar="JSON",
        action="append",
        help=f"any of {', '.join(constraints.room.names())} with its options, "
        """as in '{"name": "words", "forbid": ["I"], "ignore_case": true}'; may be repeated""",
    )
    group.add_argument(
        "--constrain",
        choices=("gap", "text"),
        default="gap",
        help="what this is asked of: each gap, or the whole text with its prompt (default gap)",
    )


def make_constraint(args: argparse.Namespace) -> list[Constraint] | None:
    """What the flags ask for; None where they ask for nothing."""
    from unmask import constraints

    over: dict[str, Any] = {"over": args.constrain}
    found: list[Constraint] = []
    found += [constraints.Regex(pattern=pattern, **over) for pattern in args.regex or ()]
    found += [constraints.JsonSchema(schema=_read_schema(path), **over) for path in args.json_schema or ()]
    found += [constraints.Choices(options=tuple(words.split(",")), **over) for words in args.choices or ()]
    if args.must_contain is not None:
        found.append(constraints.Contains(phrases=tuple(args.must_contain), **over))
    forbid = tuple(word for words in args.forbid_words or () for word in words.split(","))
    allowed = [tuple(words.split(",")) for words in args.allow_words or ()]
    if allowed or forbid:
        found.append(constraints.Words(allow=allowed[0] if allowed else None, forbid=forbid, **over))
    found += [constraints.Words(allow=words, **over) for words in allowed[1:]]
    if args.min_tokens is not None or args.max_tokens is not None:
        found.append(constraints.Length(least=args.min_tokens or 0, most=args.max_tokens, **over))
    found += [_read_constraint(text, over) for text in args.constraint or ()]
    return found or None


def _read_constraint(text: str, over: dict[str, Any]) -> Constraint:
    from unmask.config import from_dict
    from unmask.constraints import Constraint

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

    refused: list[UsageError] = []
    for own in ("ancestral", "left_to_right", "posterior"):
        try:
            _made(args, room.get(own)(), Drawing(), MAX_WINDOW)
            return
        except UsageError as e:
            refused.append(e)
    raise refused[0]


def make_sampler(args: argparse.Namespace, model: Model) -> Sampler:
    """The model's own sampler, or the one named, with the options given; one that it does not have is refused.

    Of what is not given the model says how tokens are drawn (`Model.drawing`).
    """
    return _made(args, model.objective.sampler(), model.drawing, model.length)


def _made(args: argparse.Namespace, own: Sampler, drawing: Drawing, window: int) -> Sampler:
    from unmask.config import Word
    from unmask.samplers import room
    from unmask.samplers.ancestral import Ancestral
    from unmask.samplers.semi_ar import SemiAR

    given: dict[str, Any] = {k: Word(v) for k, v in args.overrides.items()}
    given |= {k: getattr(args, k) for k in _OPTIONS if getattr(args, k) not in (None, ...)}
    if args.steps is None:
        given["steps"] = None
    cls = room.get(args.sampler) if args.sampler else type(own)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    names = [*args.flags, *(name.replace("_", "-") for name in fields)]
    build = partial(_build, noise=getattr(own, "noise", None), drawing=drawing, flags=names)
    if "inner" not in fields:
        return build(cls, given)
    # A sampler around another: what it does not know is the inner one's, which is the model's own where none is named.
    usual: Any = fields["inner"].default
    named = given.pop("inner", None)
    inner = room.get(named) if named else type(own if isinstance(usual, Ancestral) else usual)
    outer: dict[str, Any] = {k: given.pop(k) for k in fields if k in given}
    if cls is SemiAR:
        outer = {"window": window} | outer
    if inner is SemiAR:
        given = {"window": window} | given
    return build(cls, outer | {"inner": build(inner, given)})


def _build(
    cls: type[Sampler], options: dict[str, Any], *, noise: Noise | None, drawing: Drawing, flags: list[str]
) -> Sampler:
    from unmask.config import Word, from_dict
    from unmask.samplers.drawing import Drawing

    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for name, value in options.items():
        if name not in known:
            spelled = name.replace("_", "-")
            hint = did_you_mean(spelled, {*(option.replace("_", "-") for option in known), *flags})
            raise UsageError(
                "the sampler {sampler} has no option --{option}; {hint}",
                sampler=Public(cls.__name__),
                option=spelled,
                hint=Public(hint),
            )
        if value == "inf" and hints[name] is float:  # a recipe takes no such number; here the sampler judges it
            options = options | {name: math.inf}
        elif isinstance(value, Word):
            options = options | {name: from_dict(hints[name], value, f"--{name}")}
    if "noise" in known and noise is not None:
        options = {"noise": noise} | options
    if issubclass(cls, Drawing):
        options = dataclasses.asdict(drawing) | options
    return cls(**options)


class View:
    """What --watch, --trace, --html and --svg ask for: `listening`, the keywords of one listener, while the texts are
    written; `save` when they are printed, so that no text is lost to a file that cannot be written."""

    def __init__(self, args: argparse.Namespace, recorder: Recorder | None, page: Page | None) -> None:
        self.args, self.recorder, self.page = args, recorder, page
        self.listening: dict[str, Any] = {}
        self.trace: Trace | None = None

    def save(self, chosen: Iterable[int] = ()) -> None:
        """chosen: the rows that were shown as the result, where several were tried."""
        if self.recorder is not None:
            self.recorder.save(Path(self.args.svg))
        if self.page is not None:
            self.page.chosen = list(chosen)
            self.page.save(Path(self.args.html))
        if self.trace is not None and self.trace.error is not None:
            raise self.trace.error


@contextmanager
def shown(args: argparse.Namespace, model: Model) -> Iterator[View]:
    """The view, while its terminal and trace are open."""
    from unmask.cli._page import Page
    from unmask.cli._picture import Recorder
    from unmask.cli._terminal import watching
    from unmask.cli._trace import tracing

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
    """Said before the work, not behind it."""
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
