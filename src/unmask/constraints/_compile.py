"""A pattern's automaton over bytes by outlines-core, in a process of its own where it may never end.

Some short patterns have automata of astronomic size, and the compiler has no limit. So a pattern that may be such a one
is read from standard input by this file, run as a program that can be stopped. It imports nothing else of unmask.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MAX_BYTES = 4 << 30


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


if __name__ == "__main__":
    import outlines_core

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    except (ImportError, ValueError, OSError):  # not on every system: there time alone is the limit
        pass
    json.dump(compiled(outlines_core, sys.stdin.buffer.read().decode("utf-8")), sys.stdout)
