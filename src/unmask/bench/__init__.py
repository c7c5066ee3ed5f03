"""Speed and memory of training and sampling, against a plain textbook version in the same run.

Each measurement runs in a separate process, so that peak memory and compiled code do not carry over.
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
    """One measurement. `peak` measures only the device's matrix product, the reference for MFU."""

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
    calls: int | None = None  # how many of the textbook's equal sampling calls to time; the time is scaled up
    profile: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """seconds: of each repeat, for one training step or one batch of samples. flops: the operations required."""

    seconds: list[float]
    tokens: int
    flops: float
    peak_bytes: int
    warm_up: float  # seconds before the first repeat: compiling, capturing
    note: str = ""
    profile: list[tuple[str, int, float]] = field(default_factory=list)  # name, count, total milliseconds


def run_job(job: Job) -> Result:
    """Measure in a child process."""
    command = [sys.executable, "-m", "unmask.bench.jobs", json.dumps(asdict(job))]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        why = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnmaskError(f"measuring {job.task}, {job.version}, failed: {why}")
    return Result(**json.loads(child.stdout.strip().splitlines()[-1]))
