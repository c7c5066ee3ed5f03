"""Copies of a run's tensors in host memory, from which a checkpoint is written while the run continues."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

Groups = Mapping[str, Mapping[str, Tensor]]


class HostCopy:
    """Host memory for one copy, reused for the next.

    >>> live = {"model": {"w": torch.ones(2)}}
    >>> copies, _ = HostCopy().copy(live)
    >>> live["model"]["w"].zero_(), copies["model"]["w"]
    (tensor([0., 0.]), tensor([1., 1.]))
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, str], Tensor] = {}

    def reserve(self, tensors: Groups) -> None:
        """Allocate the memory now: pinning it takes far longer than the copy."""
        for group, named in tensors.items():
            for name, tensor in named.items():
                self._place(group, name, tensor)

    def _place(self, group: str, name: str, tensor: Tensor) -> Tensor:
        place = self.tensors.get((group, name))
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.tensors[group, name] = place
        return place

    def copy(self, tensors: Groups) -> tuple[Groups, torch.cuda.Event | None]:
        """The copies, and an event for their completion. A GPU copies asynchronously, before any later step."""
        copies: dict[str, dict[str, Tensor]] = {}
        on_gpu = False
        for group, named in tensors.items():
            copies[group] = {}
            for name, tensor in named.items():
                copies[group][name] = self._place(group, name, tensor).copy_(tensor.detach(), non_blocking=True)
                on_gpu |= tensor.is_cuda
        if not on_gpu:
            return copies, None
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return copies, copied


def fits(tensors: Groups) -> bool:
    """Whether host memory has room for twice the size of a copy, since pinned memory is allocated in powers of two.

    >>> fits({"model": {"w": torch.ones(2)}})
    True
    """
    needed = sum(tensor.numel() * tensor.element_size() for named in tensors.values() for tensor in named.values())
    return 2 * needed <= available_memory()


def available_memory(root: Path = Path("/")) -> float:
    """Bytes that this process may still allocate, by the limits of system and container; infinite if unknown.

    >>> available_memory() > 0
    True
    """
    return min(_of_system(root / "proc"), _of_container(root / "sys/fs/cgroup"))


def _of_system(folder: Path) -> float:
    return 1024 * _number(folder / "meminfo", r"^MemAvailable:\s+(\d+) kB$")


def _of_container(folder: Path) -> float:
    limit, used = (_number(folder / f"memory.{name}", r"^(\d+)$") for name in ("max", "current"))
    if limit == float("inf") or used == float("inf"):
        return float("inf")
    cached = _number(folder / "memory.stat", r"^inactive_file (\d+)$")  # page cache, released when memory is needed
    return limit - used + (0.0 if cached == float("inf") else cached)


def _number(path: Path, pattern: str) -> float:
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return float("inf")
    return float("inf") if found is None else float(found[1])
