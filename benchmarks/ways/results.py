"""The file of results: a JSON line a run, added by several processes, read while others still write."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

Line = dict[str, Any]
TIMED = -1  # the seed of a line that says how long a way takes alone


def add_line(path: Path, line: Line) -> None:
    """One write to the end of the file: lines of several processes do not mix, and a line that a kill cut off ends."""
    with open(path, "a+b", buffering=0) as file:
        whole = file.seek(0, os.SEEK_END) == 0 or os.pread(file.fileno(), 1, file.tell() - 1) == b"\n"
        file.write(("" if whole else "\n").encode() + (json.dumps(finite(line)) + "\n").encode())
        os.fsync(file.fileno())


def finite(value: Any) -> Any:
    """For JSON, which has no NaN: a run that diverged ends with null.

    >>> finite({"curve": [[1, math.nan]]})
    {'curve': [[1, None]]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list) else value


def read_lines(path: Path, setting: str, steps: int) -> list[Line]:
    """The whole lines of one setting; of a pair that was run again, the newest."""
    newest: dict[tuple[str, int], Line] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue  # cut off by a kill
        if (line["setting"], line["setting_steps"]) == (setting, steps):
            newest[line["way"], line["seed"]] = line
    return list(newest.values())
