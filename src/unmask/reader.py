"""Dataclasses ↔ plain data, strictly: how recipes, model folders, requests and the command line are read.

An unknown key or a value of the wrong type is an error that names the key and the closest known one. A file may name
plug-ins that are registered; it cannot make anything be imported.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from typing import Any, Literal, Union

from unmask.errors import ConfigError, Public, UsageError, did_you_mean
from unmask.registry import BEFORE, RENAMED, UNWRITTEN, check_class, class_path, room_of

CLASS = "class"  # key for where a registered plug-in's class was defined, for the error message if it is missing
_CLASS_PATH = re.compile(r"[\w.<>]{1,200}")


def to_dict(value: Any) -> Any:
    """Plain data (dict, list, str, numbers, None) that `from_dict` reads back.

    >>> from unmask.noise import Polynomial
    >>> to_dict(Polynomial(power=3.0))
    {'name': 'polynomial', 'power': 3.0}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if UNWRITTEN not in f.metadata]
        return _head(value) | {f.name: to_dict(getattr(value, f.name)) for f in fields}
    if isinstance(value, tuple | list):
        return [to_dict(v) for v in value]
    return value


def _head(value: Any) -> dict[str, str]:
    """The name of a plug-in; for one that is not unmask's own also its class, for the error message if it is
    missing."""
    if not hasattr(value, "room"):
        return {}
    room, cls = room_of(type(value)), type(value)
    own = cls.__module__.startswith(f"{room.package}.")
    return {"name": room.name_of(value)} | ({} if own else {CLASS: class_path(cls)})


def adopt_plugins(value: Any) -> None:
    """Register the plug-in classes in these dataclasses that are not registered yet.

    Those that could not be read back from a file are refused: before a run starts, not at its first save.

    >>> from unmask.noise import Polynomial
    >>> adopt_plugins(Polynomial(power=3.0))
    """
    if isinstance(value, tuple):
        for part in value:
            adopt_plugins(part)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        if hasattr(type(value), "room"):
            check_class(type(value))
        return
    for f in dataclasses.fields(value):
        adopt_plugins(getattr(value, f.name))
    if not hasattr(value, "room"):
        return
    cls = type(value)
    room = room_of(cls)
    try:
        room.name_of(cls)
    except UsageError:
        room.add(cls)
    try:
        written = json.dumps(to_dict(value))
        same = json.dumps(to_dict(from_dict(room.base, json.loads(written), saved=True))) == written
    except (ConfigError, TypeError, ValueError, RecursionError) as e:
        raise UsageError(
            "{cls} cannot be written to a file and read again: {reason}", cls=Public(cls.__name__), reason=e
        ) from None
    if not same:
        raise UsageError(
            "{cls} is another one when it was written to a file and read again: check its fields",
            cls=Public(cls.__name__),
        )


class Word(str):
    """A value typed on the command line: the only strings that may stand for a number, a list or none."""

    __slots__ = ()


def from_dict(kind: Any, data: Any, where: str = "", *, default: Any = None, saved: bool = False) -> Any:
    """Build `kind` (a dataclass, a plug-in base, a plain type) from plain data; a `Word` is parsed according to the
    type.

    default: the plug-in for a table without a name. saved: the data was written by a run or a model, with all options
    of its time; an option that is missing was added later and gets the value that changes nothing (`came_later`). For a
    union the first member that accepts the data is used.

    >>> from unmask.noise import Noise, Polynomial
    >>> from_dict(Noise, "cosine")
    Cosine()
    >>> from_dict(Noise, {"power": 3.0}, default=Polynomial())
    Polynomial(power=3.0)
    >>> from_dict(int, Word("1e3")), from_dict(int | str, "few"), from_dict(int | str | None, Word("none"))
    (1000, 'few', None)
    """
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _union(kind, data, where, default, saved)
    if origin is Literal:
        choices = typing.get_args(kind)
        if data in choices:
            return choices[choices.index(data)]
        raise ConfigError(
            "{where}: {data!r} is not a choice; {hint}",
            where=Public(where),
            data=data,
            hint=Public(did_you_mean(str(data), map(str, choices))),
        )
    if origin is tuple:
        return _tuple(kind, data, where)
    if origin is dict and isinstance(data, dict):
        return data  # plain data, such as a schema, is not inspected
    if isinstance(kind, type) and hasattr(kind, "room"):
        return _plugin(kind, data, where, default, saved)
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), data, where, saved)
    return _plain(kind, data, where)


def overlay(kind: Any, base: Any, own: Any, *, default: Any = None) -> Any:
    """Merge plain data `own` of `kind` over `base`, key by key: a recipe over its base.

    Naming another plug-in replaces the table, so that no options of the old one remain. A table without a name means
    the base's plug-in, or `default` if the base names none.

    >>> from unmask.noise import Noise
    >>> overlay(Noise, {"name": "polynomial", "power": 3.0}, {"power": 2.0})
    {'name': 'polynomial', 'power': 2.0}
    >>> overlay(Noise, {"name": "polynomial", "power": 3.0}, "cosine")
    'cosine'
    """
    if typing.get_origin(kind) in (Union, types.UnionType):
        kind = next((member for member in typing.get_args(kind) if _is_table(member)), kind)
    if hasattr(kind, "room"):
        base, named = ({"name": data} if isinstance(data, str) else data for data in (base, own))
        if not isinstance(base, dict) or not isinstance(named, dict):
            return own
        name = base.get("name", None if default is None else kind.room.name_of(default))
        if named.get("name", name) != name:
            return own
        own, kind = named, kind.room.get(name) if name in kind.room.names() else None  # otherwise reading reports it
    if not dataclasses.is_dataclass(kind) or not isinstance(base, dict) or not isinstance(own, dict):
        return own
    hints = typing.get_type_hints(kind)
    defaults = {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(kind)}
    both = {key for key in own if key in base and key in hints}
    return base | {
        key: overlay(hints[key], base[key], value, default=defaults[key]) if key in both else value
        for key, value in own.items()
    }


def _union(kind: Any, data: Any, where: str, default: Any, saved: bool) -> Any:
    """Use the first member that accepts the data; otherwise report the error of the only likely one."""
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    optional = len(members) < len(typing.get_args(kind))
    if optional and (data is None or (isinstance(data, Word) and data == "none")):
        return None
    errors: dict[Any, ConfigError] = {}
    for member in members:
        try:
            return from_dict(member, data, where, default=default, saved=saved)
        except ConfigError as e:
            errors[member] = e
    # A table can only match the member that is one, a word the choices among the members.
    likely = [member for member in members if _is_table(member) == isinstance(data, dict)] or members
    if len(likely) == 1:
        raise errors[likely[0]]
    wanted = " or ".join([*map(_spelled, members), *(["none"] if optional else [])])
    raise ConfigError("{where}: expected {wanted}, got {data!r}", where=Public(where), wanted=Public(wanted), data=data)


def _is_table(kind: Any) -> bool:
    return typing.get_origin(kind) is dict or hasattr(kind, "room") or dataclasses.is_dataclass(kind)


def _spelled(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(repr, typing.get_args(kind)))
    return kind.__name__.lower() if hasattr(kind, "room") else getattr(kind, "__name__", str(kind))


def _plugin(kind: Any, data: Any, where: str, default: Any, saved: bool) -> Any:
    if isinstance(data, kind):  # an object, given in Python
        return data
    data = {"name": data} if isinstance(data, str) else data
    if isinstance(data, dict) and "name" not in data and default is not None and not saved:
        data = {"name": kind.room.name_of(default)} | data
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ConfigError(
            "{where}: needs a name, one of {names}", where=Public(where), names=Public(", ".join(kind.room.names()))
        )
    name, home = data["name"], data.get(CLASS)
    named = isinstance(home, str) and _CLASS_PATH.fullmatch(home) is not None
    options = {k: v for k, v in data.items() if k != "name" and not (k == CLASS and named)}
    if named and name not in kind.room.names():
        module, _, cls = str(home).rpartition(".")
        where_from = "--plugin FILE.py with it in FILE.py" if module == "__main__" else f"--plugin {module}"
        raise ConfigError(
            "{value}the {noun} {name!r} is the class {cls} of the module {module}, which this process does "
            "not know: call unmask.register({cls}) first, or give {where_from}",
            value=Public(where + ": " if where else ""),
            where_from=where_from,
            noun=Public(kind.room.noun),
            name=Public(name),
            cls=cls,
            module=module,
        )
    try:
        plugin = kind.room.get(name)
    except UsageError as e:
        raise ConfigError("{where}{reason}", where=Public(f"{where}: " if where else ""), reason=e) from None
    return _dataclass(plugin, options, where, saved)


def _dataclass(kind: type, data: Any, where: str, saved: bool) -> Any:
    if not isinstance(data, dict):
        raise ConfigError("{where}: expected a table of options, got {data!r}", where=Public(where), data=data)
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    today = {old: f.name for f in known.values() for old in f.metadata.get(RENAMED, ())}
    values = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else key
        if key in today and key not in known:
            if not saved:
                raise ConfigError(
                    "unknown key {path!r}; did you mean {value!r}? It was renamed", path=path, value=Public(today[key])
                )
            key = today[key]
        if key not in known:
            raise ConfigError("unknown key {path!r}; {hint}", path=path, hint=Public(did_you_mean(key, known)))
        default = None if known[key].default is dataclasses.MISSING else known[key].default
        values[key] = from_dict(hints[key], value, path, default=default, saved=saved)
    for f in known.values():
        if saved and f.name not in values and BEFORE in f.metadata:
            values[f.name] = f.metadata[BEFORE]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(
                "{where}{name} is missing: {kind} needs it",
                where=Public(where + "." if where else ""),
                name=Public(f.name),
                kind=Public(kind.__name__),
            )
    try:
        return kind(**values)
    except UsageError as e:
        raise ConfigError("{where}{reason}", where=Public(f"{where}: " if where else ""), reason=e) from None


def _tuple(kind: Any, data: Any, where: str) -> tuple[Any, ...]:
    args = typing.get_args(kind)
    if isinstance(data, Word) and args[-1] is Ellipsis and (data == "" or (data == "none" and args[0] is not str)):
        return ()
    parts = [Word(part) for part in data.split(",")] if isinstance(data, Word) else data
    if isinstance(parts, str) and args == (str, ...):
        parts = [parts]  # a single text is a list of one
    if not isinstance(parts, list | tuple):
        raise ConfigError("{where}: expected a list, got {data!r}", where=Public(where), data=data)
    if args[-1] is Ellipsis:
        args = (args[0],) * len(parts)
    if len(parts) != len(args):
        raise ConfigError(
            "{where}: expected {wanted} values, got {got}",
            where=Public(where),
            wanted=Public(len(args)),
            got=Public(len(parts)),
        )
    return tuple(from_dict(a, p, where) for a, p in zip(args, parts, strict=True))


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _plain(kind: Any, data: Any, where: str) -> Any:
    name = Public(getattr(kind, "__name__", str(kind)))
    wrong = ConfigError("{where}: expected {kind}, got {data!r}", where=Public(where), kind=name, data=data)
    if kind is bool:
        if isinstance(data, bool):
            return data
        if isinstance(data, Word) and data.lower() in _TRUE + _FALSE:
            return data.lower() in _TRUE
        raise wrong
    if isinstance(data, bool):
        raise wrong
    if kind is str:
        if isinstance(data, str):
            return str(data)
        raise wrong
    if kind in (int, float):
        if kind is int and isinstance(data, Word) and re.fullmatch(r"[+-]?[0-9]{1,40}", data):
            return int(data)  # not via float, to keep every digit of a large seed
        try:
            number = float(data) if isinstance(data, int | float | Word) else None
        except (ValueError, OverflowError):
            number = None
        if number is None or not math.isfinite(number) or (kind is int and number != int(number)):
            raise wrong
        return int(data) if kind is int and isinstance(data, int) else kind(number)
    raise wrong
