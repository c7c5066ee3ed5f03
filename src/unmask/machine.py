"""What a number is to be repeated with: the command, the version with its commit, and the machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import unmask

# `git describe --dirty` would write the index, and so collide with a commit that somebody makes meanwhile.
STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no")


def machine(*, gpus: bool = True) -> str:
    """Processor, GPUs and versions, in one line. Naming the GPUs makes this process open one of them."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if gpus else []
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
    """The version, and the commit if the package is a checkout, which this only reads.

    >>> commit().startswith(unmask.__version__)
    True
    """
    root = Path(unmask.__file__).parents[2]
    if not (root / ".git").exists():
        return unmask.__version__
    try:
        said = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *STATUS],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, or no permission
        return unmask.__version__
    lines = said.stdout.splitlines()
    found = next((line.split()[2][:12] for line in lines if line.startswith("# branch.oid ")), "unknown")
    changed = any(not line.startswith("#") for line in lines)
    return f"{unmask.__version__}, commit {found}{'-dirty' if changed else ''}"


def made_with(words: Sequence[str] = ()) -> dict[str, str]:
    """The version and the machine of this process, and its command if it has one. words: those after `unmask`.

    GPUs are named only if this process has used one: a run on the CPU must not open them.

    >>> made_with(["eval", "runs/my run"])["command"]
    "unmask eval 'runs/my run'"
    """
    command = {"command": shlex.join(["unmask", *words])} if words else {}
    return {**command, "unmask": commit(), "machine": machine(gpus=torch.cuda.is_initialized())}  # type: ignore[no-untyped-call]


def made_by_all(before: object, now: list[dict[str, str]]) -> list[Any]:
    """What `made_with` gave to the earlier parts of a run, with this part's added unless it is the same as the last.

    >>> made_by_all([{"unmask": "0.1.0"}], [{"unmask": "0.2.0"}])
    [{'unmask': '0.1.0'}, {'unmask': '0.2.0'}]
    >>> made_by_all(None, [{"unmask": "0.2.0"}])
    [{'unmask': '0.2.0'}]
    """
    parts = before if isinstance(before, list) else []
    return parts if now == parts[-1:] else [*parts, *now]


def commands_of(made: Iterable[Any]) -> list[str]:
    """The commands that `made_with` has kept, each once; whatever else files hold there is left out.

    >>> commands_of([{"command": "unmask eval a"}, {"command": "unmask eval a"}, None])
    ['unmask eval a']
    """
    kept = [one.get("command") for one in made if isinstance(one, dict)]
    return list(dict.fromkeys(command for command in kept if isinstance(command, str)))


def machines_of(made: Iterable[Any]) -> list[str]:
    """The versions and machines that `made_with` has kept, each once, as sentences.

    >>> machines_of([{"unmask": "0.1.0", "machine": "x86_64, 2 cores"}, {"unmask": "0.1.0"}])
    ['Made with unmask 0.1.0 on x86_64, 2 cores.']
    """
    kept = [(one.get("unmask"), one.get("machine")) for one in made if isinstance(one, dict)]
    return list(
        dict.fromkeys(f"Made with unmask {version} on {where}." for version, where in kept if version and where)
    )
