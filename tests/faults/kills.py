"""Kills real training processes and looks at what is left. A program: it forks children from one loaded process.

    python kills.py FOLDER CORPUS points:sync:8 moments:async:200 moments:sharded:20 ...

points: at so many points of the save path (0: all); models: of the path by which the best model is kept;
moments: at so many seeded random moments of a running training.
sharded: two processes with fsdp, of which each saves its share; one of them is killed.
Prints one JSON object a part: what was done, and every case in which something was wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from injection import Taps

import quick_gc
from unmask.config import DataConfig, OptimConfig, RunConfig
from unmask.corpora.text import Text
from unmask.denoisers.dit import DiT
from unmask.distributed.world import World
from unmask.errors import UnmaskError
from unmask.objectives.mdlm import MDLM
from unmask.storage.atomic import find_folder
from unmask.storage.model_folder import read_folder
from unmask.training.callbacks import Callback
from unmask.training.checkpoint.files import load_checkpoint
from unmask.training.checkpoint.sharded import save_sharded  # noqa: F401 (children need not import it)
from unmask.training.loop import Run, train

# A point's name, its number among those of one name; before, half or after; and on which process.
Case = tuple[str, int, str, int]
EVERY = 4  # steps between saves
CHAIN = 25  # kills of one run, each going on where the last one left it


class Pipe(Callback):
    """Tells the parent what happened, one message a system call: a killed child has said all it knew."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def _tell(self, kind: bytes, step: int) -> None:
        os.write(self.descriptor, struct.pack("<cI", kind, step))

    def on_start(self, config: RunConfig, info: dict[str, Any]) -> None:
        self._tell(b"r", info["resumed_step"])
        if info["skipped"]:
            self._tell(b"x", len(info["skipped"]))

    def on_step(self, report: Any) -> None:
        self._tell(b"s", report.step)

    def on_save(self, step: int, path: Path) -> None:
        self._tell(b"d", step)


@dataclasses.dataclass
class Child:
    """A training process of its own, or two that train together; the first one tells."""

    pids: list[int]
    pipe: int

    def read(self, size: int = 1 << 20) -> list[tuple[bytes, int]]:
        data = os.read(self.pipe, size)
        return list(struct.iter_unpack("<cI", data[: len(data) // 5 * 5]))

    def end(self) -> tuple[int, list[tuple[bytes, int]]]:
        """The signal that ended one (0: none; -1: it failed), and the rest of what it told."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        told: list[tuple[bytes, int]] = []
        while more := self.read():
            told += more
        os.close(self.pipe)
        return (-min(codes) if min(codes) < 0 else -1 if any(codes) else 0), told


def start(config: RunConfig, arm: Callable[[int], Any] = lambda rank: None) -> Child:
    """Begin the run, or go on where its last checkpoint is."""
    resume = any(Path(config.out, "checkpoints").glob("step-*"))
    size = 2 if config.parallel == "fsdp" else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(size)}
    read, write = os.pipe()
    pids = []
    for rank in range(size):
        pids.append(os.fork())
        if pids[-1]:
            continue
        try:
            os.environ.update(place | {"RANK": str(rank)})
            arm(rank)
            train(config, callbacks=[Pipe(write)], resume=resume, device="cpu")
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    os.close(write)
    return Child(pids, read)


def tensors_of(run: Path) -> dict[str, bytes]:
    """The bytes of all weights, averages and optimizers that a run keeps."""
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*.safetensors"))}


class Kills:
    def __init__(self, root: Path, corpus: str, mode: str) -> None:
        self.root = root
        self.config = RunConfig(
            out="",
            steps=16,
            batch=4,
            denoiser=DiT(size="nano", hidden=32, blocks=1, heads=2, dropout=0.1, qk_norm=False, zero_init=False),
            objective=MDLM(form="count"),
            data=DataConfig(train=Text(path=corpus), length=16, held_out=0.1),
            optim=OptimConfig(lr=5e-3, muon=False, warmup=4, schedule="constant", ema=0.9),
            log_every=1,
            valid_every=8,
            valid_rows=4,
            sample_every=0,
            save_every=EVERY,
            keep=1,
            async_save=mode == "async",
            parallel="fsdp" if mode == "sharded" else "auto",
        )
        self.wrong: list[str] = []
        self.reached: list[str] = []
        self.most_lost = 0

    def at(self, name: str, **changes: Any) -> RunConfig:
        return dataclasses.replace(self.config, out=str(self.root / name), **changes)

    def run_to_the_end(self, config: RunConfig) -> None:
        code, _ = start(config).end()
        if code:
            raise SystemExit(f"a run that nothing disturbed ended with {code}")

    # --- points ---

    def models(self, count: int) -> None:
        """`points`, of the model's folder."""
        self.points(count, "model")

    def points(self, count: int, folder: str = "checkpoints") -> None:
        """Kill at every point of the save at step 8 of a run that has one of step 4; then go on to the end."""
        self.run_to_the_end(self.at("reference"))
        self.run_to_the_end(self.at("base", steps=EVERY))
        expected = tensors_of(self.root / "reference")
        cases = self.list_points(folder)
        if count:
            cases = random.Random(0).sample(cases, count)
        for i, case in enumerate(cases):
            self.one_point(f"case-{i}", case, expected, folder)

    def list_points(self, folder: str) -> list[Case]:
        """As children see them that go on."""
        shutil.copytree(self.root / "base", self.root / "list")

        def arm(rank: int) -> None:
            seen: list[Case] = []
            counts: dict[tuple[str, str], int] = {}
            listing = self.root / f"points-{rank}.json"

            def note(name: str, when: str) -> None:
                counts[name, when] = counts.get((name, when), 0) + 1
                seen.append((name, counts[name, when], when, rank))
                listing.write_text(json.dumps(seen))

            Taps(self.root / "list", note, folder).__enter__()

        code, _ = start(self.at("list", steps=2 * EVERY), arm).end()
        if code:
            raise SystemExit(f"the listing run ended with {code}")
        listings = sorted(self.root.glob("points-*.json"))
        found: list[Case] = [tuple(case) for listing in listings for case in json.loads(listing.read_text())]
        # A file is written in many calls, one a tensor: the first and the last of them stand for all.
        ends = {(name, when, rank): number for name, number, when, rank in found}
        return [case for case in found if case[1] in (1, ends[case[0], case[2], case[3]])]

    def one_point(self, name: str, case: Case, expected: dict[str, bytes], folder: str) -> None:
        run = self.root / name
        shutil.copytree(self.root / "base", run)

        def arm(rank: int) -> None:
            count = 0
            if rank != case[3]:
                return

            def die(point: str, when: str) -> None:
                nonlocal count
                count += (point, when) == (case[0], case[2])
                if count == case[1] and (point, when) == (case[0], case[2]):
                    os.kill(os.getpid(), signal.SIGKILL)

            Taps(run, die, folder).__enter__()

        code, told = start(self.at(name), arm).end()
        what = f"{case[2]} {case[0]} (number {case[1]}, rank {case[3]})"
        if code != signal.SIGKILL:
            self.wrong.append(f"{what}: not reached, ended with {code}")
            return
        self.reached.append(what)
        self.check_left(what, run, told, at_least=EVERY)
        try:
            read_folder(find_folder(run / "model"))
        except UnmaskError as error:
            self.wrong.append(f"{what}: left a torn model: {error}")
        code, told = start(self.at(name)).end()
        if code:
            self.wrong.append(f"{what}: going on ended with {code}")
        elif tensors_of(run) != expected:
            self.wrong.append(f"{what}: another result, or files left over")
        shutil.rmtree(run)

    def check_left(self, what: str, run: Path, told: list[tuple[bytes, int]], at_least: int) -> int:
        """The checkpoint that is left is whole, no older than one interval, and no older than what was announced."""
        found = load_checkpoint(run)
        step = found.step if found else 0
        steps = [n for kind, n in told if kind == b"s"]
        durable = [n for kind, n in told if kind == b"d"]
        if found is not None and found.skipped:
            self.wrong.append(f"{what}: {found.skipped[0]}")
        if any(kind == b"x" for kind, _ in told):
            self.wrong.append(f"{what}: a checkpoint was passed over")
        lost = max(steps, default=step) - step
        self.most_lost = max(self.most_lost, lost)
        if step < at_least or step < max(durable, default=0) or lost > EVERY:
            self.wrong.append(
                f"{what}: left step {step} of {max(steps, default=0)}, {max(durable, default=0)} announced"
            )
        return step

    # --- moments ---

    def moments(self, count: int) -> None:
        """Kill runs that are under way at moments that a seed decides; every next child goes on with what is left."""
        draw = random.Random(1)
        for first in range(0, count, CHAIN):
            name = f"chain-{first}"
            run, done = self.root / name, 0
            for number in range(first, min(count, first + CHAIN)):
                done = self.one_moment(name, f"moment {number}", draw.random(), done)
            last = (done // EVERY + 2) * EVERY
            code, _ = start(self.at(name, steps=last)).end()
            if code:
                self.wrong.append(f"{name}: going on ended with {code}")
                continue
            self.run_to_the_end(self.at(f"straight-{first}", steps=last))
            if self.last_tensors(run) != self.last_tensors(self.root / f"straight-{first}"):
                self.wrong.append(f"{name}: not as if it had never been killed")

    def one_moment(self, name: str, what: str, when: float, done: int) -> int:
        child = start(self.at(name, steps=1_000_000))
        told = child.read(5)  # it has begun to train
        if not told:
            self.wrong.append(f"{what}: going on from step {done} ended with {child.end()[0]}")
            return done
        if told[0][1] != done:
            self.wrong.append(f"{what}: went on at step {told[0][1]}, not at {done}")
        time.sleep(when * (1.5 if len(child.pids) > 1 else 0.4))  # so that some saves are done
        os.kill(child.pids[int(when * 100) % len(child.pids)], signal.SIGKILL)
        code, rest = child.end()
        if code != signal.SIGKILL:
            self.wrong.append(f"{what}: ended with {code}")
        self.reached.append(what)
        return self.check_left(what, self.root / name, told + rest, at_least=done)

    def last_tensors(self, run: Path) -> dict[str, bytes]:
        """Only the last checkpoint: which model was the best depends on no kill, but is compared by the other test."""
        found = load_checkpoint(run)
        assert found is not None
        return tensors_of(found.path)


def main() -> None:
    folder, corpus, *parts = sys.argv[1:]
    quick_gc.install()
    torch.set_num_threads(1)  # a process that is forked must have no threads
    real_sync = os.fsync
    for part in parts:
        what, mode, count = part.split(":")
        # What a kill leaves does not depend on it, and it takes most of the time; a random moment may fall into it.
        os.fsync = real_sync if what == "moments" else lambda descriptor: None
        kills = Kills(Path(folder).resolve() / f"{what}-{mode}", corpus, mode)
        Run(kills.at("warm"), World(), resume=False, init=None)  # imports and packs, once for all children
        began = time.monotonic()
        getattr(kills, what)(int(count))
        report = {"part": part, "reached": kills.reached, "wrong": kills.wrong, "most_lost": kills.most_lost}
        print(json.dumps(report | {"seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
