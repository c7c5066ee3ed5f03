"""How long a small fill takes beside the heaviest requests that a server allows.

    python benchmarks/fairness.py --count 20

Starts `unmask serve` with the built-in model `stories`, asks for a small fill again and again, alone and beside each of
six heavy requests, and prints a line for each: median, 95th percentile, and how many times the latter is what it is
alone. It exits with 1 where that is more than four times. Client and server share the machine.
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


def patterns() -> list[Body]:
    """From what is far too much down to what is allowed."""
    found: list[Body] = []
    for length in (200, 100, 50, 25):
        for repeats in (10, 5, 2):
            for n in (8, 4, 2, 1):
                pattern = f"(?:{classes(150)}){{0,{repeats}}}"
                how = {"max_tokens": length, "n": n, "steps": "inf", "regex": pattern, "suffix": " The end."}
                found.append(("/v1/completions", {"prompt": "Once", **how}))
    return found


def schemas() -> list[Body]:
    found: list[Body] = []
    for length in (200, 100, 50):
        for num in (40, 20, 10, 5):
            for n in (8, 4, 2, 1):
                words = {"type": "string", "maxLength": 40}
                fields = {f"field_{i}": {"anyOf": [words, {"type": "integer"}]} for i in range(num)}
                schema = {"type": "object", "properties": fields}
                how = {"max_tokens": length, "n": n, "steps": "inf", "json_schema": schema, "suffix": " "}
                found.append(("/v1/completions", {"prompt": "", **how}))
    return found


BESIDE: dict[str, Callable[[], list[Body]]] = {
    "n = 8, 250 tokens, T = ∞": lambda: [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 250, "n": 8, "steps": "inf"})
    ],
    "the costliest regex allowed": patterns,
    "the costliest schema allowed": schemas,
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
    """The first of the requests that is not refused, again and again; what it is."""

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
            yield f"{body.get('n', 1)} rows of {body.get('max_tokens', '')}" if "max_tokens" in body else ""
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
    alone = await small(server, count)

    def line(name: str, seconds: list[float]) -> float:
        p95 = seconds[round(0.95 * (len(seconds) - 1))]
        times = p95 / alone[round(0.95 * (len(alone) - 1))]
        print(f"| {name} | {statistics.median(seconds):.2f} s | {p95:.2f} s | {times:.1f} |", flush=True)
        return times

    print("| a small fill | median | 95% | times |\n| --- | --- | --- | --- |")
    line("alone", alone)
    worst = 0.0
    for name, bodies in BESIDE.items():
        if only in name:
            async with beside(server, bodies()) as what:
                worst = max(worst, line(f"beside {name}{f' ({what})' if what else ''}", await small(server, count)))
            await quiet(server)
    if only in "a stream that nobody reads":
        async with unread(server):
            worst = max(worst, line("beside a stream that nobody reads", await small(server, count)))
        await quiet(server)
    line("alone again", await small(server, count))
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
