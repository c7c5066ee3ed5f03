"""Archives of small files that are moved between machines: packing, and unpacking without overwriting anything."""

from __future__ import annotations

import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from unmask.storage.atomic import atomic_file


def pack(archive: Path, files: Iterable[Path], root: Path) -> None:
    """An archive of files by their names below `root`, whole or not at all."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(archive) as new, tarfile.open(new, "w:gz", compresslevel=6) as tar:
        for file in files:
            tar.add(file, str(file.relative_to(root)))


def only_begun(commands: Iterable[tuple[Sequence[str], bool]], root: Path) -> tuple[str, ...]:
    """What commands that are not finished have begun to fill, as an archive of `root` names it: all below their --out,
    unless one that is finished fills that, too. Of networks that stayed elsewhere nobody can go on with it.

    >>> only_begun([(["eval", "--out", "o/a"], False), (["eval", "--out", "o/b"], True)], Path("o"))
    ('a/',)
    """
    places: dict[bool, set[str]] = {True: set(), False: set()}
    for words, finished in commands:
        named = [Path(place) for word, place in pairwise(words) if word == "--out"]
        places[finished] |= {f"{one.relative_to(root).as_posix()}/" for one in named if one.is_relative_to(root)}
    return tuple(sorted(places[False] - places[True]))


def unpack(archive: Path, root: Path, wanted: Callable[[str], bool]) -> int:
    """Put plain files of an archive in place where nothing is, none outside of `root`; how many they were."""
    count = 0
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                target = root / member.name
                file = tar.extractfile(member) if member.isfile() and wanted(member.name) else None
                if file is None or target.exists() or not target.resolve().is_relative_to(root.resolve()):
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(target) as new, new.open("wb") as out:
                    shutil.copyfileobj(file, out)
                count += 1
    except (OSError, EOFError, tarfile.TarError, zlib.error) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise SystemExit(f"cannot put {archive} in place: {reason}") from None
    return count
