"""A trial in a separate process: `python -m unmask.comparison.processes`, with the job on standard input.

Running out of memory, a GPU in a bad state or a crash then ends one trial and not the others, and no trial inherits the
memory of another. The process ends with its parent, however that ends: the parent holds the other end of its standard
input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unmask.comparison.plan import Protocol
from unmask.comparison.trial import Trial, failed, read_trial, write_trial
from unmask.comparison.work import Job, Tell, run_trial
from unmask.config import RunConfig
from unmask.errors import Stopped, UnmaskError
from unmask.plugin_modules import load_plugins, loaded
from unmask.reader import from_dict, to_dict

POLL = 0.1  # seconds between checks for a request to stop


def run_apart(job: Job, tell: Tell, asked_to_stop: Callable[[], bool] = lambda: False) -> Trial:
    """`run_trial` in a separate process. If that process dies without a message, the failure is recorded here."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        with _started(errors) as child:
            assert child.stdin is not None and child.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(_written(job)) + "\n")
                child.stdin.flush()
            with _stopping(child, asked_to_stop):
                for line in child.stdout:
                    tell(json.loads(line))
                code = child.wait()
        if code == Stopped.exit_code or (code and asked_to_stop()):
            raise Stopped("stopped")
        if code == 0 and (trial := read_trial(job.out, job.name)) is not None:
            return trial
        errors.seek(0)
        trial = failed(job, _ending(code, errors.read()))
    write_trial(job.out, trial)
    return trial


@contextlib.contextmanager
def _started(errors: Any) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C reaches only us; we then ask the child to stop
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def _stopping(child: subprocess.Popen[str], asked_to_stop: Callable[[], bool]) -> Iterator[None]:
    """Forward a request to stop while the block waits for the child."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL):
            if asked_to_stop():
                child.terminate()  # the child saves its state
                return

    thread = threading.Thread(target=watch, name="compare-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ending(code: int, errors: str) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"its process was killed by {name}" + (": memory ran out, most likely" if name == "SIGKILL" else "")
    last = (errors.strip().splitlines() or ["without a word"])[-1]
    return f"its process ended with exit code {code}: {last}"


def _written(job: Job) -> dict[str, Any]:
    protocol = {"valid_rows": job.protocol.valid_rows, "draws": job.protocol.draws, "seed": job.protocol.seed}
    names = {key: getattr(job, key) for key in ("name", "system", "seed", "fingerprint", "shared", "device", "at_once")}
    how = {"config": to_dict(job.config), "protocol": protocol | {"also": job.protocol.also}}
    return names | how | {"out": str(job.out), "plugins": loaded}


def _read(data: dict[str, Any]) -> Job:
    load_plugins(data.pop("plugins"))
    also = tuple(data["protocol"].pop("also"))
    config: RunConfig = from_dict(RunConfig, data.pop("config"), saved=True)
    protocol = Protocol(**data.pop("protocol"), also=also)
    return Job(**data | {"out": Path(data["out"])}, config=config, protocol=protocol)


def _end_with_parent() -> None:
    """Nothing follows the job on standard input: when it becomes readable, the parent is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)  # at once, as if it had been killed too


def main() -> int:
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output must not mix with our messages
    job = _read(json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()

    def tell(message: dict[str, Any]) -> None:
        told.write(json.dumps(message) + "\n")
        told.flush()

    try:
        run_trial(job, tell)
    except Stopped:
        return Stopped.exit_code
    except UnmaskError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
