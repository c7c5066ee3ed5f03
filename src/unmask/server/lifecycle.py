"""`unmask serve`: opens the socket, loads the model, then serves until a signal."""

from __future__ import annotations

import argparse
import errno
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import prometheus_client
import uvicorn

from unmask.errors import UnmaskError, UsageError
from unmask.model import load
from unmask.server.access import Access, AccessMiddleware, is_loopback
from unmask.server.app import make_app
from unmask.server.connection import connections
from unmask.server.limits import Limits

LEAST_KEY = 16  # characters
SEND_BUFFER = 1 << 18  # bytes that the system buffers for a client that does not read; its default would be megabytes


def serve(args: argparse.Namespace) -> int:
    """Run until SIGTERM or Ctrl-C; both complete running requests."""
    access = _access(args)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # this process is the server's
    sys.setswitchinterval(0.001)  # the event loop is scheduled sooner among computing threads
    limits = Limits(
        budget=_at_least_one(args.budget, "--budget"),
        requests=_at_least_one(args.max_requests, "--max-requests"),
        length=_at_least_one(args.max_length, "--max-length"),
    )
    with listen(args.host, args.port) as listener:
        model = load(args.model, device=args.device, dtype=args.dtype)
        name = args.name or Path(args.model).resolve().name
        app = make_app(
            model, name=name, access=access, limits=limits, max_batch=_at_least_one(args.max_batch, "--max-batch")
        )
        port = listener.getsockname()[1]
        host = f"[{args.host}]" if ":" in args.host else args.host
        _Server(configure(app, drain=args.drain), f"unmask serves {name} at http://{host}:{port}").run(
            sockets=[listener]
        )
    return 0


def configure(app: AccessMiddleware, *, drain: int) -> uvicorn.Config:
    """The uvicorn configuration for the app; drain: seconds to complete running requests at the end.

    >>> uvicorn.Server(configure(make_app(model), drain=20)).run(sockets=[listener])  # doctest: +SKIP
    """
    return uvicorn.Config(
        app,
        http=connections(app.limits),
        log_level="error",  # client errors are answered, not logged
        access_log=False,
        server_header=False,
        date_header=False,
        ws="none",
        timeout_graceful_shutdown=drain,
        proxy_headers=False,
    )


def _access(args: argparse.Namespace) -> Access:
    key = os.environ.get("UNMASK_API_KEY") or None
    if args.api_key_file:
        try:
            key = Path(args.api_key_file).read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "it is not text"
            raise UsageError(f"cannot read the key in {args.api_key_file}: {reason}") from None
    if key is not None and (len(key) < LEAST_KEY or not key.isascii() or not key.isprintable()):
        raise UsageError(f"an API key has at least {LEAST_KEY} plain characters; make one with: openssl rand -hex 16")
    public = not is_loopback(args.host)
    if public and key is None:
        raise UsageError(
            f"{args.host} can be reached from other machines, which needs an API key: "
            "give --api-key-file, or listen on 127.0.0.1"
        )
    hosts = frozenset(name.lower().rstrip(".") for name in args.allow_host)
    origins = frozenset(origin.lower().rstrip("/") for origin in args.allow_origin)
    return Access(key=key, hosts=hosts, origins=origins, any_address=public)


def _at_least_one(number: int, name: str) -> int:
    if number < 1:
        raise UsageError(f"{name} must be at least 1, got {number}")
    return number


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """The listening socket; port 0: any free one.

    >>> with listen("127.0.0.1", 0) as listener:
    ...     listener.getsockname()[0]
    '127.0.0.1'
    """
    if not 0 <= port < 65536:
        raise UsageError(f"--port must lie in 0..65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is given explicitly: without it asyncio does not set TCP_NODELAY for small answers
    # and each would wait for the client's acknowledgement of the one before.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # for each connection
        try:
            listener.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise UnmaskError(f"port {port} on {host} is taken: stop what listens there, or give --port") from None
            raise UnmaskError(f"cannot listen on {host} port {port}: {e.strerror or e}") from None
        listener.listen(2048)
        yield listener
    finally:
        listener.close()


class _Server(uvicorn.Server):
    """uvicorn with a one-line message when it is ready; a stop by signal counts as success."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # long-lived objects: scanning them again would block all answers for a tenth of a second
        if self.started:
            print(self.ready, flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but the signal is not raised again at the end, because it has been handled."""

        def stop(number: int, frame: FrameType | None) -> None:
            self.force_exit = self.should_exit  # a second signal stops immediately
            if not self.should_exit:
                print("unmask: finishing what is being written; once more to stop now", file=sys.stderr, flush=True)
            self.should_exit = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
