"""A folder of plug-ins: one file each, found by file name, imported only when used.

A room (`unmask.noise`, `unmask.samplers`, ...) is a package whose every public module holds one plug-in class, save
`base`, which has the contract, and the helpers that the room names.
The file's name is the plug-in's name in recipes and on the command line: `log_linear.py` holds `LogLinear`.
Third parties add theirs through an entry point in the group `unmask.<room>`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import numbers
import pkgutil
import sys
import typing
from pathlib import Path
from typing import Any

from unmask.errors import Public, UsageError, did_you_mean


class Room:
    """The plug-ins of one folder.

    >>> from unmask import noise
    >>> "log_linear" in noise.room.names()
    True
    """

    def __init__(self, package: str, base: str, helpers: tuple[str, ...] = ()) -> None:
        self.package = package
        self._helpers = {"base", *helpers}
        self.noun = base.lower()
        self._base = base

    def _modules(self) -> dict[str, str]:
        """Plug-in name → module name, from the file names alone: nothing is imported."""
        path = sys.modules[self.package].__path__
        names = (m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))
        found = {name: f"{self.package}.{name}" for name in names if name not in self._helpers}
        for name, module in _third_party(self.package, tuple(sys.path)):
            found.setdefault(name, module)
        return found

    def names(self) -> list[str]:
        return sorted(self._modules())

    def get(self, name: str) -> type[Any]:
        """The plug-in class of that name."""
        modules = self._modules()
        if name not in modules:
            raise UsageError(
                "unknown {noun} {name!r}; {hint}",
                noun=Public(self.noun),
                name=name,
                hint=Public(did_you_mean(name, modules)),
            )
        module = importlib.import_module(modules[name])
        base = getattr(sys.modules[self.package], self._base)
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__:
                return value
        raise UsageError(
            "{module} holds no {base}: a plug-in file defines one subclass of it",
            module=Public(modules[name]),
            base=Public(self._base),
        )

    def name_of(self, plugin: object) -> str:
        """The name a plug-in goes by in recipes: its file's."""
        cls = plugin if isinstance(plugin, type) else type(plugin)
        for name, module in self._modules().items():
            if module == cls.__module__:
                return name
        raise UsageError(
            "{cls} is not a plug-in of {package}: only plug-ins can be written to a file",
            cls=Public(cls.__name__),
            package=Public(self.package),
        )

    def attribute(self, attribute: str) -> Any:
        """`unmask.noise.LogLinear` without importing every file: the class's name, lower-cased, is the file's."""
        for name, module in self._modules().items():
            if name.replace("_", "") == attribute.lower() and not attribute.islower():
                return getattr(importlib.import_module(module), attribute)
        raise AttributeError(f"module {self.package!r} has no attribute {attribute!r}")

    def summary(self, name: str) -> str:
        """First line of the plug-in file's docstring, read without importing it."""
        spec = importlib.util.find_spec(self._modules()[name])
        if spec is None or spec.origin is None:
            return ""
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        doc = ast.get_docstring(tree) or ""
        return doc.partition("\n")[0].strip()


@functools.cache
def _third_party(group: str, path: tuple[str, ...]) -> list[tuple[str, str]]:
    """Name and module of each entry point; looking through all that is installed on `path` is slow, so once."""
    return [(point.name, point.value.partition(":")[0]) for point in importlib.metadata.entry_points(group=group)]


def fields_of(plugin: type[Any] | object) -> list[dataclasses.Field[Any]]:
    """The options of a plug-in: its dataclass fields."""
    return list(dataclasses.fields(plugin))  # type: ignore[arg-type]


BEFORE = "before"


def came_later(default: Any, *, before: Any) -> Any:
    """A field that its class did not always have: what it is by default, and what files written before it mean.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     sharp: bool = came_later(True, before=False)
    >>> Options()
    Options(sharp=True)
    """
    return dataclasses.field(default=default, metadata={BEFORE: before})


def check_fields(plugin: object) -> None:
    """Refuse a number, a choice or an inner plug-in that is not of its field's type: a dataclass takes anything."""
    cls: Any = type(plugin)
    for name, kind in _field_types(cls).items():
        value = getattr(plugin, name)
        if optional := type(None) in typing.get_args(kind):
            if value is None:
                continue
            kind = next(inner for inner in typing.get_args(kind) if inner is not type(None))
        choices = typing.get_args(kind)
        if typing.get_origin(kind) is typing.Literal and value not in choices:
            raise UsageError(
                "{name} is {value!r}; {hint}",
                name=Public(name),
                value=value,
                hint=Public(did_you_mean(str(value), map(str, choices))),
            )
        if (wanted := _wanted(kind, value)) is not None:
            raise UsageError(
                "{name} must be {wanted}{or_none}, got {value!r}",
                name=Public(name),
                wanted=Public(wanted),
                or_none=Public(" or None" if optional else ""),
                value=value,
            )


_NUMBERS = {int: (numbers.Integral, "a whole number"), float: (numbers.Real, "a number"), bool: (bool, "True or False")}


def _wanted(kind: Any, value: object) -> str | None:
    """What a field of this type takes, where the value is none of it."""
    if kind in _NUMBERS:
        base, name = _NUMBERS[kind]
        return None if isinstance(value, base) and (kind is bool or not isinstance(value, bool)) else name
    if isinstance(kind, type) and hasattr(kind, "room") and not isinstance(value, kind):
        return f"a {kind.__name__.lower()} of {kind.room.package}"
    return None


@functools.cache
def _field_types(plugin: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(plugin)
    return {field.name: hints[field.name] for field in fields_of(plugin)}
