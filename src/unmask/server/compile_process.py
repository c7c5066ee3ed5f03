"""The process in which constraints of strangers are compiled: each in a process of its own, which ends with its task.

The process that the server starts does no work itself. It waits for a constraint, forks, which is quick as everything
is imported, and ends what it has forked, with all that this has started, when the result is there, the time is over,
nobody wants it any more, or the server is gone, however it went: then the pipe between them is closed.
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

MEMORY = 2 << 30  # that compiling may take besides what is there before it
MAX_RESULT = 1 << 27  # bytes of an automaton
PATIENCE = 3.0  # times its seconds of the processor that a constraint may take by the clock, on a busy machine
NICENESS = 5  # whoever is written for goes first

Task = tuple[int, tuple[Constraint, ...] | None, bool]  # its number, what to compile (None: no more of it), may_end
Outcome = Automaton | UsageError


def too_costly() -> UsageError:
    """What is said of a constraint that was not compiled within its limits."""
    return UsageError("the constraint takes too long or too much memory to prepare: use a simpler one")


def serve(handle: int, seconds: float) -> None:
    """Compile one constraint after another, each within so many seconds of a processor, until the other end of the pipe
    is closed."""
    server = Connection(handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    os.nice(NICENESS)
    with suppress(EOFError, OSError):  # nobody is there any more
        tokenizer = tokenizer_from_json(server.recv())
        server.send("ready")
        while True:
            task: Task = server.recv()
            if task[1] is not None:
                _attend(server, task, tokenizer, seconds)
    os._exit(0)  # at once: there is nothing to put away


def _attend(server: Connection, task: Task, tokenizer: Tokenizer, seconds: float) -> None:
    """One task: its result is passed on, or that there is none."""
    ours, theirs = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        server.close()
        ours.close()
        _work(theirs, task, tokenizer, seconds)
    theirs.close()
    with suppress(OSError):
        os.setpgid(child, child)  # both do it: whoever is first
    result: bytes | None = None
    wanted = True
    try:
        ready = wait([server, ours], timeout=PATIENCE * seconds)
        if ours in ready:
            with suppress(EOFError, OSError):  # it died, for want of memory as a rule, or has made too much
                result = ours.recv_bytes(MAX_RESULT)
        elif server in ready:
            server.recv()  # the one word that can come now: nobody waits any more
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
    """The child and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _work(pipe: Connection, task: Task, tokenizer: Tokenizer, seconds: float) -> NoReturn:
    """In the child: it never comes back."""
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
        except Exception as e:  # it must be logged, but a client cannot fill the log with it
            place = traceback.extract_tb(e.__traceback__)[-1]
            cause = f"{type(e).__name__} in {place.name}, line {place.lineno}"
            print(f"unmask: a constraint could not be prepared: {cause}", file=sys.stderr, flush=True)
            outcome = UsageError("the constraint cannot be prepared: use a simpler one")
        pipe.send(outcome)
    finally:
        os._exit(0)


def limit(memory: int, seconds: int) -> None:
    """An end to this process's memory and CPU time, and to those of whatever it starts. A limit that holds already is
    never raised, which the super-user could do."""
    with suppress(ImportError):  # not on every system: there whoever waits is the only limit
        import resource

        for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds)):
            present = [n for n in resource.getrlimit(kind) if n != resource.RLIM_INFINITY]
            least = min([most, *present])
            with suppress(ValueError, OSError):
                resource.setrlimit(kind, (least, least))


def die_with_parent() -> None:
    """Linux ends this process as soon as the thread that started it ends; elsewhere nothing happens."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _address_space() -> int:
    """Bytes that this process has mapped, libraries included: a limit below would leave it none. 0: not known here."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0
