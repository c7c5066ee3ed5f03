"""Constraints of strangers are compiled in a process of their own, with an end to its time and memory.

A short pattern can ask for an automaton of millions of states; whoever waits for it must not be the server.
"""

from __future__ import annotations

import multiprocessing
import resource
import threading
from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from unmask.constraints import Constraint
from unmask.constraints._automaton import Automaton, compile_constraints
from unmask.errors import UnmaskError, UsageError
from unmask.tokens import Tokenizer, tokenizer_from_json

SECONDS = 10.0
MEMORY = 2 << 30
KEPT = 16  # automata that are remembered


class Compiler:
    """Constraint → automaton, one at a time, for one tokenizer.

    >>> compiler = Compiler(model.tokenizer)  # doctest: +SKIP
    >>> compiler([unmask.constraints.Regex(pattern="[0-9]+")], may_end=False).num_states  # doctest: +SKIP
    2
    """

    def __init__(self, tokenizer: Tokenizer, *, seconds: float = SECONDS) -> None:
        self.tokenizer, self.seconds = tokenizer, seconds
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, Automaton] = OrderedDict()
        self._process: Any = None
        self._pipe: Connection | None = None

    def __call__(self, constraints: Constraint | Sequence[Constraint], *, may_end: bool) -> Automaton:
        several = (constraints,) if isinstance(constraints, Constraint) else tuple(constraints)
        with self._lock:
            key = (several, may_end)
            if key not in self._kept:
                self._kept[key] = self._compile(several, may_end)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def _compile(self, several: tuple[Constraint, ...], may_end: bool) -> Automaton:
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((several, may_end))
            # The first answer waits for the process to start as well.
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
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self.tokenizer.to_json()), name="unmask-constraints", daemon=True
        )
        self._process.start()
        theirs.close()
        self._pipe.poll(60)  # it says when it is ready
        self._pipe.recv()

    def close(self) -> None:
        """End the process; the next constraint starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()


def _serve(pipe: Connection, tokenizer_json: str) -> None:
    """The process: reads constraints until nobody is there any more."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tokenizer = tokenizer_from_json(tokenizer_json)
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
        except Exception:
            found = UsageError("the constraint cannot be prepared: use a simpler one")
        pipe.send(found)
