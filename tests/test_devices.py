"""Devices that lack a precision, and machines with several GPUs."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from made_tasks import small_model
from unmask import kernels
from unmask.bench import Job, jobs
from unmask.devices import put, put_like
from unmask.distributed.world import join_world
from unmask.finetuning.run import model_of
from unmask.model import load
from unmask.sampling import cuda_graphs
from unmask.server.engine import Engine


class Moved(torch.Tensor):
    """Stands for a tensor that an Apple GPU takes: torch refuses to move float64 there."""

    def to(self, device: Any) -> Moved:  # type: ignore[override]
        assert device.type == "mps"
        if self.dtype == torch.float64:
            raise TypeError("the MPS framework doesn't support float64")
        return self


@pytest.mark.parametrize(
    ("dtype", "there"),
    [(torch.float64, torch.float32), (torch.float32, torch.float32), (torch.long, torch.long)],
    ids=str,
)
def test_an_apple_gpu_gets_float32_for_float64(dtype: torch.dtype, there: torch.dtype) -> None:
    assert put(torch.ones(2, dtype=dtype).as_subclass(Moved), torch.device("mps")).dtype == there


def test_an_apple_gpus_numbers_are_moved_before_they_are_widened() -> None:
    class There(torch.Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("mps")

        def to(self, other: Any) -> torch.Tensor:  # type: ignore[override]
            assert isinstance(other, torch.device), "the MPS framework doesn't support float64"
            return self.as_subclass(torch.Tensor)

    made = put_like(torch.ones(2).as_subclass(There), torch.zeros(1, dtype=torch.float64))
    assert (made.dtype, type(made)) == (torch.float64, torch.Tensor)


def test_other_devices_keep_the_precision() -> None:
    assert put(torch.ones(2, dtype=torch.float64), torch.device("cpu")).dtype == torch.float64


# --- the second of two GPUs -------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs, on which nothing is computed: the devices that were made the current one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1].index if current else 0)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *how, **named: self)
    return current


def test_a_model_is_used_on_the_gpu_that_was_asked_for(tmp_path: Path, chosen: list[torch.device]) -> None:
    """Generating, scoring, serving and classifying all begin with a loaded model."""
    small_model().save(tmp_path / "model")
    load(tmp_path / "model", device="cuda:1")
    assert chosen == [torch.device("cuda:1")]
    load(tmp_path / "model", device="cuda")  # the current one, which nobody changes
    load(tmp_path / "model", device="cpu")
    assert len(chosen) == 1


def test_a_model_in_memory_is_fine_tuned_on_its_own_gpu(
    chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event of the first GPU would say that the second one's numbers have arrived."""
    model = small_model()
    monkeypatch.setattr(type(model), "device", torch.device("cuda:1"))
    assert model_of(model, None) is model
    assert chosen == [torch.device("cuda:1")]


def test_training_and_measuring_are_on_the_gpu_that_was_asked_for(
    chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    with join_world("cuda:1") as world:
        assert world.device == torch.device("cuda:1")
        assert chosen == [torch.device("cuda:1")]
    monkeypatch.setattr(jobs, "peak", lambda job: chosen[-1])
    sizes = dict.fromkeys(("hidden", "blocks", "heads", "length", "vocab", "batch"), 1)
    job = Job(task="train", version="peak", device="cuda:0", **sizes)
    assert jobs.measure(job) == torch.device("cuda:0")


def test_the_server_computes_on_its_models_gpu(chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device belongs to a thread, and that of a new one is the first GPU."""
    said: list[tuple[str, torch.device]] = []
    done = threading.Event()

    def noted(device: torch.device) -> None:
        said.append((threading.current_thread().name, device))
        done.set()

    monkeypatch.setattr(torch.cuda, "set_device", noted)
    model = small_model()
    monkeypatch.setattr(type(model), "device", torch.device("cuda:1"))
    engine = Engine(model)
    try:
        assert done.wait(10)
    finally:
        engine.close()
    assert said == [("unmask-engine", torch.device("cuda:1"))]


def test_kernels_and_graphs_leave_the_other_gpu_alone(
    chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With models on two GPUs only one is current: the other's network runs as plain torch."""
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    there: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=torch.device("cuda:1"))
    state: Any = SimpleNamespace(canvas=SimpleNamespace(tokens=there, label_B=None))
    predictor: Any = cuda_graphs.XTheta.__new__(cuda_graphs.XTheta)
    predictor.denoiser = SimpleNamespace(capturable=True)
    sampler: Any = SimpleNamespace(temperature_end=None)
    assert not kernels.fit(there)
    assert not cuda_graphs.can_replay(predictor, sampler, state)
    chosen.append(torch.device("cuda:1"))
    assert kernels.fit(there)
    assert cuda_graphs.can_replay(predictor, sampler, state)
