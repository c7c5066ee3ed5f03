"""Reading untrusted files: only regular files, of limited size, and strict JSON."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unmask.errors import ModelFolderError

MAX_TEXT = 1 << 28  # maximum bytes of a text file; the largest vocabularies need a tenth of it


def check_plain(path: Path) -> None:
    """Refuse anything but a regular file: a link leads out of its folder, and a pipe never ends.

    >>> check_plain(Path("nowhere.json"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.json is missing
    """
    _kind(path, follow=False)


def read_text(path: Path, most: int = MAX_TEXT) -> str:
    """The text of a file of at most `most` bytes. A link to a regular file is followed: see `check_plain`.

    >>> read_text(Path("nowhere.json"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.json is missing
    """
    try:
        return read_bytes(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise ModelFolderError(f"{path} is damaged: it is not UTF-8 text") from None


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a file of at most `most` bytes.

    >>> read_bytes(Path("nowhere.model"), 100)
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.model is missing
    """
    size = _kind(path, follow=True).st_size
    if size > most:
        raise ModelFolderError(f"{path} has {size:,} bytes, more than the {most:,} that it may have")
    try:
        return path.read_bytes()
    except OSError as e:
        raise ModelFolderError(f"cannot read {path}: {e.strerror or e}") from None


def read_json(path: Path, most: int = MAX_TEXT) -> dict[str, Any]:
    """The content of a JSON file, which must be an object; anything else is refused by name.

    >>> read_json(Path("nowhere.json"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.json is missing
    """
    try:
        value = parse_json(read_text(path, most))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is damaged: it does not read as JSON ({_short(error)})") from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} is damaged: it holds no JSON object")
    return value


def parse_json(text: str) -> Any:
    """Parse JSON; raises ValueError or RecursionError. A repeated key is ambiguous and therefore refused.

    >>> parse_json('{"step": 1, "step": 2}')
    Traceback (most recent call last):
    ValueError: the key 'step' is there twice
    """
    return json.loads(text, object_pairs_hook=_once)


def printable(value: object, most: int = 80) -> str:
    """The beginning of an untrusted value for a message: one line, without anything that moves a terminal's cursor.

    >>> printable("a\\nb" + chr(27) + "[2J")
    'a b?[2J'
    """
    line = " ".join(str(value).split())[:most]
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def first_repeat(names: Iterable[str]) -> str | None:
    """The first name that occurs again, in one pass: an untrusted list may be as long as its file.

    >>> first_repeat(["a", "b", "a", "b"]), first_repeat(["a"])
    ('a', None)
    """
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = first_repeat(name for name, _ in pairs)
        raise ValueError(f"the key {printable(twice, 40)!r} is there twice")
    return table


def _kind(path: Path, *, follow: bool) -> os.stat_result:
    try:
        info = path.stat(follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelFolderError(f"{path} is missing") from None
    except (OSError, ValueError) as e:  # a link to itself, a name too long, a null in it
        raise ModelFolderError(f"cannot read {str(path)[:200]!r}: {_short(e)}") from None
    if stat.S_ISLNK(info.st_mode):
        raise ModelFolderError(f"{path} is a symbolic link; put the file itself there")
    if not stat.S_ISREG(info.st_mode):
        raise ModelFolderError(f"{path} is no plain file")
    return info


def _short(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return printable(reason, 120) or type(error).__name__
