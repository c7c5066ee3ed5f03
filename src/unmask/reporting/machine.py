"""The machine and the version with which a report is written."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import unmask


def machine() -> str:
    """Processor, GPU and versions, in one line."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    processor = f"{platform.machine()}, {os.cpu_count()} cores"
    parts = [
        processor,
        *devices,
        platform.system(),
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
    ]
    return ", ".join(parts)


def commit() -> str:
    """The version, and the commit if the package is a checkout.

    >>> commit().startswith(unmask.__version__)
    True
    """
    root = Path(unmask.__file__).parents[2]
    if not (root / ".git").exists():
        return unmask.__version__
    try:
        said = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or no permission
        return unmask.__version__
    return f"{unmask.__version__}, commit {said.stdout.strip()}"
