"""Constraints of strangers are compiled in a process of their own, with an end to its time and memory.

A short pattern can ask for an automaton of millions of states; whoever waits for it must not be the server.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from unmask.constraints import Constraint
from unmask.constraints._automaton import Automaton, compile_constraints
from unmask.errors import UnmaskError, UsageError
from unmask.tokens import Tokenizer, tokenizer_from_json

SECONDS = 10.0
START_SECONDS = 60.0  # for their process to begin
MEMORY = 2 << 30
KEPT = 16  # automata that are remembered
LOOK = 0.1  # seconds between two looks whether somebody still waits


class Compiler:
    """Constraint → automaton, one at a time, for one tokenizer.

    >>> compiler = Compiler(model.tokenizer)  # doctest: +SKIP
    >>> compiler([unmask.constraints.Regex(pattern="[0-9]+")], may_end=False).num_states  # doctest: +SKIP
    2
    """

    def __init__(self, tokenizer: Tokenizer, *, seconds: float = SECONDS) -> None:
        self.tokenizer, self.seconds = tokenizer, seconds
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bool], Automaton] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def __call__(
        self,
        constraints: Constraint | Sequence[Constraint],
        *,
        may_end: bool,
        check: Callable[[], None] = lambda: None,
    ) -> Automaton:
        """check: asked now and then while others are served; it raises when nobody waits for this one any more."""
        several = (constraints,) if isinstance(constraints, Constraint) else tuple(constraints)
        key = (repr(several), may_end)  # every option is in it, also one that cannot be a key itself
        while not self._lock.acquire(timeout=LOOK):
            check()
        try:
            check()
            if key not in self._kept:
                self._kept[key] = self._compile(several, may_end)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]
        finally:
            self._lock.release()

    def _compile(self, several: tuple[Constraint, ...], may_end: bool) -> Automaton:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((several, may_end))
            found = self._pipe.recv() if self._pipe.poll(self.seconds) else None
        except (EOFError, OSError):  # it died, for want of memory as a rule
            found = None
        if found is None:
            self.close()
            raise UsageError("the constraint takes too long or too much memory to prepare: use a simpler one")
        if isinstance(found, UnmaskError):
            raise found
        assert isinstance(found, Automaton)
        return found

    def _start(self) -> None:
        self.close()
        self._pipe, theirs = Pipe()
        code = f"from unmask.server.compiling import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            self._pipe.send(self.tokenizer.to_json())
            ready = self._pipe.poll(START_SECONDS) and self._pipe.recv()
        except (EOFError, OSError):  # it died
            ready = False
        if not ready:
            self.close()
            raise UnmaskError("constraints cannot be prepared now: try again later")

    def close(self) -> None:
        """End the process; the next constraint starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()


def serve(handle: int) -> None:
    """The process: reads constraints until nobody is there any more."""
    pipe = Connection(handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    with contextlib.suppress(ImportError):  # where the system knows no such limit, time is the only one
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tokenizer = tokenizer_from_json(pipe.recv())
    pipe.send("ready")
    while True:
        try:
            several, may_end = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            found: Any = compile_constraints(several, tokenizer, may_end=may_end)
        except UnmaskError as e:
            found = UsageError(str(e))
        except MemoryError:
            return
        except Exception as e:  # it must be seen, but a client cannot fill the log with it
            place = traceback.extract_tb(e.__traceback__)[-1]
            told = f"{type(e).__name__} in {place.name}, line {place.lineno}"
            print(f"unmask: a constraint could not be prepared: {told}", file=sys.stderr, flush=True)
            found = UsageError("the constraint cannot be prepared: use a simpler one")
        pipe.send(found)
