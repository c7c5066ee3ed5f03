"""A pattern's automaton over bytes by outlines-core, in a process of its own where it may never end.

Some short patterns have automata of astronomic size, and the compiler has no limit. So a pattern that may be such a one
is read from standard input by this file, run as a program that can be stopped. It imports nothing else of unmask.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from typing import Any

MAX_BYTES = 4 << 30
MAX_CPU_SECONDS = 20  # whoever waits gives up before; this is for when nobody waits any more


def compiled(core: Any, pattern: str) -> dict[str, Any]:
    """The ways on from each state, where to begin and where a match ends; or what is wrong, as the package tells it.

    >>> import outlines_core
    >>> sorted(compiled(outlines_core, "ab"))
    ['final', 'initial', 'ways']
    """
    try:
        index = core.Index(pattern, core.Vocabulary(256, {bytes((b,)): [b] for b in range(256)}))
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        return {"wrong": str(e)}
    ways = index.get_transitions()
    return {"ways": ways, "initial": index.get_initial_state(), "final": sorted(index.get_final_states())}


def limit(memory: int, seconds: int) -> None:
    """An end to this process's memory and CPU time, and to those of whatever it starts. A limit that holds already is
    never raised, which the super-user could do."""
    with suppress(ImportError):  # not on every system: there whoever waits is the only limit
        import resource

        for kind, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds)):
            held = [n for n in resource.getrlimit(kind) if n != resource.RLIM_INFINITY]
            least = min([most, *held])
            with suppress(ValueError, OSError):
                resource.setrlimit(kind, (least, least))


def die_with_parent() -> None:
    """Linux ends this process as soon as the thread that started it ends; elsewhere nothing happens."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    die_with_parent()
    limit(MAX_BYTES, MAX_CPU_SECONDS)
    import outlines_core

    json.dump(compiled(outlines_core, sys.stdin.buffer.read().decode("utf-8")), sys.stdout)
