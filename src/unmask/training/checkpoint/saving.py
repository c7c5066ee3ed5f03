"""Writing a run's state: synchronously, or in a background thread while the run continues."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.config import RunConfig
from unmask.distributed.world import World
from unmask.training.checkpoint.files import check_room, save_checkpoint
from unmask.training.checkpoint.host_copy import HostCopy, fits

Groups = Mapping[str, Mapping[str, Tensor]]
WriteModel = Callable[[Groups], None]


@dataclass(frozen=True)
class _Job:
    """The save of one step: the model's folder if it is the best so far, then the checkpoint.

    One thread writes them in this order: a checkpoint records the best bound so far, so that model must exist first.
    """

    step: int
    tensors: Groups
    state: Mapping[str, Any]
    best: bool
    write_model: WriteModel | None
    copied: torch.cuda.Event | None = None  # when the device has copied the tensors
    place: HostCopy | None = None  # where to


class Saver:
    """Saves a run, synchronously or in the background.

    In the background one save is written at a time, and one more may wait. A newer save replaces the waiting one, but
    the best is replaced only by a better one, and a milestone never. A background save returns as soon as the copy is
    requested. It waits for the disk only if a kill would lose more than two intervals, if the waiting save must not be
    replaced, or if memory has no room for a second copy.

    An error in the background is raised by the next call, and later saves are not written. The thread is not a daemon:
    a process that ends waits for it.

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
        every: int = 1,
        background: bool = False,
        sharers: World | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.keep, self.keep_every = keep, keep_every
        self.every = every  # steps from one save to the next
        self.background = background
        self.sharers = sharers  # the processes that save together, each its shard; None: one process saves
        self.durable = 0  # the newest step that is safely on disk
        self.failed: Exception | None = None  # the error of a save at the end of a failed run
        self._changed = threading.Condition()  # guards everything below
        self._at_work = False
        self._writing: _Job | None = None
        self._waiting: _Job | None = None
        self._places: list[HostCopy] = []  # reused by every save: pinned pages are slow to allocate
        self._error: BaseException | None = None
        self._finished: deque[tuple[int, Path]] = deque()

    def save(
        self,
        step: int,
        tensors: Groups,
        state: Mapping[str, Any],
        *,
        best: bool,
        write_model: WriteModel | None = None,
    ) -> None:
        """Write a checkpoint, or begin to; the tensors and the state may be changed once this returns.

        write_model: a function that writes the model's folder from the given tensors, called before the checkpoint.
        """
        if not (self.background and self._save_later(step, tensors, state, best, write_model)):
            self.wait()
            self._write(_Job(step, tensors, state, best, write_model))
            self._raise()

    def prepare(self, tensors: Groups) -> threading.Thread | None:
        """Allocate memory for a copy of these tensors in the background, so that the first save need not wait."""
        if not self.background or not fits(tensors):
            return None
        place = HostCopy()

        def reserve() -> None:
            with contextlib.suppress(RuntimeError):  # if allocation fails now, the save tries again
                place.reserve(tensors)
                with self._changed:
                    self._places.append(place)

        thread = threading.Thread(target=reserve, name="save-memory", daemon=True)
        thread.start()
        return thread

    def finished(self, *, wait: bool = False) -> Iterator[tuple[int, Path]]:
        """Step and folder of every checkpoint that became durable since the last call."""
        if wait:
            self.wait()
        self._raise()
        while self._finished:
            yield self._finished.popleft()

    def wait(self) -> None:
        """Wait until no save is in progress; raises the error of a failed one."""
        self._wait_while(lambda: self._at_work)
        self._raise()

    def close(self) -> Iterator[tuple[int, Path]]:
        """The last of `finished`, for a run that ends with its own error: an error of a save is kept in `failed`."""
        try:
            self.wait()
        except Exception as error:
            self.failed = error
        return self.finished()

    # --- in the background ---

    def _save_later(
        self, step: int, tensors: Groups, state: Mapping[str, Any], best: bool, write_model: WriteModel | None
    ) -> bool:
        """Copy the tensors and hand them to the thread; False if there is no memory for a copy."""
        self._raise()
        check_room(self.run_dir, step, tensors)  # raises at this step rather than at the next
        with self._changed:
            if self._waiting is not None and self._gives_way(self._waiting, best=best):
                self._waiting = None
        self._wait_while(lambda: self._waiting is not None)
        place = self._place_for(tensors)
        if place is None:
            return False
        copies, copied = place.copy(tensors)
        with self._changed:
            self._waiting = _Job(step, copies, copy.deepcopy(dict(state)), best, write_model, copied, place)
            if not self._at_work:
                self._at_work = True
                threading.Thread(target=self._work, name="save", daemon=False).start()
        # Everything saved up to one interval ago is durable, so a kill before the next save loses at most two.
        due = (step // self.every - 1) * self.every
        self._wait_while(lambda: self._at_work and self.durable < due)
        return True

    def _gives_way(self, job: _Job, *, best: bool) -> bool:
        """Whether a waiting save may be dropped in favour of a newer one."""
        milestone = self.keep_every and job.step % self.keep_every == 0
        return not milestone and (best or not job.best)

    def _place_for(self, tensors: Groups) -> HostCopy | None:
        """Free host memory for a copy; waits for memory in use if there is no room for more."""
        with self._changed:
            used = self._writing.place if self._writing else None
            free = [place for place in self._places if place is not used]
        if free:
            return free[0]
        if fits(tensors):
            place = HostCopy()
            with self._changed:
                self._places.append(place)
            return place
        self.wait()
        return next(iter(self._places), None)

    def _work(self) -> None:
        while True:
            with self._changed:
                job, self._waiting = self._waiting, None
                self._writing = job if self._error is None else None
                self._at_work = self._writing is not None
                self._changed.notify_all()
                if self._writing is None:
                    return
            self._write(self._writing)

    def _write(self, job: _Job) -> None:
        try:
            if job.copied is not None:
                job.copied.synchronize()
            if job.write_model is not None:
                job.write_model(job.tensors)
            how: dict[str, Any] = {"keep": self.keep, "keep_every": self.keep_every, "best": job.best}
            if self.sharers is None:
                path = save_checkpoint(self.run_dir, job.step, job.tensors, job.state, **how)
            else:
                from unmask.training.checkpoint.sharded import save_sharded  # imports much of torch.distributed

                path = save_sharded(self.run_dir, job.step, job.tensors, job.state, world=self.sharers, **how)
            self.durable = job.step
            self._finished.append((job.step, path))
        except BaseException as error:
            self._error = error

    def _wait_while(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not condition())

    def _raise(self) -> None:
        """Raise a background error, once."""
        with self._changed:
            error = None if self._at_work else self._error
            if error is not None:
                self._error = None
                raise error


def make_saver(config: RunConfig, world: World, kind: str) -> Saver:
    """The saver of a run whose network is distributed as `kind` says.

    Unless the recipe sets it, saves of a single process on a GPU are written in the background. On a CPU, writing would
    slow down the steps by as much time as it saves between them.

    >>> [make_saver(RunConfig(async_save=how), World(), "alone").background for how in (None, True)]
    [False, True]
    """
    sharded = config.save_as == "sharded" or (config.save_as == "auto" and kind == "fsdp" and not config.async_save)
    on_gpu = world.device.type == "cuda"
    background = on_gpu and not sharded if config.async_save is None else config.async_save
    return Saver(
        Path(config.out),
        keep=config.keep,
        keep_every=config.keep_every,
        # A background save is not durable yet, so saves are made twice as often, and a kill loses no more.
        every=max(1, config.save_every // 2) if background else config.save_every,
        background=background,
        sharers=world if sharded else None,
    )
