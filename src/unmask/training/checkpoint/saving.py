"""When checkpoints are written: at once, or in the background from a copy in host memory."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.config import RunConfig
from unmask.distributed.world import World
from unmask.training.checkpoint.files import check_room, save_checkpoint

Groups = Mapping[str, Mapping[str, Tensor]]


class Saver:
    """Saves a run's checkpoints. In the background one is in flight at most: the next waits for it.

    What fails in the background is raised by the next call, as if it had failed there. The thread is no daemon: a
    process that ends waits for it.

    >>> import tempfile
    >>> saver = Saver(Path(tempfile.mkdtemp()), keep=2, background=True)
    >>> saver.save(250, {"model": {"w": torch.ones(2)}}, {"loss": 1.5}, best=False)
    >>> [(step, path.name) for step, path in saver.finished(wait=True)]
    [(250, 'step-00000250')]
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: int,
        keep_every: int = 0,
        background: bool = False,
        sharers: World | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.keep, self.keep_every = keep, keep_every
        self.background = background
        self.sharers = sharers  # who all save together, each its share; None: one process saves
        self._host: dict[tuple[str, str], Tensor] = {}  # used again by every save: pages are dear to get
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.failed: Exception | None = None  # a save that nobody waited for any more
        self._durable: deque[tuple[int, Path]] = deque()

    def save(self, step: int, tensors: Groups, state: Mapping[str, Any], *, best: bool) -> None:
        """Write a checkpoint, or begin to; the tensors and the state may change once this returns."""
        self.wait()
        if not self.background:
            self._write(step, tensors, state, best, None)
            self.wait()
            return
        check_room(self.run_dir, step, tensors)  # said at this step rather than at the next
        copies, copied = self._to_host(tensors)
        arguments = (step, copies, copy.deepcopy(dict(state)), best, copied)
        self._thread = threading.Thread(target=self._write, args=arguments, name=f"save-{step}", daemon=False)
        self._thread.start()

    def finished(self, *, wait: bool = False) -> Iterator[tuple[int, Path]]:
        """Step and folder of every checkpoint that became durable since the last call."""
        if wait or (self._thread is not None and not self._thread.is_alive()):
            self.wait()
        while self._durable:
            yield self._durable.popleft()

    def wait(self) -> None:
        """Until nothing is in flight; raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> Iterator[tuple[int, Path]]:
        """The last of `finished`, for a run that ends by an error of its own: that one is raised, a save's is kept in
        `failed`."""
        try:
            self.wait()
        except Exception as error:
            self.failed = error
        return self.finished()

    def _write(
        self, step: int, tensors: Groups, state: Mapping[str, Any], best: bool, copied: torch.cuda.Event | None
    ) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            how: dict[str, Any] = {"keep": self.keep, "keep_every": self.keep_every, "best": best}
            if self.sharers is None:
                path = save_checkpoint(self.run_dir, step, tensors, state, **how)
            else:
                from unmask.training.checkpoint.sharded import save_sharded  # imports much of torch.distributed

                path = save_sharded(self.run_dir, step, tensors, state, world=self.sharers, **how)
            self._durable.append((step, path))
        except BaseException as error:
            self._error = error

    def _to_host(self, tensors: Groups) -> tuple[Groups, torch.cuda.Event | None]:
        """Copies in memory of our own. A GPU copies in its own time: before any step that comes after, and unwaited."""
        copies: dict[str, dict[str, Tensor]] = {}
        on_gpu = False
        for group, named in tensors.items():
            copies[group] = {}
            for name, tensor in named.items():
                place = self._host.get((group, name))
                if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                    place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                    self._host[group, name] = place
                copies[group][name] = place.copy_(tensor.detach(), non_blocking=True)
                on_gpu |= tensor.is_cuda
        if not on_gpu:
            return copies, None
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return copies, copied


def make_saver(config: RunConfig, world: World, kind: str) -> Saver:
    """The saver of a run whose network is spread over the processes as `kind` says.

    >>> make_saver(RunConfig(), World(), "alone").sharers is None
    True
    """
    auto = kind == "fsdp" and not config.async_save
    sharded = auto if config.save_as == "auto" else config.save_as == "sharded"
    return Saver(
        Path(config.out),
        keep=config.keep,
        keep_every=config.keep_every,
        background=config.async_save,
        sharers=world if sharded else None,
    )
