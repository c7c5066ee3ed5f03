"""Constraints of requests are compiled in a separate process, with limits on time and memory.

A short pattern can require an automaton of millions of states, which must not block the server. Results and refusals
are cached; anything else is compiled one at a time, while a few wait.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from multiprocessing.connection import Connection, Pipe
from typing import Any
from weakref import WeakValueDictionary

from unmask import plugin_modules
from unmask.constraints import Constraint
from unmask.constraints.automaton import Automaton
from unmask.data.tokenizers import Tokenizer
from unmask.errors import Public, UnmaskError, UsageError
from unmask.server.compile_process import PATIENCE, Outcome, too_costly

SECONDS = 10.0  # CPU seconds per constraint
START_SECONDS = 60.0  # for the process to start
END_SECONDS = 5.0  # for it to stop by itself
MEMORY = 1 << 29  # bytes of all automata, in use or cached
REFUSALS = 256  # refusals to cache
REFUSED_SECONDS = 600.0  # for this long: a busy machine may have more time later
QUEUE = 8  # constraints that may wait while another one is compiled
LOOK = 0.1  # seconds between checks whether the client still waits


class Busy(UnmaskError):
    """Too many requests at once; a later attempt may succeed."""


class Compiler:
    """Constraint → automaton, one at a time, for one tokenizer.

    >>> compiler = Compiler(model.tokenizer)  # doctest: +SKIP
    >>> compiler([unmask.constraints.Regex(pattern="[0-9]+")], may_end=False).num_states  # doctest: +SKIP
    2
    """

    def __init__(self, tokenizer: Tokenizer, *, seconds: float = SECONDS) -> None:
        self.tokenizer, self.seconds = tokenizer, seconds
        self._lock = threading.Lock()  # held while compiling
        self._memory = threading.Lock()  # for the cache; never held for long
        self._alive: WeakValueDictionary[bytes, Automaton] = WeakValueDictionary()
        self._kept: OrderedDict[bytes, Automaton] = OrderedDict()  # cached automata that are kept even if unused
        self._refused: OrderedDict[bytes, tuple[UsageError, float]] = OrderedDict()
        self._waiting = 0
        self._numbers = itertools.count(1)
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def __call__(
        self,
        constraints: Constraint | Sequence[Constraint],
        *,
        may_end: bool,
        check: Callable[[], None] = lambda: None,
    ) -> Automaton:
        """check: called now and then while waiting; it raises if nobody waits for this result any more."""
        several = (constraints,) if isinstance(constraints, Constraint) else tuple(constraints)
        for constraint in several:
            _check_importable(type(constraint))
        # Contains every option, also unhashable ones; long keys are replaced by a digest.
        key = hashlib.sha256(repr((several, may_end)).encode("utf-8", "surrogatepass")).digest()
        check()
        if (known := self._known(key)) is not None:
            return known
        with self._turn(check):
            if (known := self._known(key)) is not None:  # another request asked for the same
                return known
            try:
                automaton = self._compile(several, may_end, check)
            except UsageError as e:
                self._refuse(key, e)
                raise
            self._keep(key, automaton)
            return automaton

    # --- cache ---

    def _known(self, key: bytes) -> Automaton | None:
        with self._memory:
            error, until = self._refused.get(key, (None, 0.0))
            if error is not None and time.monotonic() < until:
                raise copy(error)
            automaton = self._alive.get(key)
            if automaton is not None:
                self._kept[key] = automaton
                self._kept.move_to_end(key)
            return automaton

    def _keep(self, key: bytes, automaton: Automaton) -> None:
        """Cache an automaton within the memory limit: the least recently requested unused ones are dropped first."""
        size = automaton.cost(1).shared_bytes
        if size > MEMORY:
            raise too_costly()
        with self._memory:
            while self._kept and self._bytes() + size > MEMORY:
                self._kept.popitem(last=False)
            if self._bytes() + size > MEMORY:
                raise Busy("constraints of other requests take all the memory that there is for them: try again later")
            self._alive[key] = self._kept[key] = automaton

    def _bytes(self) -> int:
        return sum(automaton.cost(1).shared_bytes for automaton in list(self._alive.values()))

    def _refuse(self, key: bytes, error: UsageError) -> None:
        with self._memory:
            self._refused[key] = copy(error), time.monotonic() + REFUSED_SECONDS
            self._refused.move_to_end(key)
            while len(self._refused) > REFUSALS:
                self._refused.popitem(last=False)

    # --- queue ---

    @contextmanager
    def _turn(self, check: Callable[[], None]) -> Iterator[None]:
        with self._memory:
            if self._waiting > QUEUE:  # one of them is being compiled, not waiting
                raise Busy("too many constraints wait to be prepared: try again later")
            self._waiting += 1
        try:
            while not self._lock.acquire(timeout=LOOK):
                self._check(check)
            try:
                self._check(check)
                yield
            finally:
                self._lock.release()
        finally:
            with self._memory:
                self._waiting -= 1

    def _check(self, check: Callable[[], None]) -> None:
        check()
        if self._closed:
            raise Busy("the server is stopping")

    # --- the process ---

    def _compile(self, several: tuple[Constraint, ...], may_end: bool, check: Callable[[], None]) -> Automaton:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._pipe is not None
        number = next(self._numbers)
        try:
            self._pipe.send((number, several, may_end))
            outcome: Outcome | None = None
            while self._answer(PATIENCE * self.seconds + END_SECONDS, check):
                answered = self._pipe.recv()  # an abandoned earlier task has another number
                outcome = self._pipe.recv()
                if answered == number:
                    break
                outcome = None
        except (EOFError, OSError):  # it died
            outcome = None
        except BaseException:  # nobody waits any more
            with suppress(OSError):
                self._pipe.send((number, None, False))
            raise
        if outcome is None:
            self._end()
            raise too_costly()
        if isinstance(outcome, UsageError):
            raise outcome
        return outcome

    def _answer(self, seconds: float, check: Callable[[], None]) -> bool:
        """Whether an answer arrives within `seconds`."""
        assert self._pipe is not None
        until = time.monotonic() + seconds
        while not self._pipe.poll(min(LOOK, seconds)):
            self._check(check)
            if time.monotonic() >= until:
                return False
        return True

    def _start(self) -> None:
        self._end()
        self._pipe, theirs = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; "  # it gets the same import path
        code += f"from unmask.plugin_modules import load_plugins; load_plugins({plugin_modules.loaded!r}); "
        code += f"from unmask.server.compile_process import serve; serve({theirs.fileno()}, {self.seconds})"
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # because it forks
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | one_thread,
            start_new_session=True,  # signals to the server's group are handled by the server
        )
        theirs.close()
        ready: Any = False
        with suppress(EOFError, OSError):  # it died
            self._pipe.send(self.tokenizer.to_json())
            ready = self._answer(START_SECONDS, lambda: None) and self._pipe.recv()
        if not ready:
            self._process.kill()  # it has not started anything
            self._end()
            raise Busy("constraints cannot be prepared now: try again later")

    def _end(self) -> None:
        """Close the pipe, upon which the process stops with everything it has started."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def close(self) -> None:
        """Stop the process. Waiting calls get an error."""
        self._closed = True
        with self._lock:
            self._end()


def _check_importable(cls: type[Constraint]) -> None:
    """Refuse a class that the other process cannot import: one defined in a notebook, a script or a function."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise UsageError(
            "the constraint {name} is in no module: put its class into a file, and give it to the server by --plugin",
            name=Public(cls.__name__),
        )
