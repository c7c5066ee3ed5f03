"""Serve a model over HTTP, with OpenAI-compatible completions.

It also serves gap filling, edits, scores, a stream of every step, and a web page at its address. The server listens
only on this machine by default; any other address requires an API key, from a file or from UNMASK_API_KEY. On Ctrl-C or
SIGTERM it accepts no new requests and finishes those in progress.

Examples:
  unmask serve
  unmask serve runs/demo
  unmask serve runs/demo --port 8080 --max-batch 32
  unmask serve runs/demo --host 0.0.0.0 --api-key-file key.txt --allow-host llm.example.org
"""

from __future__ import annotations

import argparse

from unmask.cli import _naming


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one (default 8000)")
    parser.add_argument("--name", help="the model's name for clients (default: the folder's name)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default fp32")
    access = parser.add_argument_group("access")
    access.add_argument("--api-key-file", metavar="FILE", help="file whose first line is the API key")
    access.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="a host name of this server")
    access.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL", help="an origin whose pages may call the server"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-batch", type=int, default=64, help="maximum rows per step (default 64)")
    limits.add_argument(
        "--max-requests", type=int, default=128, help="maximum concurrent requests; more get 429 (default 128)"
    )
    limits.add_argument("--max-length", type=int, default=4096, help="maximum tokens of a text (default 4096)")
    limits.add_argument(
        "--budget",
        type=int,
        default=1 << 22,
        help="maximum rows x length x network calls of a request (default 4194304)",
    )
    limits.add_argument(
        "--drain",
        type=int,
        default=30,
        metavar="S",
        help="seconds to finish requests in progress on shutdown (default 30)",
    )


def run(args: argparse.Namespace) -> int:
    from unmask.server.same_bits import ask_for_same_bits

    ask_for_same_bits()
    from unmask.devices import pick_device, pick_dtype
    from unmask.errors import UsageError

    for name, least in {"max_batch": 1, "max_requests": 1, "max_length": 1, "budget": 1, "drain": 0, "port": 0}.items():
        if (value := getattr(args, name)) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    pick_dtype(args.dtype, pick_device(args.device))
    try:
        from unmask.server.lifecycle import serve
    except ImportError as e:
        from unmask.errors import MissingExtraError

        raise MissingExtraError(e.name or "fastapi", "serve", "unmask serve") from None
    return serve(args)
