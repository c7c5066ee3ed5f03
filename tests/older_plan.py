"""A comparison's folder as a version of unmask wrote it that had fewer recipe keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from unmask.comparison.plan import _digest
from unmask.comparison.trial import read_trial, write_trial


def write_as_older_version(out: Path, *keys: str) -> None:
    """Take these keys out of the plan, also from what finished trials hold a digest of."""
    plan = json.loads((out / "compare.json").read_text())
    shared = plan["shared"]
    for name, options in plan["trials"].items():
        for key in keys:
            options.pop(key, None)
            shared["common"].pop(key, None)
            shared["protocol"].pop(key, None)
        trial = read_trial(out, name)
        assert trial is not None
        fingerprint = _digest([shared, options, trial.system, trial.seed])
        write_trial(out, replace(trial, fingerprint=fingerprint, shared=_digest(shared)))
    (out / "compare.json").write_text(json.dumps(plan, indent=1) + "\n")
