"""One run, whatever the number of processes: gradients, losses, bounds, stops and checkpoints on 1, 2 and 4 of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from worlds import (
    COMPILED,
    DTYPES,
    KINDS,
    MUON,
    RESHARDED,
    RESUMED,
    SIZES,
    STEPPED,
    WAYS,
    WAYS_OF,
    losses,
    make_config,
    one_step,
    windows,
    write_text,
)

from matrix import ALL, environment
from unmask.distributed.world import World
from unmask.training.run_lock import one_writer

WORKER = Path(__file__).with_name("worlds.py")


def run(command: list[str], timeout: float = 600) -> subprocess.CompletedProcess[str]:
    here = environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def start(size: int, *words: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return run([*torchrun, *words], timeout)


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds")
    write_text(folder)
    worlds = {
        4: f"{'gradients,losses,resume,' if ALL else ''}reshard,muon",
        2: "gradients,losses,resume,learned,ends,reshard,fallback,windows,nonfinite,errors",
    }
    words = [f"{size}:{asked}" for size, asked in worlds.items()]
    with one_writer(folder / "held", World()):
        if sys.platform == "linux" and not ALL:  # one process loads torch for all
            run([sys.executable, str(WORKER), str(folder), *words])
        else:
            for size, each in zip(worlds, words, strict=True):
                start(size, str(WORKER), str(folder), each)
    return folder


def found(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])
def test_gradients_do_not_depend_on_the_processes(worked: Path, kind: str, dtype: torch.dtype) -> None:
    limit = 1e-6 if dtype is torch.float32 else 1e-10
    alone = one_step(make_config(worked, "alone", kind), World(), dtype)
    paths = [
        worked / f"gradients-{size}-{kind}-{way}-{micro}-{str(dtype)[6:]}.safetensors"
        for size, steps in STEPPED.items()
        for this, (way, micro), of in steps
        if (this, of) == (kind, dtype)
    ]
    assert paths
    assert {way for steps in STEPPED.values() for this, way, _ in steps if this == kind} == set(WAYS)
    for path in paths:
        together = load_file(path)
        assert together.keys() == alone.keys()
        assert float(together.pop("loss")) == pytest.approx(float(alone["loss"]), rel=limit)
        assert float(together.pop("norm")) == pytest.approx(float(alone["norm"]), rel=3 * limit)  # a sum of squares
        off = sum(float((g - alone[k]).double().square().sum()) for k, g in together.items()) ** 0.5
        size_of = sum(float(alone[k].double().square().sum()) for k in together) ** 0.5
        assert off <= limit * size_of, f"{path.name}: {off / size_of:.1e}"


@pytest.fixture(scope="module")
def alone(worked: Path) -> Any:
    """20 steps of one process."""
    return losses(make_config(worked, "alone-20", steps=20))


@pytest.mark.parametrize(("size", "way", "micro"), [(size, *way) for size in WAYS_OF for way in WAYS_OF[size]])
def test_twenty_steps_are_the_same(worked: Path, alone: Any, size: int, way: str, micro: int | None) -> None:
    first, *others = found(worked, f"losses-{way}-{micro}-{size}")
    assert {int(k): v for k, v in first["losses"].items()} == pytest.approx(alone["losses"], rel=1e-4)
    assert {int(k): v for k, v in first["bounds"].items()} == pytest.approx(alone["bounds"], rel=1e-4)
    assert all(not other["losses"] for other in others)  # only the first process talks


def test_shifted_windows_are_the_same(worked: Path) -> None:
    alone, fixed = (losses(windows(worked, f"alone-{how}", how))["losses"] for how in ("shifted", "fixed"))
    first = found(worked, "windows-2")[0]["losses"]
    assert {int(k): v for k, v in first.items()} == pytest.approx(alone, rel=1e-4)
    assert {step for step in alone if alone[step] != fixed[step]} == set(range(6, 21))  # from the second epoch on


@pytest.mark.parametrize("size", SIZES)
def test_activations_computed_again_change_nothing(worked: Path, size: int) -> None:
    plain = losses(make_config(worked, f"plain-{size}"))
    first = found(worked, f"checkpointed-{size}")[0]
    assert list(first["losses"].values()) == pytest.approx(list(plain["losses"].values()), rel=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    worked: Path, size: int, tally: Callable[..., None]
) -> None:
    names = sorted(path.stem for path in worked.glob(f"resume-*-{size}.json"))
    assert len(names) == len(RESUMED[size])
    tally(f"runs stopped twice and gone on with bit for bit, {size} processes", len(names))
    for name in names:
        for rank, facts in enumerate(found(worked, name)):
            assert facts == {"stops": [True, True, False], "same losses": True, "same state": True}, (name, rank)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_learned_schedule_resumes_bit_for_bit(worked: Path, way: str) -> None:
    for rank, facts in enumerate(found(worked, f"learned-{way}-2")):
        unused, still = facts.pop("unused"), facts.pop("still")
        assert facts == {"stops": [True, True, False], "same losses": True, "same state": True}, rank
        assert still  # what no step uses waits for nobody and does not move
        assert len(unused) == (12 if rank == 0 else 0)


def test_a_callback_of_the_first_process_ends_the_run_for_all(worked: Path) -> None:
    facts = found(worked, "ends-2")
    assert facts[0] == facts[1]
    assert facts[0]["step"] == 4  # asked for after step 3, known to all with the numbers of the next


def test_a_run_goes_on_with_other_processes(worked: Path, alone: Any) -> None:
    """Shares of four, of two, copies on two, shares again from a whole checkpoint, and one process to the end."""
    reference = losses(make_config(worked, "reference"))["losses"]
    ways = [(size, *way) for size in (4, 2) for way in RESHARDED[size]]
    parts = [found(worked, f"reshard-{stop_at}-{size}")[0] for size, _, _, stop_at in ways]
    assert [part["stopped"] for part in parts] == [True] * len(ways)
    last = losses(make_config(worked, "reshard"), resume=True)
    firsts = [min(map(int, part["losses"])) for part in [*parts, last]]
    assert firsts == sorted(set(firsts))  # each went on where the one before it stopped
    joined = {int(k): v for part in [*parts, last] for k, v in part["losses"].items()}
    assert joined == pytest.approx(reference, rel=1e-4)
    shares = {path.name: len(list(path.glob("shard-*"))) for path in (worked / "reshard").glob("checkpoints/step-*")}
    assert shares == {f"step-{step:08d}": n for step, n in ((4, 4), (6, 2), (8, 0), (10, 0), (12, 0))}
    assert last["skipped"] == []


def test_a_damaged_share_is_passed_over_by_all(worked: Path) -> None:
    for rank, facts in enumerate(found(worked, "fallback-2")):
        assert facts["same"], rank  # bit for bit, saved anew
        if rank == 0:
            assert len(facts["skipped"]) == 1
            assert "step-00000012/shard-00002-model-00001-of-00001.safetensors is damaged" in facts["skipped"][0]
            assert facts["losses"] == {step: facts["before"][step] for step in ("9", "10", "11", "12")}


def test_muon_turns_matrices_that_are_cut(worked: Path) -> None:
    alone = losses(make_config(worked, "muon-alone", **MUON))
    whole = found(worked, "muon-fsdp-4")[0]["losses"]
    for way in ("ddp", "fsdp"):
        together = {int(k): v for k, v in found(worked, f"muon-{way}-4")[0]["losses"].items()}
        assert together == pytest.approx(alone["losses"], rel=1e-4), way
    for step, loss in found(worked, "muon-resumed-4")[0]["losses"].items():
        assert loss == whole[step]  # momenta come back by shares, bit for bit


@pytest.mark.skipif(not ALL, reason="compiles for minutes: make faults")
def test_compiled_runs_are_the_same(worked: Path) -> None:
    start(2, str(WORKER), str(worked), "2:compile", timeout=1200)
    for way, precision in COMPILED:
        alone = losses(make_config(worked, f"compile-alone-{way}", precision=precision))
        first, *_ = found(worked, f"compile-{way}-2")
        assert first["graphs"] > 0
        limit = 1e-4 if precision == "fp32" else 1e-2
        assert {int(k): v for k, v in first["losses"].items()} == pytest.approx(alone["losses"], rel=limit)


def test_one_process_with_a_bad_gradient_is_everybodys_affair(worked: Path) -> None:
    for rank, facts in enumerate(found(worked, "nonfinite-2")):
        if rank == 0:
            assert [note.partition(" at step")[0] for note in facts["notes"]] == ["loss nan", "loss nan"]
            assert sorted(map(int, facts["losses"])) == [1, 2, 4, 5, 7, 8, 9, 10, 11, 12]
        assert "loss nan at step 3" in facts["stop"]
        assert "checkpoints" in facts["stop"]
        assert "loss nan at step 6" in facts["limit"]
        assert "after 1 skipped" in facts["limit"]


def test_rows_that_cannot_be_shared_are_told(worked: Path) -> None:
    for facts in found(worked, "uneven-2"):
        assert facts["said"].startswith("a batch of 5 rows cannot be divided among 2 processes")


def test_a_folder_that_is_being_written_is_refused_to_all(worked: Path) -> None:
    first, second = found(worked, "held-2")
    refusal = f"{worked / 'held'} is being written by process {os.getpid()} on "
    assert first["said"].startswith(refusal)
    assert second["said"].startswith(f"rank 1: rank 0 failed: {refusal}")
    assert not (worked / "held").exists()


LEAVING = """
import atexit, gc, os, weakref, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from unmask.distributed.world import join_world

class Holder:
    pass

# Registered first, so called last; one write, which the other process's cannot part.
atexit.register(lambda: os.write(1, b"ended\\n" if holder() is None else b"outlives\\n"))
with join_world("cpu") as world:
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.days, "while one reads, others wait"
    gc.disable()
    cycle = Holder()
    cycle.itself, cycle.group = cycle, init_device_mesh("cpu", (world.size,)).get_group()
    dist.all_reduce(torch.ones(1000), group=cycle.group)
    holder = weakref.ref(cycle)
    del cycle
"""


def test_no_group_outlives_python(tmp_path: Path) -> None:
    """One that sits in a cycle would: its threads then abort the process on its way out, every third time or so."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    assert start(2, str(script)).stdout.split() == ["ended", "ended"]
