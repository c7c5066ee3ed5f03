"""The process that compiles untrusted constraints: each in a forked child, which ends with its task.

The process that the server starts does no work itself. It waits for a constraint and forks, which is fast because
everything is already imported. It kills the child, with everything that the child has started, when the result is
there, the time is over, nobody waits any more, or the server is gone: then the pipe between them is closed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NoReturn

from unmask.constraints import Constraint
from unmask.constraints.automaton import Automaton, compile_constraints
from unmask.data.tokenizers import Tokenizer, tokenizer_from_json
from unmask.errors import UnmaskError, UsageError

MEMORY = 2 << 30  # memory that compiling may use in addition to what is already in use
MAX_RESULT = 1 << 27  # bytes of an automaton
PATIENCE = 3.0  # wall-clock limit as a multiple of the CPU seconds, for a busy machine
NICENESS = 5  # generation has priority

Task = tuple[int, tuple[Constraint, ...] | None, bool]  # number, what to compile (None: cancel), may_end
Outcome = Automaton | UsageError


def too_costly() -> UsageError:
    """The error for a constraint that was not compiled within its limits."""
    return UsageError("the constraint takes too long or too much memory to prepare: use a simpler one")


def serve(handle: int, seconds: float) -> None:
    """Compile one constraint after another, each within `seconds` of CPU time, until the other end of the pipe is
    closed."""
    server = Connection(handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server stops this process itself
    os.nice(NICENESS)
    with suppress(EOFError, OSError):  # the server is gone
        tokenizer = tokenizer_from_json(server.recv())
        server.send("ready")
        while True:
            task: Task = server.recv()
            if task[1] is not None:
                _attend(server, task, tokenizer, seconds)
    os._exit(0)  # immediately: there is nothing to clean up


def _attend(server: Connection, task: Task, tokenizer: Tokenizer, seconds: float) -> None:
    """Run one task and send its result, or the information that there is none."""
    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        server.close()
        ours.close()
        _work(theirs, task, tokenizer, seconds)
    theirs.close()
    with suppress(OSError):
        os.setpgid(child, child)  # parent and child both do this, to avoid a race
    result: bytes | None = None
    wanted = True
    try:
        ready = wait([server, ours], timeout=PATIENCE * seconds)
        if ours in ready:
            with suppress(EOFError, OSError):  # it died, usually out of memory, or its result is too large
                result = ours.recv_bytes(MAX_RESULT)
        elif server in ready:
            server.recv()  # only a cancellation can arrive here
            wanted = False
    finally:
        _end(child)
        ours.close()
    if wanted:
        server.send(task[0])
        if result is None:
            server.send(too_costly())
        else:
            server.send_bytes(result)


def _end(child: int) -> None:
    """Kill the child and everything that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _work(pipe: Connection, task: Task, tokenizer: Tokenizer, seconds: float) -> NoReturn:
    """Runs in the child and never returns."""
    try:
        os.setpgid(0, 0)
        die_with_parent()
        limit(_address_space() + MEMORY, math.ceil(seconds))
        _, several, may_end = task
        assert several is not None
        try:
            outcome: Outcome = compile_constraints(several, tokenizer, may_end=may_end)
        except UsageError as e:
            outcome = e
        except UnmaskError as e:
            outcome = UsageError("{reason}", reason=e)
        except MemoryError:
            outcome = too_costly()
        except Exception as e:  # must be logged, but a client must not be able to fill the log
            place = traceback.extract_tb(e.__traceback__)[-1]
            cause = f"{type(e).__name__} in {place.name}, line {place.lineno}"
            print(f"unmask: a constraint could not be prepared: {cause}", file=sys.stderr, flush=True)
            outcome = UsageError("the constraint cannot be prepared: use a simpler one")
        pipe.send(outcome)
    finally:
        os._exit(0)


def limit(memory: int, seconds: int) -> None:
    """Limit this process's memory and CPU time, and that of its children.

    An existing lower limit is never raised, although root could.
    """
    with suppress(ImportError):  # not available everywhere: there only the waiting process enforces a limit
        import resource

        for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds)):
            present = [n for n in resource.getrlimit(kind) if n != resource.RLIM_INFINITY]
            least = min([most, *present])
            with suppress(ValueError, OSError):
                resource.setrlimit(kind, (least, least))


def die_with_parent() -> None:
    """Make Linux kill this process as soon as the thread that started it ends; no effect elsewhere."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _address_space() -> int:
    """Bytes mapped by this process, including libraries, as the base for a limit. 0: unknown on this system."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0
