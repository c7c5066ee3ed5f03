"""The registry: plug-ins by name. Built-in ones are files, known by their names and imported on first use.

A room (`unmask.noise`, `unmask.samplers`, ...) is a package in which every public module contains one plug-in class,
except `base`, which defines the contract, and helpers that the room names. The file's name is the plug-in's name in
recipes and on the command line: `log_linear.py` contains `LogLinear`. Third parties add theirs by
`unmask.register(cls)`, by `--plugin module` on the command line, or by an entry point of an installed package in the
group `unmask.<room>`. The content of a recipe or model folder never decides what is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import numbers
import pkgutil
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast

from unmask.errors import Public, UsageError, did_you_mean

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class Room:
    """The plug-ins of one kind: those in a folder, and registered ones.

    >>> from unmask import noise
    >>> "log_linear" in noise.room.names()
    True
    """

    def __init__(self, package: str, base: str, helpers: tuple[str, ...] = ()) -> None:
        self.package = package
        self.noun = base.lower()
        self._helpers = {"base", *helpers}
        self._base_name = base
        self._registered: dict[str, type[Any]] = {}

    @property
    def base(self) -> type[Any]:
        """The base class of every plug-in in the room."""
        base: type[Any] = getattr(sys.modules[self.package], self._base_name)
        return base

    def _modules(self) -> dict[str, str]:
        """Plug-in name → module name, from the file names alone, without importing anything."""
        path = sys.modules[self.package].__path__
        names = (m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))
        modules = {name: f"{self.package}.{name}" for name in names if name not in self._helpers}
        for name, module in _third_party(self.package, tuple(sys.path)):
            modules.setdefault(name, module)
        return modules

    def names(self) -> list[str]:
        return sorted({*self._modules(), *self._registered})

    def get(self, name: str) -> type[Any]:
        """The plug-in class of that name."""
        if name in self._registered:
            return self._registered[name]
        modules = self._modules()
        if name not in modules:
            hint = Public(did_you_mean(name, self.names()))
            raise UsageError("unknown {noun} {name!r}; {hint}", noun=Public(self.noun), name=name, hint=hint)
        module = importlib.import_module(modules[name])
        for value in vars(module).values():
            own = isinstance(value, type) and issubclass(value, self.base) and value.__module__ == module.__name__
            if own and value.room is self:  # the module of a learned schedule is also a Noise, but not a plug-in
                return cast(type[Any], value)
        raise UsageError(f"{modules[name]} holds no {self._base_name}: a plug-in file defines one subclass of it")

    def name_of(self, plugin: object) -> str:
        """A plug-in's name in recipes: that of its file, or the one under which it was registered."""
        cls = plugin if isinstance(plugin, type) else type(plugin)
        for name, registered in self._registered.items():
            if registered is cls:
                return name
        for name, module in self._modules().items():
            if module == cls.__module__ and self.get(name) is cls:
                return name
        raise UsageError(
            f"{cls.__name__} is not a plug-in of {self.package}, so that no file can name it: "
            f"call unmask.register({cls.__name__}) first"
        )

    def add(self, cls: type[Any], name: str | None = None) -> None:
        """Register a class; called by `unmask.register`, which finds its room."""
        check_class(cls)
        name = snake_case(cls.__name__) if name is None else name
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot name a plug-in: use small letters, digits and _, a letter first")
        other = self._registered.get(name)
        # Running a notebook cell again redefines its class: the new one replaces the old one.
        taken = name in self._modules() or (other is not None and class_path(other) != class_path(cls))
        if taken and self.get(name) is not cls:
            owner = class_path(self.get(name))
            raise UsageError(
                f"the {self.noun} {name!r} is {owner} already: give yours another name, "
                f"as in unmask.register({cls.__name__}, name=...)"
            )
        if not taken:
            for old in [known for known, value in self._registered.items() if value is cls]:
                del self._registered[old]
            self._registered[name] = cls

    def discard(self, name: str) -> None:
        """Remove a registered plug-in from the registry."""
        self._registered.pop(name, None)

    def attribute(self, attribute: str) -> Any:
        """Implements `unmask.noise.LogLinear` without importing every file: the file's name is the class's in lower
        case."""
        for cls in self._registered.values():
            if cls.__name__ == attribute:
                return cls
        for name, module in self._modules().items():
            if name.replace("_", "") == attribute.lower() and not attribute.islower():
                return getattr(importlib.import_module(module), attribute)
        raise AttributeError(f"module {self.package!r} has no attribute {attribute!r}")

    def attributes(self) -> list[str]:
        """The names for `dir` of the room's package: its own, and the class of every plug-in.

        >>> from unmask import noise
        >>> {"Noise", "LogLinear", "room"} <= set(dir(noise))
        True
        """
        own = vars(sys.modules[self.package]).items()
        defined = [name for name, value in own if not name.startswith("_") and value is not Any]
        defined = [name for name in defined if name != "annotations" and name not in self.names()]
        return sorted({*defined, *(self.get(name).__name__ for name in self.names())})

    def summary(self, name: str) -> str:
        """First line of the docstring of the plug-in's file, read without importing it; for registered plug-ins of the
        class."""
        if name in self._registered:
            cls = self._registered[name]
            made_up = f"{cls.__name__}("  # what @dataclass generates if there is no docstring
            doc = cls.__dict__.get("__doc__") or ""
            return "" if doc.startswith(made_up) else doc.partition("\n")[0].strip()
        spec = importlib.util.find_spec(self._modules()[name])
        if spec is None or spec.origin is None:
            return ""
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        doc = ast.get_docstring(tree) or ""
        return doc.partition("\n")[0].strip()


@functools.cache
def _third_party(group: str, path: tuple[str, ...]) -> list[tuple[str, str]]:
    """Name and module of each entry point; cached, because searching all packages installed on `path` is slow."""
    return [(point.name, point.value.partition(":")[0]) for point in importlib.metadata.entry_points(group=group)]


# --- user-defined classes
# ------------------------------------------------------------------------------------------------

C = TypeVar("C", bound=type[Any])


@typing.overload
def register(cls: C, *, name: str | None = None) -> C: ...
@typing.overload
def register(cls: None = None, *, name: str | None = None) -> typing.Callable[[C], C]: ...
def register(cls: Any = None, *, name: str | None = None) -> Any:
    """Register a class of your own in this process: recipes, the command line and model folders find it by `name`.

    name: default: the class's own, in snake case. Returns the class, so it can be used as a decorator.
    An incomplete plug-in (see `check_class`) and a name that is taken are refused.

    >>> import dataclasses, unmask
    >>> @unmask.register
    ... @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class HalfCosine(unmask.noise.Cosine):
    ...     "A schedule of one's own."
    >>> unmask.noise.room.get("half_cosine") is HalfCosine is unmask.noise.HalfCosine
    True
    >>> unmask.noise.room.discard("half_cosine")
    """
    if cls is None:
        return functools.partial(register, name=name)
    room_of(cls).add(cls, name)
    return cls


def room_of(cls: object) -> Room:
    """The room whose base the class derives from."""
    room = getattr(cls, "room", None)
    if not isinstance(cls, type) or not isinstance(room, Room):
        from unmask import _ROOMS

        kinds = ", ".join(f"unmask.{name}" for name in _ROOMS)
        raise UsageError(f"{_name(cls)} is no plug-in: make it a subclass of the base class of one of {kinds}")
    return room


def check_class(cls: type[Any]) -> None:
    """Refuse a class that lacks what a plug-in needs.

    This is: every method of its base, a dataclass's fields, and for each field a type that can be written to a file.

    >>> import unmask
    >>> class Flat(unmask.noise.Noise):
    ...     pass
    >>> check_class(Flat)
    Traceback (most recent call last):
    unmask.errors.UsageError: Flat lacks alpha, dalpha, inverse: a noise defines them
    """
    room = room_of(cls)
    if cls is room.base:
        raise UsageError(f"{cls.__name__} is what every {room.noun} derives from: register a subclass of it")
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise UsageError(f"{cls.__name__} lacks {', '.join(missing)}: a {room.noun} defines them")
    annotated = any("ClassVar" not in str(kind) for kind in inspect.get_annotations(cls).values())
    own = "__dataclass_fields__" in cls.__dict__
    if not dataclasses.is_dataclass(cls) or (not own and (annotated or "__init__" in cls.__dict__)):
        raise UsageError(f"{cls.__name__} is not a dataclass: put @dataclass(frozen=True, kw_only=True) before it")
    try:
        hints = _field_types(cls)
    except Exception as e:  # an annotation with an undefined name
        raise UsageError(f"the field types of {cls.__name__} cannot be read: {e}") from None
    for field in fields_of(cls):
        if not field.init:
            raise UsageError(f"{cls.__name__}.{field.name} cannot be given to it: a plug-in's fields are its options")
        if UNWRITTEN not in field.metadata and not _writable(hints[field.name]):
            raise UsageError(
                f"{cls.__name__}.{field.name} cannot be written to a file: a field is a number, a text, True or False, "
                "a choice (Literal), a tuple of these, a dataclass, a plug-in or None"
            )


def _writable(kind: Any) -> bool:
    """Whether the strict reader can read back a field of this type."""
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return all(inner is type(None) or _writable(inner) for inner in typing.get_args(kind))
    if origin is tuple:
        return all(inner is Ellipsis or _writable(inner) for inner in typing.get_args(kind))
    if origin in (Literal, dict):
        return True
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and not hasattr(kind, "room"):
        return all(map(_writable, _field_types(kind).values()))
    return kind in (int, float, bool, str) or hasattr(kind, "room")


def snake_case(name: str) -> str:
    """The default name under which a class is registered.

    >>> snake_case("LogLinear"), snake_case("MDLM"), snake_case("MyGRU2")
    ('log_linear', 'mdlm', 'my_gru2')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def class_path(cls: type[Any]) -> str:
    """Where a class is defined, for messages: nothing is ever imported by it.

    >>> class_path(Room)
    'unmask.registry.Room'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def _name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)[:60]


# --- fields -----------------------------------------------------------------------------------------------------------


def fields_of(plugin: type[Any] | object) -> list[dataclasses.Field[Any]]:
    """The options of a plug-in: its dataclass fields."""
    return list(dataclasses.fields(plugin))  # type: ignore[arg-type]


# Keys of a field's metadata. UNWRITTEN: never written to files, as texts in memory; read back as its default.
BEFORE, RENAMED, UNWRITTEN = "before", "renamed", "unwritten"


def came_later(default: Any, *, before: Any) -> Any:
    """A field that was added to its class later: its default, and its value in files written before.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     sharp: bool = came_later(True, before=False)
    >>> Options()
    Options(sharp=True)
    """
    return dataclasses.field(default=default, metadata={BEFORE: before})


def renamed(*old: str, default: Any) -> Any:
    """A field that had other names: saved runs and models are read by them, a recipe gets a hint.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     num_steps: int = renamed("steps", default=8)
    >>> Options()
    Options(num_steps=8)
    """
    return dataclasses.field(default=default, metadata={RENAMED: old})


def check_fields(plugin: object) -> None:
    """Refuse a number, a choice or an inner plug-in of the wrong type, because dataclasses do not check types."""
    cls: Any = type(plugin)
    for name, kind in _field_types(cls).items():
        value = getattr(plugin, name)
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)
        if value is None and type(None) in kinds:
            continue
        wanted = [_wanted(inner, value) for inner in kinds if inner is not type(None)]
        if None in wanted:
            continue
        choices = [c for inner in kinds if typing.get_origin(inner) is Literal for c in typing.get_args(inner)]
        if choices and len(wanted) == 1:
            hint = Public(did_you_mean(str(value), map(str, choices)))
            raise UsageError("{name} is {value!r}; {hint}", name=Public(name), value=value, hint=hint)
        either = " or ".join([*(str(each) for each in wanted), *(["None"] if type(None) in kinds else [])])
        raise UsageError(
            "{name} must be {either}, got {value!r}", name=Public(name), either=Public(either), value=value
        )


_NUMBERS = {int: (numbers.Integral, "a whole number"), float: (numbers.Real, "a number"), bool: (bool, "True or False")}


def _wanted(kind: Any, value: object) -> str | None:
    """A description of what a field of this type accepts, if the value does not fit; unchecked types accept
    anything."""
    if kind in _NUMBERS:
        base, name = _NUMBERS[kind]
        return None if isinstance(value, base) and (kind is bool or not isinstance(value, bool)) else name
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return None if value in choices else f"one of {', '.join(map(str, choices))}"
    if isinstance(kind, type) and hasattr(kind, "room") and not isinstance(value, kind):
        return f"a {kind.__name__.lower()} of {kind.room.package}"
    if dataclasses.is_dataclass(kind) and not isinstance(value, typing.cast(type, kind)):
        return f"a {typing.cast(type, kind).__name__}"
    return None


@functools.cache
def _field_types(plugin: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(plugin)
    return {field.name: hints[field.name] for field in fields_of(plugin)}
