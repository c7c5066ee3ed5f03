"""The options of commands that share their work among several processes."""

from __future__ import annotations

import argparse
import os


def add_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--nproc", type=int, metavar="N", help="run in N processes on this machine (default 1)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds to wait for a hanging process (default 600)",
    )


def launched(args: argparse.Namespace, *, max_restarts: int = 0) -> bool:
    """Whether --nproc asked for processes; they have then done all there was to do."""
    if args.nproc is None or "RANK" in os.environ:
        return False
    from unmask.distributed.launch import launch

    launch(args.words, nproc=args.nproc, max_restarts=max_restarts)
    return True
