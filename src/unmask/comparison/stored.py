"""The plan that a comparison's folder holds, and whether it is that of today's call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.config import RunConfig, option_paths
from unmask.errors import ModelFolderError, UsageError
from unmask.reader import from_dict, to_dict
from unmask.storage.atomic import atomic_text
from unmask.storage.untrusted import read_json, read_text

PLAN = "compare.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """What the trials of a folder share, and the options of each, in the words of the version that wrote them.

    They stay as they were written, because fingerprints of finished trials are digests of them.
    """

    out: Path
    shared: dict[str, Any]
    trials: dict[str, dict[str, Any]]

    def check_shared(self, now: Mapping[str, Any], config: RunConfig, protocol: Any) -> None:
        """Refuse a comparison whose trials share something else. config: of any of its trials."""
        before = option_paths(self.shared)
        for part, whole in (("common", config), ("protocol", protocol)):
            later = _later(whole, now[part], self.shared.get(part, {}))
            before |= {f"{part}.{key}": value for key, value in later.items()}
        now = option_paths(_plain(now))
        if (key := _difference(before, now)) is not None:
            raise UsageError(
                f"{self.out} holds a comparison with {key} = {before.get(key)}, now {now.get(key)}: give another --out"
            )

    def check_options(self, name: str, now: Mapping[str, Any], config: RunConfig) -> None:
        """Refuse a trial that is there under its name with other options."""
        if name not in self.trials:
            return
        before = self.trials[name] | _later(config, now, self.trials[name])
        now = _plain(now)
        if (key := _difference(before, now)) is not None:
            raise UsageError(
                f"{self.out} holds {name} with {key} = {before.get(key)}, now {now.get(key)}: "
                "give another --out, or another name to the recipe"
            )


def read_plan(out: Path) -> StoredPlan | None:
    """The plan in this folder; None if there is none.

    >>> read_plan(Path("a folder that is not there")) is None
    True
    """
    if not (out / PLAN).exists():
        return None
    data = read_json(out / PLAN)
    shared, trials = data.get("shared"), data.get("trials")
    if isinstance(shared, dict) and isinstance(trials, dict) and data.get("format") == FORMAT:
        tables = [*trials.values(), *(shared.get(key, {}) for key in ("common", "protocol", "tokenizer"))]
        if all(isinstance(table, dict) for table in tables):
            return StoredPlan(out=out, shared=shared, trials=trials)
    raise ModelFolderError(f"{out / PLAN} is not what a comparison writes there: give another --out")


def write_plan(out: Path, shared: Mapping[str, Any], trials: Mapping[str, Any]) -> None:
    """Write the plan, unless that is what the file holds.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp())
    >>> write_plan(out, {"tokens": 1000}, {"mdlm-s0": {"batch": 8}})
    >>> read_plan(out).trials
    {'mdlm-s0': {'batch': 8}}
    """
    written = json.dumps({"format": FORMAT, "shared": shared, "trials": trials}, indent=1) + "\n"
    if not (out / PLAN).exists() or read_text(out / PLAN) != written:
        atomic_text(out / PLAN, written)


def _later(whole: Any, now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not in `before`, since its version did not have them, with the values that they have in
    today's reading of a run of that time. whole: the dataclass that has the options, with today's values.

    None of them if one must be given: then it is not later, but another plug-in's.
    """
    absent = [key for key in now if key not in before]
    data = to_dict(whole)
    for key in absent:
        *path, last = key.split(".")
        table = data
        for part in path:
            table = table.get(part, {})  # may be gone with a table that is absent itself
        table.pop(last, None)
    try:
        read = option_paths(from_dict(type(whole), data, saved=True))
    except UsageError:
        return {}
    return {key: read.get(key) for key in absent}


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first key whose value differs; those that are in both come first, since they tell more."""
    keys = sorted([*now, *before], key=lambda key: key not in before or key not in now)
    return next((key for key in keys if before.get(key) != now.get(key)), None)


def _plain(value: Any) -> Any:
    """As it is when it was written and read again."""
    return json.loads(json.dumps(value))
