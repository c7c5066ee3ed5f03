"""List the plug-ins of every room with their options and defaults.

A room is a kind of plug-in. A plug-in is selected by its name in a recipe (objective.noise = "cosine") or on the
command line; to add one, put a file into its room's folder.

Examples:
  unmask plugins noise
  unmask plugins --markdown > docs/plugins.md
"""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from unmask import _ROOMS

    parser.add_argument(
        "room", nargs="?", choices=_ROOMS, metavar="ROOM", help=f"one of {', '.join(_ROOMS)} (default: all)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print the tables of docs/plugins.md")


def run(args: argparse.Namespace) -> int:
    from unmask import _ROOMS

    rooms = {room: plugins_of(room) for room in ([args.room] if args.room else _ROOMS)}
    if args.json:
        print(json.dumps(rooms))
    elif args.markdown:
        print(_markdown(rooms))
    else:
        print(_text(rooms))
    return 0


def plugins_of(package: str) -> list[dict[str, Any]]:
    """Every plug-in of a room with its summary and options, as plain data."""
    import importlib

    room = importlib.import_module(f"unmask.{package}").room
    return [
        {
            "name": name,
            "class": room.get(name).__name__,
            "summary": room.summary(name),
            "options": [_option(f) for f in _fields(room.get(name))],
        }
        for name in room.names()
    ]


def _fields(plugin: type[Any]) -> list[Any]:
    from unmask.registry import fields_of

    return fields_of(plugin)


def _option(field: Any) -> dict[str, Any]:
    import dataclasses

    from unmask.reader import to_dict

    kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    option = {"name": field.name, "type": kind}
    if field.default is not dataclasses.MISSING:
        return option | {"required": False, "default": to_dict(field.default)}
    if field.default_factory is not dataclasses.MISSING:
        return option | {"required": False, "default": to_dict(field.default_factory())}
    return option | {"required": True}


def spell(option: dict[str, Any]) -> str:
    """`steps = 128` as a recipe spells it, or `path (required)`; a plug-in's default is its name."""
    if option["required"]:
        return f"{option['name']} (required)"
    default = option["default"]
    if isinstance(default, dict) and "name" in default:
        default = default["name"]
    value = "none" if default is None else default if isinstance(default, str) else json.dumps(default)
    return f"{option['name']} = {value}"


def _text(rooms: dict[str, list[dict[str, Any]]]) -> str:
    lines: list[str] = []
    for room, plugins in rooms.items():
        lines += ["", room] if lines else [room]
        width = max((len(p["name"]) for p in plugins), default=0)
        for plugin in plugins:
            lines.append(f"  {plugin['name']:<{width}}  {plugin['summary']}")
            if plugin["options"]:
                lines.append(f"  {'':<{width}}  {', '.join(map(spell, plugin['options']))}")
    return "\n".join(lines)


def _markdown(rooms: dict[str, list[dict[str, Any]]]) -> str:
    import importlib

    lines = [
        "# Plug-ins",
        "",
        "Written by `unmask plugins --markdown`; the names are those of recipes and of the command line.",
    ]
    for room, plugins in rooms.items():
        about = (importlib.import_module(f"unmask.{room}").__doc__ or "").partition("\n")[0]
        lines += [
            "",
            f"## {room}",
            "",
            about,
            "",
            "| name | class | what it is | options |",
            "| --- | --- | --- | --- |",
        ]
        for plugin in plugins:
            options = "<br>".join(f"`{spell(option)}`" for option in plugin["options"]) or "none"
            cells = (f"`{plugin['name']}`", f"`{plugin['class']}`", plugin["summary"], options)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
