"""The group of processes that work on one task, and their communication.

They are started by torchrun (or `unmask train --nproc`); a single process is a world of size 1, without overhead.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from unmask.devices import make_current, pick_device
from unmask.distributed.watchdog import Watchdog
from unmask.errors import ModelFolderError, PeerError, UnmaskError, UsageError
from unmask.storage.untrusted import printable

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among its peers.

    >>> World().share(64)
    (0, 64)
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    restarts: int = 0  # how often torchrun has restarted these processes
    watchdog: Watchdog | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the only process that writes files and prints."""
        return self.rank == 0

    def share(self, rows: int) -> tuple[int, int]:
        """The range of rows of a batch that this process computes."""
        if rows % self.size:
            raise UsageError(
                f"a batch of {rows} rows cannot be divided among {self.size} processes: "
                f"give a batch that is a multiple of {self.size}"
            )
        part = rows // self.size
        return self.rank * part, (self.rank + 1) * part

    def sum_(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            with self.together():
                dist.all_reduce(numbers)
        return numbers

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank, on every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.together():
            dist.all_gather_object(values, value)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on the first process and return its value on all; an error is raised on all of them, too."""
        if self.size == 1:
            return make()
        made: list[Any] = [None, None]
        try:
            if self.first:
                made[0] = make()
        except Exception as e:
            made[1] = str(e)
            raise
        finally:
            with self.together():
                dist.broadcast_object_list(made, src=0)
        if made[1] is not None:
            raise PeerError(f"rank {self.rank}: rank 0 failed: {made[1]}")
        return cast(T, made[0])

    def agree(self, work: Callable[[], T]) -> list[T]:
        """The results of all processes, by rank; an error of one is raised by all, so that none waits for another.

        >>> World().agree(lambda: 7)
        [7]
        """
        if self.size == 1:
            return [work()]
        made: T | None = None
        error: Exception | None = None
        try:
            made = work()
        except Exception as e:
            error = e
        said = None if error is None else (isinstance(error, ModelFolderError), printable(error, 400))
        answers = self.gather((made, said))
        if isinstance(error, OSError) and not self.first:  # the first process raises its own unchanged
            raise UnmaskError(printable(error, 400)) from error
        if error is not None:
            raise error
        for rank, (_, other) in enumerate(answers):
            if other is not None:
                raise (ModelFolderError if other[0] else UnmaskError)(f"rank {rank}: {other[1]}")
        answers[self.rank] = (made, None)  # the object itself, not a pickled copy
        return [cast(T, value) for value, _ in answers]

    def barrier(self) -> None:
        """Wait until all processes have arrived."""
        self.gather(None)

    def arm(self) -> None:
        """Start the watchdog's time limit: from here on, a process that takes too long counts as hung."""
        if self.watchdog is not None:
            self.watchdog.armed = True

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wraps every collective operation: processes that hang or have died are reported by rank."""
        if self.watchdog is not None:
            self.watchdog.tick()  # before, not after: waiting processes have ticked, a missing one has not
        try:
            yield
        except RuntimeError as e:  # gloo and NCCL report a lost peer in different words
            if self.size > 1 and _is_peer_failure(e):
                raise PeerError(f"rank {self.rank}: another process is gone, see its own message") from e
            raise


@contextlib.contextmanager
def join_world(device: str | None = None, *, timeout: float = 600.0) -> Iterator[World]:
    """The world that torchrun's environment describes; a world of one without it.

    >>> with join_world("cpu") as world:
    ...     world.size
    1
    """
    size = _number("WORLD_SIZE", 1)
    on = pick_device(device)
    restarts = _number("TORCHELASTIC_RESTART_COUNT", 0)
    if not 0 < timeout < math.inf:
        raise UsageError(f"the time to wait for a process that hangs must be above 0 seconds, got {timeout}")
    if size == 1 or dist.is_initialized():
        make_current(on)
        yield World(device=on, restarts=restarts) if size == 1 else _member(on, restarts, None)
        return
    backend = "gloo"
    if on.type == "cuda":
        on = torch.device("cuda", _number("LOCAL_RANK", 0))
        if on.index >= torch.cuda.device_count():
            raise UsageError(f"process {on.index} of this machine has no GPU: it has {torch.cuda.device_count()}")
        make_current(on)
        backend = "cpu:gloo,cuda:nccl"
    store, rank = _join(backend, restarts, datetime.timedelta(seconds=2 * timeout + 60))
    atexit.unregister(_end_threads)
    atexit.register(_end_threads)
    watchdog = Watchdog(store, rank, size, timeout)
    try:
        with watchdog:
            world = _member(on, restarts, watchdog)
            yield world
            with contextlib.suppress(PeerError):  # leaving early would close connections that others still use
                world.barrier()
    finally:
        with contextlib.suppress(Exception):  # fails if a peer has died, which no longer matters
            dist.destroy_process_group()


def _join(backend: str, restarts: int, limit: datetime.timedelta) -> tuple[distributed_c10d.Store, int]:
    """Join the process group; return the store that all processes share, and this process's rank."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and _number("GROUP_WORLD_SIZE", 1) > 1 and _number("TORCHELASTIC_MAX_RESTARTS", 0):
        # Machines count their restarts separately, and the count is the only way to tell new addresses from old ones.
        raise UsageError(
            "after a restart processes of several machines do not find each other in torchrun's own store: "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, on every machine"
        )
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UsageError(
                f"WORLD_SIZE is set and {name} is not: start with torchrun or --nproc, or unset WORLD_SIZE"
            )
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        if shared:  # this store survives a restart, with the addresses of dead processes
            store = distributed_c10d.PrefixStore(f"unmask/{restarts}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError) as e:
        why = (str(e).strip().splitlines() or ["no reason given"])[0]
        raise PeerError(f"rank {os.environ['RANK']}: could not join the other processes: {printable(why, 200)}") from e
    # From here on the watchdog reports missing processes, which a collective's own timeout cannot; and before the first
    # step one process may read a corpus for hours while the others wait.
    distributed_c10d._set_pg_timeout(datetime.timedelta(days=7))
    return store, rank


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        raise UsageError(
            f"{name}={printable(os.environ[name], 40)} is no number: torchrun sets it, or nobody"
        ) from None


def _end_threads() -> None:
    """Let the threads of torch's process groups end before the interpreter shuts down, since using it then aborts.

    A group's threads end with the group, but meshes, DDP and FSDP hold groups in reference cycles, so the garbage
    collector must run. Threads of a group that is still referenced only wait for the GIL to release the last exchanged
    objects; they get it while this thread sleeps.
    """
    gc.collect()
    time.sleep(0.05)


def _member(on: torch.device, restarts: int, watchdog: Watchdog | None) -> World:
    world = World(dist.get_rank(), dist.get_world_size(), on, restarts, watchdog)
    return replace(world, restarts=max(world.gather(restarts)))  # machines count theirs separately


def _is_peer_failure(error: RuntimeError) -> bool:
    words = ("connection closed", "connection reset", "gloo", "nccl", "broken pipe", "timed out", "socket")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
