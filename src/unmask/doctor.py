"""The checks of `unmask doctor`: one function per check, each returning a sentence."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from unmask import kernels
from unmask.devices import pick_device
from unmask.errors import UnmaskError
from unmask.storage.atomic import atomic_text

FREE_BYTES = 2 << 30  # free disk space below which a warning is given
Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of a check: its subject, whether it passed, and a sentence on the state and on what to do."""

    what: str
    verdict: Verdict
    sentence: str


def examine(device: str | None = None, out: str = ".") -> Iterator[Finding]:
    """Yield every finding as soon as it is known; a check that raises is a finding too.

    >>> next(examine("cpu")).what
    'versions'
    """
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", versions),
        ("device", lambda: devices(device)),
        ("disk", lambda: disk(Path(out))),
        ("network", network),
        ("self-check", lambda: self_check(device)),
    ]
    for what, check in checks:
        try:
            yield from check()
        except UnmaskError as error:
            yield Finding(what, "problem", str(error))
        except Exception as error:
            yield Finding(
                what, "problem", f"broke down with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            )


def versions() -> Iterator[Finding]:
    names = ("unmask", "torch", "numpy", "safetensors", "tokenizers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    yield Finding("versions", "ok", f"Python {platform.python_version()}, {versions}, {platform.system()}")
    extras = {"pyarrow": "data", "zstandard": "data", "outlines_core": "constrain", "datasets": "hf"}
    extras |= {
        "uvicorn": "serve",
        "fastapi": "serve",
        "prometheus_client": "serve",
        "tensorboard": "log",
        "wandb": "log",
    }
    extras |= {"transformers": "eval"}
    missing = sorted({extra for module, extra in extras.items() if importlib.util.find_spec(module) is None})
    if missing:
        wanted = ",".join(missing)
        yield Finding(
            "extras", "note", f"not installed: {', '.join(missing)}; pip install 'unmask[{wanted}]' adds them"
        )


def devices(name: str | None) -> Iterator[Finding]:
    device = pick_device(name)
    if device.type != "cuda":
        threads = torch.get_num_threads()
        yield Finding("device", "ok", f"{device}, {threads} threads of {os.cpu_count()} cores")
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        if device.type == "cpu" and load > 0.5 * (os.cpu_count() or 1):
            yield Finding(
                "load",
                "note",
                f"the machine is busy (load {load:.1f}), so all takes longer; in programs of your own set "
                "OMP_WAIT_POLICY=PASSIVE before torch is imported",
            )
        return
    free, total = torch.cuda.mem_get_info(device)
    props = torch.cuda.get_device_properties(device)
    yield Finding("device", "ok", f"{props.name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free")
    if free < total / 2:
        yield Finding("device", "note", "more than half of the GPU's memory is taken: see nvidia-smi for by whom")
    if not kernels.HAS_TRITON:
        yield Finding("kernels", "problem", "Triton is missing, so the fast paths are off: pip install triton")
    if not torch.cuda.is_bf16_supported():
        yield Finding("precision", "note", "this GPU has no bfloat16: train with precision = fp32")


def disk(folder: Path) -> Iterator[Finding]:
    """Check free space, and that a file still exists after it is written, synced and renamed."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < FREE_BYTES:
        yield Finding("disk", "problem", f"{free / 1e9:.1f} GB free at {place}: a checkpoint may not fit; make room")
    else:
        yield Finding("disk", "ok", f"{free / 1e9:.0f} GB free at {place}")
    if not os.access(place, os.W_OK):
        yield Finding("disk", "problem", f"{place} cannot be written to: give another --out")
        return
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        began = time.perf_counter()
        atomic_text(Path(temporary) / "probe", "x" * 4096)
        took = time.perf_counter() - began
    if took > 0.5:
        yield Finding("disk", "note", f"a synced write took {took:.1f} s at {place}: save seldom, or write elsewhere")


def network() -> Iterator[Finding]:
    """Check that two processes can communicate through gloo, as those of a run do; on a GPU also one through NCCL."""
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("network", "problem", "this PyTorch has no distributed package: training stays on one process")
        return
    backends = [("gloo", 2)] + [("nccl", 1)] * (torch.cuda.is_available() and dist.is_nccl_available())
    for backend, size in backends:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            words = [sys.executable, "-c", _EXCHANGE, str(probe.getsockname()[1]), backend, str(size)]
        what = f"an exchange of {size} process{'es' * (size > 1)} over {backend} and the loopback"
        children = [
            subprocess.Popen([*words, str(rank)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        try:
            errors = [child.communicate(timeout=NETWORK_SECONDS)[1] for child in children]
        except subprocess.TimeoutExpired:
            yield Finding("network", "problem", f"{what} hung for {NETWORK_SECONDS} s: look at the firewall")
            continue
        finally:
            for child in children:
                child.kill()
                child.communicate()
        if any(child.returncode for child in children):
            why = next((line for error in errors for line in reversed(error.strip().splitlines())), "no message")
            yield Finding("network", "problem", f"{what} failed: {why[:200]}")
        else:
            yield Finding("network", "ok", f"{what} worked")


NETWORK_SECONDS = 60
# In separate processes: one that hangs can be killed, and no process group remains here.
_EXCHANGE = """
import sys, torch, torch.distributed as dist
port, backend, size, rank = sys.argv[1:]
where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": int(rank), "world_size": int(size)}
dist.init_process_group(backend, **where)
total = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(total)
assert total.item() == int(size)
dist.destroy_process_group()
"""


def self_check(device: str | None) -> Iterator[Finding]:
    """Train briefly, stop, resume, and sample, in a temporary folder."""
    from unmask.config import DataConfig, OptimConfig, RunConfig
    from unmask.corpora.text import Text
    from unmask.denoisers.dit import DiT
    from unmask.model import load
    from unmask.sampling.canvas import Canvas
    from unmask.sampling.loop import sample
    from unmask.training.callbacks import Callback, StepReport
    from unmask.training.loop import train

    class Losses(Callback):
        def __init__(self) -> None:
            self.losses: dict[int, float] = {}

        def on_step(self, report: StepReport) -> None:
            self.losses[report.step] = report.loss

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("".join(f"{i * i % 89} cats sat on {i % 11} mats\n" for i in range(600)), encoding="utf-8")
        whole = RunConfig(
            out=str(Path(folder) / "run"),
            steps=40,
            batch=16,
            denoiser=DiT(size="nano", hidden=64, blocks=2, heads=2, dropout=0.0),
            data=DataConfig(train=Text(path=str(text)), length=64, held_out=0.1, cache=str(Path(folder) / "cache")),
            optim=OptimConfig(warmup=5, schedule="constant", ema=0.9),  # so that half a run is half of a whole one
            valid_every=20,
            valid_rows=8,
            sample_every=0,
            save_every=20,
        )
        plain, resumed = Losses(), Losses()
        train(whole, callbacks=[plain], device=device)
        first, last = plain.losses[1], plain.losses[40]
        if not last < 0.8 * first:
            yield Finding("training", "problem", f"40 steps took the loss from {first:.2f} to {last:.2f} only")
        else:
            yield Finding("training", "ok", f"40 steps, loss {first:.2f} → {last:.2f}")
        half = dataclasses.replace(whole, out=str(Path(folder) / "half"))
        train(dataclasses.replace(half, steps=20), device=device)
        train(half, callbacks=[resumed], resume=True, device=device)
        drift = max(abs(resumed.losses[step] - plain.losses[step]) for step in resumed.losses)
        if drift > 1e-3:
            yield Finding("resuming", "problem", f"a resumed run's loss is off by {drift:.1e}: saving or reading fails")
        elif drift > 0:
            yield Finding("resuming", "ok", f"a resumed run repeats the uninterrupted one to {drift:.0e}")
        else:
            yield Finding("resuming", "ok", "a resumed run repeats the uninterrupted one bit for bit")
        model = load(whole.out, device=device)
        blank = Canvas.blank(num=4, length=64, mask_id=model.denoiser.mask_id).to(model.device)
        texts = sample(model.denoiser, blank, model.sampler, objective=model.objective).tokens
        if bool((texts == model.denoiser.mask_id).any()):
            yield Finding("sampling", "problem", "a finished text still holds masks")
        else:
            yield Finding("sampling", "ok", f"4 texts of 64 tokens; all in {time.perf_counter() - began:.0f} s")
