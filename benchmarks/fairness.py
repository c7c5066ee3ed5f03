"""How long a small fill takes beside the heaviest requests that a server allows.

    python benchmarks/fairness.py --count 20

Starts `unmask serve` with the built-in model `stories` and repeats a small fill, alone and beside each of six heavy
requests. Prints a line for each: median, 95th percentile, and the ratio of the latter to its value alone just before.
The exit code is 1 if a ratio exceeds four. Client and server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from load import Server, ask, send, serving

MOST = 4.0  # times as long as alone
SMALL = {"text": "Lily and her [MASK:3] went to the [MASK:2].", "steps": "inf"}
STORY = "Once upon a time there was a little girl who had a red ball and a big dog. "
Body = tuple[str, dict[str, Any]]


def classes(count: int) -> str:
    """So many classes of characters, each without another letter."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return "".join(f"[ -{chr(ord(c) - 1)}{chr(ord(c) + 1)}-~]" for c in (letters * 8)[:count])


def under(**constraint: Any) -> list[Body]:
    """A text of 200 tokens, a token a call, under a constraint: as many of them as are allowed."""
    how = {"prompt": "Once", "suffix": " The end.", "max_tokens": 200, "steps": "inf", **constraint}
    return [("/v1/completions", {**how, "n": n}) for n in (8, 4, 2, 1)]


SCHEMA = {
    "type": "object",
    "properties": {f"field_{i}": {"type": "string", "maxLength": 40} for i in range(4)},
    "required": [f"field_{i}" for i in range(4)],
}
BESIDE: dict[str, Callable[[], list[Body]]] = {
    "n = 8 of 250 tokens, T = ∞": lambda: [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 250, "n": 8, "steps": "inf"})
    ],
    "the costliest regex allowed": lambda: [body for k in (10, 5) for body in under(regex=f"({classes(200)}){{{k}}}")],
    "the costliest schema allowed": lambda: under(json_schema=SCHEMA),
    "a long score": lambda: [("/score", {"texts": [STORY * 60] * 8, "num_samples": 128 // k}) for k in (1, 2, 4, 8)],
    "an edit of 256 candidates": lambda: [
        (
            "/edit",
            {"text": STORY * 8, "replace": "dog", "with_length": [1, 32], "n": 8, "steps": steps, "occurrence": 1},
        )
        for steps in (64, 32, 16, 8)
    ],
}


async def small(server: Server, count: int) -> list[float]:
    """Seconds of each of so many small fills, one after another."""
    found = []
    for seed in range(count):
        answer = await ask(server, "POST", "/fill", {**SMALL, "seed": seed})
        assert answer.status == 200, answer.body[:300]
        found.append(answer.seconds)
    return sorted(found)


@asynccontextmanager
async def beside(server: Server, bodies: list[Body]) -> AsyncIterator[str]:
    """The first of the requests that is not refused, again and again; says how many rows it has."""

    async def forever(route: str, body: dict[str, Any]) -> None:
        seed = 0
        while True:
            seed += 1
            answer = await ask(server, "POST", route, {**body, "seed": seed})
            if answer.status != 200:
                raise RuntimeError(json.loads(answer.body)["error"]["message"])

    refusal: BaseException | None = None
    for route, body in bodies:
        task = asyncio.ensure_future(forever(route, body))
        rows = 0.0
        while not task.done() and not rows:
            await asyncio.sleep(0.05)
            rows = (await server.metrics())["unmask_queue_rows"]
        if task.done():
            refusal = task.exception()
            continue
        try:
            yield f" ({body['n']} rows)" if "max_tokens" in body else ""
        finally:
            refused = task.done()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert not refused
        return
    raise RuntimeError(f"all of them were refused, the last one: {refusal}")


@asynccontextmanager
async def unread(server: Server) -> AsyncIterator[str]:
    """A stream of all steps that nobody reads."""
    body = {"prompt": "Once", "length": 250, "n": 8, "steps": "inf", "runners_up": 5}
    _, writer = await send(server, "POST", "/trace", body)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    try:
        yield ""
    finally:
        writer.close()


async def quiet(server: Server) -> None:
    while (await server.metrics())["unmask_requests_active"]:
        await asyncio.sleep(0.05)


async def measure(server: Server, count: int, only: str) -> bool:
    await small(server, 3)  # the first calls are slower than any other
    cases = {name: beside(server, bodies()) for name, bodies in BESIDE.items()}
    cases["a stream that nobody reads"] = unread(server)
    print("| a small fill beside | alone: median | 95% | beside it: median | 95% | 95%, times |")
    print("| --- | --- | --- | --- | --- | --- |")
    worst = 0.0
    for name, case in cases.items():
        if only not in name:
            continue
        alone = await small(server, count)  # before each, as a machine may be slower at times
        async with case as what:
            found = await small(server, count)
        await quiet(server)
        at = round(0.95 * (count - 1))
        worst = max(worst, found[at] / alone[at])
        times = [f"{1000 * x:.0f} ms" for one in (alone, found) for x in (statistics.median(one), one[at])]
        print(f"| {name}{what} | {' | '.join(times)} | {found[at] / alone[at]:.1f} |", flush=True)
    print(f"\nmemory of the server at the end: {server.memory():.0f} MiB")
    return worst <= MOST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="small fills for each line")
    parser.add_argument("--model", default="stories")
    parser.add_argument("--only", default="", help="a part of the names of what they are beside")
    parser.add_argument("--device")
    args = parser.parse_args()
    with serving(args, budget=None) as server:
        return 0 if asyncio.run(measure(server, args.count, args.only)) else 1


if __name__ == "__main__":
    sys.exit(main())
