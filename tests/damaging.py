"""How tests spoil a model's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path], None]


def edit(file: str = "config.json", **changes: Any) -> Damage:
    """Change a JSON file; a dotted key reaches inside (a__b), `...` removes."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / file).read_text(encoding="utf-8"))
        for key, value in changes.items():
            *path, last = key.split("__")
            place = config
            for part in path:
                place = place[part]
            if value is ...:
                del place[last]
            else:
                place[last] = value
        (folder / file).write_text(json.dumps(config), encoding="utf-8")

    return damage
