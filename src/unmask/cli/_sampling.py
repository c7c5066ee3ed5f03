"""The options that generate and fill share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from unmask.model import Model
    from unmask.samplers import Sampler, Step

_FLAGS = ("sampler", "seed", "device", "dtype", "watch", "svg", "json", "num", "length", "prompt", "suffix")
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
        "--steps", type=steps_value, default=..., metavar="T", help="network calls at most; inf: one token a call"
    )
    group.add_argument("--temperature", type=float, help="below 1 sharper, 0 the likeliest token (default 1)")
    group.add_argument("--top-k", type=int, help="draw among the k likeliest tokens (default 0: all)")
    group.add_argument("--top-p", type=float, help="draw among the likeliest tokens that hold p (default 1: all)")
    group.add_argument("--window", type=int, help="semi_ar: tokens written at a time (default: the model's)")
    group.add_argument("--stride", type=int, help="semi_ar: how far the window moves (default: half of it)")
    group.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU where there is one)")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default fp32")
    parser.add_argument("--watch", action="store_true", help="show the masks opening in the terminal")
    parser.add_argument("--svg", metavar="FILE", help="draw the first text opening, as a picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def make_sampler(args: argparse.Namespace, model: Model) -> Sampler:
    """The model's own sampler, or the one named, with the options given; one that it does not have is refused."""
    from unmask.config import Word
    from unmask.samplers import room
    from unmask.samplers.semi_ar import SemiAR

    given: dict[str, Any] = {k: Word(v) for k, v in args.overrides.items()}
    given |= {k: getattr(args, k) for k in _OPTIONS if getattr(args, k) not in (None, ...)}
    if args.steps is None:
        given["steps"] = None
    own = model.objective.sampler()
    cls = room.get(args.sampler) if args.sampler else type(own)
    if cls is SemiAR:
        outer: dict[str, Any] = {k: given.pop(k) for k in ("window", "stride") if k in given}
        return SemiAR(**({"window": model.length} | outer), inner=_build(type(own), own, given))
    return _build(cls, own, given)


def _build(cls: type[Sampler], own: Sampler, options: dict[str, Any]) -> Sampler:
    from unmask.config import Word, from_dict

    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for name, value in options.items():
        if name not in known:
            hint = did_you_mean(name, {*known, *_FLAGS}).replace("_", "-")
            raise UsageError(f"the sampler {cls.__name__} has no option --{name}; {hint}")
        if isinstance(value, Word):
            options = options | {name: from_dict(hints[name], value, f"--{name}")}
    if "noise" in known and hasattr(own, "noise"):
        options = {"noise": own.noise} | options
    return cls(**options)


@contextmanager
def shown(args: argparse.Namespace, model: Model) -> Iterator[Callable[[Step], None] | None]:
    """What --watch and --svg ask for, as one listener."""
    from unmask.cli._picture import Recorder
    from unmask.cli._terminal import watching

    with watching(model.tokenizer, enabled=args.watch) as watch:
        recorder = Recorder(model.tokenizer, watch) if args.svg else None
        yield recorder or watch
    if recorder is not None:
        recorder.save(Path(args.svg))


def print_texts(texts: list[str], args: argparse.Namespace, extra: dict[str, Any]) -> None:
    """stdout carries the result alone: the texts, or one JSON object."""
    if args.json:
        print(json.dumps({"texts": texts, "seed": args.seed} | extra))
    else:
        print("\n\n".join(texts))
