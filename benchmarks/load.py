"""A server under load: many streams at once, clients that disconnect, more requests than it accepts.

    python benchmarks/load.py --minutes 10
    python benchmarks/load.py --model stories --throughput --clients 16 32 --length 64

Starts `unmask serve` with a small network of random weights (or --model), measures it, and prints a line for each
guarantee. The exit code is 1 if one is not met. Client and server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLACES = 128  # of the server: --max-requests


@dataclass
class Server:
    pid: int
    port: int

    def memory(self) -> float:
        """Resident, in MiB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024

    def handles(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    async def metrics(self) -> dict[str, float]:
        text = (await ask(self, "GET", "/metrics")).body.decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}


@dataclass
class Answer:
    status: int
    body: bytes
    seconds: float


async def ask(server: Server, method: str, route: str, body: Any = None) -> Answer:
    """One request on a connection of its own, its answer read to the end."""
    began = time.perf_counter()
    reader, writer = await send(server, method, route, body)
    try:
        whole = await reader.read()
    finally:
        writer.close()
    head, _, rest = whole.partition(b"\r\n\r\n")
    return Answer(int(head.split(b" ", 2)[1]), rest, time.perf_counter() - began)


async def send(
    server: Server, method: str, route: str, body: Any = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {route} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(data)}"]
    lines += ["content-type: application/json", "", ""]
    writer.write("\r\n".join(lines).encode() + data)
    await writer.drain()
    return reader, writer


def story(seed: int, length: int, **more: Any) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": length, "steps": "inf", "seed": seed, **more}


@dataclass
class Report:
    lines: list[tuple[bool, str]] = field(default_factory=list)

    def say(self, kept: bool, what: str) -> None:
        self.lines.append((kept, what))
        print(f"{'ok    ' if kept else 'MISSED'}  {what}", flush=True)


async def throughput(server: Server, clients: int, length: int, least: float, report: Report, rounds: int = 2) -> None:
    """Requests one after another, then the same at once, in turn; the better of each counts."""
    alone, at_once = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        first = [await ask(server, "POST", "/v1/completions", story(i, length)) for i in range(clients)]
        alone.append(time.perf_counter() - began)
        began = time.perf_counter()
        both = await asyncio.gather(*(ask(server, "POST", "/v1/completions", story(i, length)) for i in range(clients)))
        at_once.append(time.perf_counter() - began)
    answers = [[json.loads(a.body) for a in several] for several in (first, both)]
    texts = [[answer["choices"][0]["text"] for answer in several] for several in answers]
    same = sum(a == b for a, b in zip(*texts, strict=True))
    ratio = min(alone) / min(at_once)
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers[0])  # a text may end before its length
    rates = f"{tokens / min(alone):.0f} tokens/s one after another, {tokens / min(at_once):.0f} at once"
    report.say(ratio >= least, f"{clients} requests at once: {ratio:.1f} times the throughput ({rates})")
    report.say(same == clients, f"the same texts alone and at once: {same} of {clients}")


async def disconnects(server: Server, length: int, report: Report, num: int = 100) -> None:
    """Clients that leave in the middle: how many steps of their work ended afterwards."""
    before = await server.metrics()
    for i in range(num):
        reader, writer = await send(
            server, "POST", "/trace", {"prompt": "", "length": length, "steps": "inf", "seed": i}
        )
        await reader.readuntil(b"event: step")
        writer.close()
    for _ in range(200):
        after = await server.metrics()
        if after["unmask_requests_active"] == after["unmask_queue_rows"] == 0:
            break
        await asyncio.sleep(0.05)
    stopped = after["unmask_cancelled_total"] - before["unmask_cancelled_total"]
    late = after["unmask_late_steps_most"]
    report.say(
        late <= 1 and stopped == num and after["unmask_queue_rows"] == 0,
        f"{num} clients left in the middle: {stopped:.0f} were stopped, with at most {late:.0f} step more",
    )


async def overload(server: Server, length: int, report: Report) -> None:
    """All places taken, then ten times as many requests, at the pace of 100 a second."""
    slow = story(0, length, n=8, sampler="refine", options={"rounds": 50})
    held = [await send(server, "POST", "/v1/completions", slow) for _ in range(PLACES)]
    while (await server.metrics())["unmask_requests_active"] < PLACES:
        await asyncio.sleep(0.05)

    async def knock(i: int) -> Answer:
        await asyncio.sleep(i / 100)
        return await ask(server, "POST", "/v1/completions", story(i, length))

    answers = await asyncio.gather(*(knock(i) for i in range(10 * PLACES)))
    for _, writer in held:
        writer.close()
    refused = [a for a in answers if a.status == 429]
    seconds = sorted(a.seconds for a in refused)
    p50, p99 = (1000 * seconds[int(q * (len(seconds) - 1))] for q in (0.5, 0.99))
    report.say(
        len(refused) == len(answers) and p99 <= 50,
        f"{len(answers)} requests beyond {PLACES} places: {len(refused)} answered 429, "
        f"in {p50:.0f} ms (median), {p99:.0f} ms (99%), {1000 * seconds[-1]:.0f} ms (longest)",
    )
    while (await server.metrics())["unmask_requests_active"]:
        await asyncio.sleep(0.05)


async def endurance(server: Server, minutes: float, streams: int, drops: int, length: int, report: Report) -> None:
    """Streams without a pause, clients that come and go at once, and somebody who asks for /health."""
    began = time.perf_counter()
    end = began + 60 * minutes
    health: list[float] = []
    done = {"streams": 0, "tokens": 0, "drops": 0}
    marks: list[float] = []

    async def stream(number: int) -> None:
        turn = 0
        while time.perf_counter() < end:
            # A seed is of a stream and a turn; lengths differ so that rows come and go at all times.
            size = 8 + (7 * number + 13 * turn) % (length - 8)
            answer = await ask(server, "POST", "/v1/completions", story(1000 * number + turn, size, stream=True))
            assert answer.status == 200, answer.body[:300]
            assert b"[DONE]" in answer.body, answer.body[-300:]
            done["streams"] += 1
            done["tokens"] += size
            turn += 1

    async def drop() -> None:
        for i in range(drops):
            if time.perf_counter() > end:
                break
            how = story(i, length, stream=bool(i % 2)) if i % 3 else None
            _, writer = await send(server, "POST", "/v1/completions", how)
            writer.close()
            done["drops"] += 1
            await asyncio.sleep(max(0.0, began + 60 * minutes * 0.9 * done["drops"] / drops - time.perf_counter()))

    async def probe() -> None:
        while time.perf_counter() < end:
            health.append((await ask(server, "GET", "/health")).seconds)
            await asyncio.sleep(0.05)

    async def weigh() -> None:
        await asyncio.sleep(min(60.0, 60 * minutes * 0.25))  # until all threads and buffers are there
        while time.perf_counter() < end:
            marks.append(server.memory())
            await asyncio.sleep(min(5.0, 60 * minutes / 40))

    await asyncio.gather(*(stream(i) for i in range(streams)), drop(), probe(), weigh())
    tenth = max(1, len(marks) // 5)
    first, last = statistics.median(marks[:tenth]), statistics.median(marks[-tenth:])
    growth = 100 * (last / first - 1)
    health.sort()
    p99 = 1000 * health[int(0.99 * (len(health) - 1))]
    rate = done["tokens"] / minutes / 60
    print(f"        {done['streams']} streams of {streams} at a time in {minutes:g} minutes, {rate:.0f} tokens/s")
    report.say(growth < 5, f"memory {first:.0f} MiB, at the end {last:.0f} MiB: {growth:+.1f}%")
    report.say(done["drops"] == drops, f"{done['drops']} clients came and left at once")
    report.say(p99 < 100, f"/health in {1000 * statistics.median(health):.0f} ms (median), {p99:.0f} ms (99%)")


async def measure(server: Server, args: argparse.Namespace) -> Report:
    report = Report()
    await ask(server, "POST", "/v1/completions", story(0, 16))  # the first call is slower than any other
    rest = server.handles(), (await server.metrics())["unmask_tasks"]
    for clients in args.clients:
        # What is shared between rows is a small network's overhead; a larger one is at work with a single row.
        await throughput(server, clients, args.length, 1 if args.model else 3, report, 1 if args.throughput else 2)
    if args.throughput:
        return report
    await disconnects(server, args.length, report)
    await overload(server, args.length, report)
    await endurance(server, args.minutes, args.streams, args.drops, args.length, report)
    await asyncio.sleep(2)
    now = await server.metrics()
    report.say(
        server.handles() <= rest[0] + 2 and now["unmask_tasks"] <= rest[1] and now["unmask_requests_active"] == 0,
        f"left behind: {server.handles() - rest[0]:+d} file handles, {now['unmask_tasks'] - rest[1]:+.0f} tasks, "
        f"{now['unmask_requests_active']:.0f} requests, {now['unmask_queue_rows']:.0f} rows",
    )
    return report


@contextmanager
def serving(args: argparse.Namespace, budget: int | None = 1 << 40) -> Iterator[Server]:
    """budget: of a request; None: the server's own."""
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(Path(folder) / "random", args)
        words = [sys.executable, "-m", "unmask", "serve", str(model), "--port", "0", "--max-requests", str(PLACES)]
        words += [] if budget is None else ["--budget", str(budget)]
        words += ["--device", args.device] if args.device else []
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            yield Server(process.pid, int(line.rpartition(":")[2]))
        finally:
            process.terminate()
            process.wait()


def random_model(folder: Path, args: argparse.Namespace) -> Path:
    import torch

    from unmask.data.tokenizers import load_tokenizer
    from unmask.denoisers.dit import DiT
    from unmask.model import Model
    from unmask.objectives.mdlm import MDLM

    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    dit = DiT(size=args.size, dropout=0, zero_init=False)
    network = dit.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    torch.nn.init.normal_(network.output.weight, std=0.05)
    with torch.no_grad():  # plain letters, no end: every text has its whole length
        network.output.bias[:32] = network.output.bias[127:] = -30.0
    Model(denoiser=network, tokenizer=tokenizer, objective=MDLM(form="count"), length=256).save(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--drops", type=int, default=1000)
    parser.add_argument("--length", type=int, default=32, help="tokens of a text")
    parser.add_argument("--size", default="nano", help="of the random network")
    parser.add_argument("--model", help="a model's folder instead")
    parser.add_argument("--clients", type=int, nargs="+", default=[16], help="requests at once, for the throughput")
    parser.add_argument("--throughput", action="store_true", help="measure nothing else, and each once")
    parser.add_argument("--device")
    args = parser.parse_args()
    with serving(args) as server:
        report = asyncio.run(measure(server, args))
    return 0 if all(kept for kept, _ in report.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
