"""SIGKILL at the points at which a comparison's folder changes: it goes on to the same files, and repeats nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from matrix import ALL, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch")


def test_a_killed_comparison_goes_on_to_the_same_files(tmp_path: Path, corpus_file: Path, tally: Any) -> None:
    program = Path(__file__).with_name("comparisons.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(corpus_file), "0" if ALL else "8"],
        capture_output=True,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong"] == [], done.stderr
    assert len(report["cases"]) >= 8
    tally("kills of a comparison", len(report["cases"]))
