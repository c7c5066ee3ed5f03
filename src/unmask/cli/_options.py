"""The list of every option of a recipe, for `--options`."""

from __future__ import annotations

import json
from typing import Any


def print_options(config: Any, width: int) -> None:
    """Every --KEY of the config with its value, and with what it may be where that is one of a few words."""
    from unmask.config import option_choices, option_paths

    choices = option_choices(config)
    for key, value in option_paths(config).items():
        values = value if isinstance(value, list) else [value]
        spelled = ",".join("none" if v is None else json.dumps(v).strip('"') for v in values) or "none"
        among = f"  ({', '.join(choices[key])})" if key in choices else ""
        print(f"--{key:<{width}} {spelled}{among}")
