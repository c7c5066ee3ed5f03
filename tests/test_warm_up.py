"""The discarded step that prepares a GPU: it changes nothing, and it ends with the block, even by an error."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import TINY
from unmask.config import load_config
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.mamba import Mamba
from unmask.denoisers.network import Network
from unmask.distributed.world import World
from unmask.kernels.ahead import compiling_ahead
from unmask.objectives.ar import AR
from unmask.objectives.sedd import SEDD
from unmask.training.loop import train
from unmask.training.warm_up import discarded_step, warming_up

PARTS = ["network", "gradients", "update", "validation"]
FAST = load_config("fast")
SMALL_FAST = replace(FAST.denoiser, size="nano", hidden=16, blocks=2, heads=2)  # type: ignore[type-var]


def forced(seen: list[str]) -> Any:
    """In place of `warming_up`: the whole step on the CPU, before the texts are packed."""

    @contextlib.contextmanager
    def on_the_cpu(config: Any, tokenizer: Any, build: Any, autocast: Any, world: World) -> Iterator[None]:
        seen.extend(discarded_step(config, tokenizer, build, autocast, world.device))
        yield

    return on_the_cpu


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data": {"packing": "sentence"}},
        {"objective": AR(), "denoiser": replace(TINY, causal=True)},
        {"objective": SEDD(), "denoiser": replace(TINY, dropout=0.1)},
        {"optim": {"muon": True, "ema": 0.0}, "micro_batch": 2},
        {"objective": FAST.objective, "denoiser": SMALL_FAST, "optim": {"muon": True}, "precision": "bf16"},
        {"objective": AR(), "denoiser": Mamba(hidden=16, blocks=1), "precision": "bf16"},
    ],
    ids=["mdlm", "padded", "ar", "sedd", "muon", "fast", "mamba"],
)
def test_a_run_is_the_same_with_it(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    plain = train(make_config(out=tmp_path / "plain", steps=3, **options), device="cpu")
    seen: list[str] = []
    monkeypatch.setattr("unmask.training.state.warming_up", forced(seen))
    warmed = train(make_config(out=tmp_path / "warmed", steps=3, **options), device="cpu")
    assert seen == PARTS
    for (name, a), b in zip(plain.denoiser.state_dict().items(), warmed.denoiser.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_it_needs_no_more_memory_than_the_run(tmp_path: Path, make_config: Any) -> None:
    config, tokenizer = make_config(out=tmp_path, checkpoint_activations=True), load_tokenizer("bytes")
    built: list[Network] = []

    def build() -> Network:
        built.append(config.denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id))
        return built[0]

    assert list(discarded_step(config, tokenizer, build, contextlib.nullcontext, torch.device("cpu"))) == PARTS
    assert built[0].checkpoint_activations


class Fake(contextlib.AbstractContextManager[None]):
    """Stands for a GPU: nothing is created on it, since the network is never built."""

    type = "cuda"

    def __exit__(self, *error: object) -> None:
        return None


def test_it_ends_with_the_block_and_an_error_is_left_to_the_run(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tokenizer = make_config(out=tmp_path), load_tokenizer("bytes")
    built = threading.Event()

    def build() -> Network:
        built.set()
        time.sleep(0.2)
        raise RuntimeError("no network")

    gpu = World(device=Fake())  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = threading.active_count()
    with warming_up(config, tokenizer, build, contextlib.nullcontext, gpu):
        assert built.wait(10)
    assert threading.active_count() == before


def test_it_takes_the_gpu_of_the_main_thread(tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's current device belongs to a thread, and that of a new one is the first GPU."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def build() -> Network:
        assert chosen == [3]
        raise RuntimeError("no network")

    gpu = World(device=Fake())  # type: ignore[arg-type]
    with warming_up(make_config(out=tmp_path), load_tokenizer("bytes"), build, contextlib.nullcontext, gpu):
        pass
    assert chosen == [3]


def test_an_error_while_packing_waits_for_no_further_part(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def parts(*_: object) -> Iterator[str]:
        for part in PARTS:
            if part == "gradients":
                begun.set()
                assert go_on.wait(10)
            done.append(part)
            yield part

    monkeypatch.setattr("unmask.training.warm_up.discarded_step", parts)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, *how: (go_on.set(), join(self, *how))[1])
    gpu, config = World(device=Fake()), make_config(out=tmp_path)  # type: ignore[arg-type]

    def pack() -> None:
        with warming_up(config, load_tokenizer("bytes"), lambda: None, contextlib.nullcontext, gpu):  # type: ignore[arg-type, return-value]
            assert begun.wait(10)
            raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        pack()
    assert done == PARTS[:2]


def test_a_cpu_has_nothing_to_warm_up(tmp_path: Path, make_config: Any) -> None:
    def build() -> Network:
        raise AssertionError("a network was built")

    with warming_up(make_config(out=tmp_path), load_tokenizer("bytes"), build, contextlib.nullcontext, World()):
        assert not [thread for thread in threading.enumerate() if thread.name == "warm-up"]


def test_kernels_are_compiled_in_other_threads_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    mode = pytest.importorskip("triton.runtime._async_compile").active_mode
    begun, seen = threading.Barrier(2), dict[str, str]()

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name, self.launchers = name, 0

        @property
        def run(self) -> None:
            """What Triton makes at a kernel's first launch."""
            self.launchers += 1

    def compile(name: str) -> Kernel:
        begun.wait(10)  # both at once
        seen[name] = threading.current_thread().name
        return Kernel(name)

    def refuse() -> Kernel:
        raise RuntimeError("does not compile")

    ready: list[Kernel] = []
    with compiling_ahead(3) as ahead:
        assert ahead
        for name in ("forward", "backward", "forward"):
            assert mode.get().submit(name, lambda name=name: compile(name), ready.append) is None
        assert mode.get().submit("bad", refuse, ready.append) is None
        other: list[Any] = []
        thread = threading.Thread(target=lambda: other.append(mode.get()))
        thread.start()
        thread.join()
        assert other == [None]
        assert not torch.autograd.is_multithreading_enabled()
    assert mode.get() is None
    assert torch.autograd.is_multithreading_enabled()
    assert sorted((kernel.name, kernel.launchers) for kernel in ready) == [("backward", 1), ("forward", 1)]
    assert len(chosen) > 1
    assert set(chosen) == {3}
    assert all(name.startswith("compile") for name in seen.values())


def test_an_older_triton_compiles_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")

    class Older:
        def __init__(self, executor: object) -> None:
            raise AssertionError("it would stop at the first kernel that does not compile")

    monkeypatch.setattr(triton, "AsyncCompileMode", Older)
    with compiling_ahead(0) as ahead:
        assert not ahead


@pytest.mark.parametrize("when", ["at its begin", "at its end", "in the step"])
def test_the_step_is_taken_also_if_nothing_is_compiled_ahead(
    when: str, tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    ended = threading.Event()

    @contextlib.contextmanager
    def failing(gpu: int) -> Iterator[bool]:
        if when == "at its begin":
            raise RuntimeError("no compiler")
        yield when == "in the step"
        if when == "at its end":
            raise RuntimeError("no compiler")

    def parts(*_: object) -> Iterator[str]:
        if when == "in the step" and not ended.is_set():
            ended.set()
            raise ValueError("not a number")
        for part in PARTS:
            done.append(part)
            yield part
        ended.set()

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("unmask.training.warm_up.compiling_ahead", failing)
    monkeypatch.setattr("unmask.training.warm_up.discarded_step", parts)
    gpu = World(device=Fake())  # type: ignore[arg-type]
    config, tokenizer = make_config(out=tmp_path), load_tokenizer("bytes")
    with warming_up(config, tokenizer, lambda: None, contextlib.nullcontext, gpu):  # type: ignore[arg-type,return-value]
        deadline = time.time() + 10
        while done != PARTS and time.time() < deadline:
            time.sleep(0.01)
    assert done == PARTS


def test_no_second_network_is_built_when_the_texts_were_packed_first(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    go_on = threading.Event()

    def parts(*_: object) -> Iterator[str]:
        begun.append("a step")
        assert go_on.wait(10)
        yield from PARTS

    monkeypatch.setattr("unmask.training.warm_up.discarded_step", parts)
    monkeypatch.setattr("unmask.training.warm_up.compiling_ahead", lambda gpu: contextlib.nullcontext(True))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, *how: (go_on.set(), join(self, *how))[1])
    gpu, config = World(device=Fake()), make_config(out=tmp_path)  # type: ignore[arg-type]
    with warming_up(config, load_tokenizer("bytes"), lambda: None, contextlib.nullcontext, gpu):  # type: ignore[arg-type,return-value]
        pass
    assert begun == ["a step"]
