"""Every call by which a checkpoint changes the disk, named by what it does to what; a test may act at any of them.

The product knows nothing of this: the functions of `os` and `shutil` are wrapped, in a child process or for one test.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRAPPED = ((os, "mkdir"), (os, "open"), (os, "write"), (os, "fsync"), (os, "rename"), (os, "replace"))
WRAPPED += ((shutil, "rmtree"),)

# Called with the point's name and "before" or "after" its call; for a write also "half", when half of it is written,
# where the answer "short" makes it end there, as a system may.
Act = Callable[[str, str], str | None]


def role(path: Path) -> str:
    """What a path is to a run: the same words for every step and every temporary name."""
    name = re.sub(r"^\.(.+)\.tmp-\d+-[0-9a-f]{8}$", r"new \1", path.name)
    name = re.sub(r"^\.(.+)\.old-\d+-[0-9a-f]{8}$", r"old \1", name)
    return re.sub(r"step-\d+", "step", name)


class Taps:
    """Wraps the calls; counts those that touch `folder` (a run's checkpoints) under root, or what is to take its place,
    and asks `act` about each."""

    def __init__(self, root: Path, act: Act, folder: str = "checkpoints") -> None:
        self.root, self.act, self.folder = str(root.resolve()), act, folder
        self.seen: list[str] = []
        self.open_files: dict[int, Path] = {}
        self.real = {name: getattr(place, name) for place, name in WRAPPED}

    def __enter__(self) -> Taps:
        for place, name in WRAPPED:
            setattr(place, name, getattr(self, f"_{name}"))
        return self

    def __exit__(self, *_: object) -> None:
        for place, name in WRAPPED:
            setattr(place, name, self.real[name])

    def _is_in(self, path: Path) -> bool:
        return any(part == self.folder or part.startswith(f".{self.folder}.") for part in path.parts)

    def _around(self, point: str, path: Path, call: Callable[[], Any]) -> Any:
        if not self._is_in(path) or not str(path.absolute()).startswith(self.root):
            return call()
        self.seen.append(point)
        self.act(point, "before")
        result = call()
        self.act(point, "after")
        return result

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return self._around(f"mkdir {role(Path(path))}", Path(path), lambda: self.real["mkdir"](path, *args, **kwargs))

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        def call() -> int:
            descriptor: int = self.real["open"](path, flags, *args, **kwargs)
            self.open_files[descriptor] = Path(path)
            return descriptor

        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if not writes or isinstance(path, int):  # opening to sync changes nothing
            return call()
        return self._around(f"open {role(Path(path))}", Path(path), call)

    def _write(self, descriptor: int, data: Any) -> int:
        path = self.open_files.get(descriptor, Path("/"))
        point = f"write {role(path)}"

        def call() -> int:
            half = (len(data) + 1) // 2
            written: int = self.real["write"](descriptor, data[:half])
            if self._is_in(path) and self.act(point, "half") == "short":
                return written
            return written + int(self.real["write"](descriptor, data[half:]))

        return int(self._around(point, path, call))

    def _fsync(self, descriptor: int) -> None:
        path = self.open_files.get(descriptor, Path("/"))
        self._around(f"fsync {role(path)}", path, lambda: self.real["fsync"](descriptor))

    def _rename(self, source: Any, target: Any, **kwargs: Any) -> None:
        point = f"rename {role(Path(source))} to {role(Path(target))}"
        self._around(point, Path(target), lambda: self.real["rename"](source, target, **kwargs))

    def _replace(self, source: Any, target: Any, **kwargs: Any) -> None:
        point = f"replace {role(Path(target))}"
        self._around(point, Path(target), lambda: self.real["replace"](source, target, **kwargs))

    def _rmtree(self, path: Any, *args: Any, **kwargs: Any) -> None:
        place = Path(path) if Path(path).exists() else Path("/")  # what is gone already is no point
        self._around(f"rmtree {role(place)}", place, lambda: self.real["rmtree"](path, *args, **kwargs))
