"""A world of processes that are forked from this one, which has loaded torch for all of them and has no threads."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any


def forked(size: int, work: Callable[[], Any]) -> None:
    """The work in so many processes; when one fails the others are ended, and so is this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(size)}
    processes = set()
    for rank in range(size):
        if process := os.fork():
            processes.add(process)
            continue
        code = 1
        try:
            os.environ.update(place | {"RANK": str(rank)})
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    failed = False
    while processes:
        process, status = os.wait()
        processes.discard(process)
        if status and not failed:
            failed = True
            for other in processes:
                os.kill(other, signal.SIGKILL)
    if failed:
        sys.exit(f"one of {size} processes failed")
