"""The discarded step on a GPU: a run ignores its errors, so here it must get through. Skipped without a GPU.

Needs torch, triton and pytest alone: `python -m pytest --noconftest tests/gpu`.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import small_run

from unmask import kernels
from unmask.config import load_config
from unmask.distributed.world import join_world
from unmask.training import warm_up
from unmask.training.loop import Run

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: its warm-up is not tested here"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
JITFunction = pytest.importorskip("triton.runtime.jit").JITFunction
DEVICE = "cuda"
PARTS = ["network", "gradients", "update", "validation"]
SMALL = {"denoiser.hidden": "64", "denoiser.blocks": "2"}
SYSTEMS = {
    "fast": {"denoiser.heads": "2"},
    "mamba": {"denoiser": "mamba", "objective": "ar"},
}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("packing", ["wrap", "pad"])
def test_every_part_is_done(system: str, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the run's own thread, while its texts wait to be packed until the step has ended twice: once to compile."""
    data = small_run(tmp_path).data
    options = {"out": str(tmp_path / "run"), "precision": "bf16", "batch": "16", "valid_rows": "8"}
    options |= {"data.train": "text", "data.train.path": data.train.path, "data.cache": str(data.cache)}  # type: ignore[attr-defined]
    options |= {"data.length": "64", "data.held_out": "0.1", "data.packing": packing}
    options |= {"data.windows": "fixed", "data.train.separator": "\n"}
    config = load_config("fast", options | SMALL | SYSTEMS[system])
    done: list[str] = []
    known: list[int] = []
    errors: list[BaseException] = []
    ended = threading.Semaphore(0)
    real_step, real_rows = warm_up.discarded_step, Run._build_rows

    def step(*how: Any) -> Iterator[str]:
        try:
            known.append(compiled())
            for part in real_step(*how):
                done.append(part)
                yield part
        except BaseException as e:
            errors.append(e)
            raise
        finally:
            known.append(compiled())
            ended.release()

    def rows(self: Run) -> Any:
        for _ in range(2):
            ended.acquire(timeout=300)
        return real_rows(self)

    monkeypatch.setattr(warm_up, "discarded_step", step)
    monkeypatch.setattr(Run, "_build_rows", rows)
    with join_world(DEVICE) as world:
        Run(config, world, resume=False, init=None)
    assert (done, errors) == (2 * PARTS, [])
    assert 0 < known[2] == known[3]  # the first time compiles all that the second one runs


def compiled() -> int:
    """How many kernels of the package are ready to run on this GPU."""
    modules = [
        importlib.import_module(f"unmask.kernels.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)
    ]
    functions = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    caches = [f.device_caches[torch.cuda.current_device()][0] for f in functions.values()]
    return sum(kernel is not None for cache in caches for kernel in cache.values())
