"""Speed and memory of the work people wait for, against a plain textbook version in the same run.

Each measurement runs in a process of its own, so that its peak memory is its own and nothing it compiled helps another.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Literal

from unmask.errors import UnmaskError

Task = Literal["train", "sample", "semi-ar", "ar"]
Version = Literal["textbook", "unmask", "peak"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement. `peak` measures no work but the device's own matrix product, against which MFU is meant."""

    task: Task
    version: Version
    device: str
    hidden: int
    blocks: int
    heads: int
    length: int
    vocab: int
    batch: int
    conditioning: str = "none"
    dropout: float = 0.1
    precision: str = "bf16"
    compile: bool = False
    steps: int = 128  # T, for sampling
    total: int = 2048  # tokens of a semi-autoregressive text
    stride: int = 512
    repeats: int = 10
    calls: int | None = None  # of the textbook's equal sampling calls; the time is scaled up
    profile: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """seconds: each repeat, of one training step or one whole batch of samples. flops: what the work needed."""

    seconds: list[float]
    tokens: int
    flops: float
    peak_bytes: int
    warm_up: float  # seconds before the first repeat: compiling, capturing
    note: str = ""
    profile: list[tuple[str, int, float]] = field(default_factory=list)  # what ran, how often, milliseconds in all


def run_job(job: Job) -> Result:
    """Measure in a child process."""
    command = [sys.executable, "-m", "unmask.bench.jobs", json.dumps(asdict(job))]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        why = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnmaskError(f"measuring {job.task}, {job.version}, failed: {why}")
    return Result(**json.loads(child.stdout.strip().splitlines()[-1]))
