"""List the samplers with options, cost and distribution.

law is the distribution that the texts follow, at temperature 1 and without top-k or top-p; a sampler without a tested
one says so. calls is the maximum number of network calls for a text of that many tokens.

Examples:
  unmask samplers
  unmask samplers ancestral semi_ar --length 256 --steps 64 --window 128
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from unmask.cli._sampling import steps_value
from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.samplers import Sampler

WIDTH = 100  # columns of the listing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", metavar="NAME", help="samplers to list (default: all)")
    parser.add_argument("--length", type=int, nargs="+", default=[128, 1024], help="tokens (default 128 1024)")
    parser.add_argument(
        "--steps", type=steps_value, default=..., metavar="T", help="number of steps (default: each sampler's own)"
    )
    parser.add_argument("--window", type=int, default=128, help="for samplers that need one (default 128)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print a table")


def run(args: argparse.Namespace) -> int:
    from unmask.cli.plugins import plugins_of
    from unmask.samplers import room

    if min(args.length) < 1:
        raise UsageError(f"--length must be at least 1, got {min(args.length)}")
    for name in args.name:
        room.get(name)
    common = {"window": args.window} | ({} if args.steps is ... else {"steps": args.steps})
    described = [
        plugin | _facts(room.get(plugin["name"]), common, args.length)
        for plugin in plugins_of("samplers")
        if not args.name or plugin["name"] in args.name
    ]
    if args.json:
        print(json.dumps({"samplers": described}))
    elif args.markdown:
        print(_markdown(described, args.length))
    else:
        print("\n\n".join(map(_text, described)))
    return 0


def _facts(cls: type[Sampler], common: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    facts: dict[str, Any] = {"law": _claim(cls, "law"), "cost": _claim(cls, "cost")}
    try:
        sampler = _make(cls, common)
        return facts | {"calls": {str(n): sampler.max_calls(n) for n in lengths}, "calls_unknown": None}
    except (UsageError, TypeError) as e:  # TypeError: an option without default that this command does not know
        return facts | {"calls": None, "calls_unknown": str(e)}


def _claim(cls: type[Sampler], name: str) -> str:
    """A sampler's own words, or a private base's; what another plug-in claims for itself is not inherited."""
    from unmask.samplers import Sampler, room

    others = {room.get(other) for other in room.names()} - {cls}
    for base in cls.__mro__:
        if name in vars(base) and base not in others:
            return str(vars(base)[name])
    return str(getattr(Sampler, name))


def _make(cls: type[Sampler], common: dict[str, Any]) -> Sampler:
    """One with its defaults; `common` where it needs an option, and steps wherever they are an option."""
    import dataclasses

    from unmask.registry import fields_of
    from unmask.samplers import Sampler

    options: dict[str, Any] = {}
    for field in fields_of(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name in common and (required or field.name == "steps"):
            options[field.name] = common[field.name]
        elif isinstance(field.default, Sampler) and "steps" in common:
            options[field.name] = _make(type(field.default), common)
    return cls(**options)


def _calls(sampler: dict[str, Any]) -> str:
    if sampler["calls"] is None:
        return f"unknown: {sampler['calls_unknown']}"
    return "at most " + ", ".join(f"{calls:,} for {int(n):,} tokens" for n, calls in sampler["calls"].items())


def _text(sampler: dict[str, Any]) -> str:
    import textwrap

    from unmask.cli.plugins import spell

    lines = textwrap.wrap(sampler["summary"], WIDTH, initial_indent=f"{sampler['name']}  ", subsequent_indent="  ")
    options = ", ".join(spell(option).replace(" ", "\xa0") for option in sampler["options"]) or "none"  # kept together
    for label, value in (
        ("law", sampler["law"]),
        ("cost", sampler["cost"]),
        ("calls", _calls(sampler)),
        ("options", options),
    ):
        if value:
            lines += textwrap.wrap(value, WIDTH, initial_indent=f"  {label:<8} ", subsequent_indent=" " * 11)
    return "\n".join(lines).replace("\xa0", " ")


def _markdown(samplers: list[dict[str, Any]], lengths: list[int]) -> str:
    from unmask.cli.plugins import spell

    head = ["sampler", "what it does", "law", "cost in network calls", *(f"L = {n}" for n in lengths), "options"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for sampler in samplers:
        calls = [f"{sampler['calls'][str(n)]:,}" if sampler["calls"] else "unknown" for n in lengths]
        options = "<br>".join(f"`{spell(option)}`" for option in sampler["options"]) or "none"
        cells = [f"`{sampler['name']}`", sampler["summary"], sampler["law"], sampler["cost"], *calls, options]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
