"""The scan's kernels as a GPU's compiler takes them, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: the kernels are not compiled")


def test_the_scan_compiles_for_a_gpu_and_spills_nothing() -> None:
    """The interpreter takes what the compiler refuses, and knows nothing of registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        pytest.skip("this triton brings no cuobjdump")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled_scan.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    used = json.loads(done.stdout)
    assert {name: one["stack"] for name, one in used.items()} == dict.fromkeys(used, 0)
    assert used["forward"]["registers"] <= 160  # at least 12 warps on a multiprocessor
