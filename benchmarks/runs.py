"""The state of a training run, read from its folder."""

from __future__ import annotations

from pathlib import Path

from unmask.config import load_config
from unmask.errors import UnmaskError
from unmask.training.checkpoint.files import newest, verify, without_tensors


def at_its_end(run: Path) -> bool:
    """Whether it has made and saved its last step, so that there is nothing to go on with.

    >>> at_its_end(Path("no/such/run"))
    False
    """
    try:
        last = newest(run, lambda path: without_tensors(path, *verify(path)))
        return last is not None and last.step >= load_config(run).steps
    except UnmaskError:
        return False
