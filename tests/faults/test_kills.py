"""SIGKILL at named points of the save path and at random moments of a running training, in all ways of saving.

A seeded sample by default; all of it with UNMASK_FAULTS=all, as `make faults` does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from matrix import ALL, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch")

# Numbers of points (0: every one) and of random moments. Of the ways to save, async has all of sync's moments too.
MODES = {"sync": (0, 200), "async": (0, 200), "sharded": (0, 50)}
MODELS = {"sync": 0, "async": 0}  # points of the best model's folder
if not ALL:
    MODES = {"sync": (2, 0), "async": (2, 2), "sharded": (1, 0)}
    MODELS = {"async": 1}


def test_a_killed_run_goes_on(tmp_path: Path, corpus_file: Path, tally: Any) -> None:
    """What is left is whole, at most one interval is lost, and the end is that of a run which was never killed."""
    parts = [f"points:{mode}:{points}" for mode, (points, _) in MODES.items()]
    parts += [f"models:{mode}:{points}" for mode, points in MODELS.items()]
    parts += [f"moments:{mode}:{moments}" for mode, (_, moments) in MODES.items() if moments]
    program = Path(__file__).with_name("kills.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(corpus_file), *parts],
        capture_output=True,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = {report["part"]: report for report in map(json.loads, done.stdout.splitlines())}
    assert list(reports) == parts
    for part, report in reports.items():
        assert report["wrong"] == [], done.stderr
        what, mode, _ = part.split(":")
        cases = set(report["reached"])
        assert len(cases) == len(report["reached"])
        tally(f"killed at {what}, {mode}", len(cases))
    for mode, (asked, moments) in MODES.items():
        points = {case.partition(" (")[0] for case in reports[f"points:{mode}:{asked}"]["reached"]}
        assert len(points) >= (asked - 1 or 1 if asked else 12)
        assert not moments or len(reports[f"moments:{mode}:{moments}"]["reached"]) == moments
