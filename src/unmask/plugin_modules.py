"""--plugin MODULE: user-defined classes for this process. The user names the module; a file cannot."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from unmask.errors import UnmaskError, UsageError

FLAG = "--plugin"
HELP = f"{FLAG} MODULE registers the classes of a module or FILE.py; may be repeated."


loaded: list[str] = []  # loaded in this process; child processes load the same


def split_plugins(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the remaining words and the modules of its --plugin options, at any position.

    >>> split_plugins(["--plugin", "mine", "eval", "runs/a", "--plugin=./noise.py"])
    (['eval', 'runs/a'], ['mine', './noise.py'])
    """
    rest: list[str] = []
    names: list[str] = []
    queue = iter(words)
    for word in queue:
        if word == "--":
            return [*rest, word, *queue], names
        flag, equals, name = word.partition("=")
        if flag != FLAG:
            rest.append(word)
            continue
        name = name if equals else next(queue, "")
        if not name or name.startswith("-"):
            raise UsageError(f"{FLAG} needs the name of a module, as in {FLAG} my_package.noise or {FLAG} noise.py")
        names.append(name)
    return rest, names


def load_plugins(names: list[str]) -> None:
    """Import each module and register the plug-in classes that it defines, except those already registered."""
    for name in names:
        module = _import(name)
        if not _register_classes(module):
            raise UsageError(
                f"the module {name} defines no plug-in: a plug-in is a subclass of a room's base, "
                "such as unmask.noise.Noise, which defines all that the base asks for"
            )
        if name not in loaded:
            loaded.append(name)


def _import(name: str) -> ModuleType:
    try:
        return _from_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(f"{e.name}.")):
            raise UsageError(f"there is no module {name} on Python's path; of a file give the path, FILE.py") from None
        raise UsageError(f"the module {name} cannot be imported: {e}") from None
    except UnmaskError:
        raise
    except Exception as e:
        raise UsageError(f"the module {name} cannot be imported: {type(e).__name__}: {e}") from None


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path} to take plug-ins from")
    if not path.stem.isidentifier():
        raise UsageError(f"{path} cannot be a module's name: use letters, digits and _ before the .py")
    # Imported under its own name, which a model folder can then report if the class is missing.
    known = sys.modules.get(path.stem)
    other = importlib.util.find_spec(path.stem) if known is None else known.__spec__
    if (known or other) is not None:
        if other is None or Path(other.origin or "").resolve() != path.resolve():
            raise UsageError(f"{path}: there is another module {path.stem} already; give the file another name")
        return importlib.import_module(path.stem)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a name with .py has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _register_classes(module: ModuleType) -> int:
    """Register the plug-ins that the module, or its submodules, define; returns their number."""
    from unmask.registry import Room, register, room_of

    count = 0
    for name, cls in list(vars(module).items()):
        if not isinstance(cls, type) or not isinstance(getattr(cls, "room", None), Room) or name.startswith("_"):
            continue
        if f"{cls.__module__}.".startswith(f"{module.__name__}.") and not getattr(cls, "__abstractmethods__", None):
            try:
                room_of(cls).name_of(cls)
            except UsageError:
                register(cls)
            count += 1
    return count
