"""What a process finds when it joins the others: its surroundings, their patience, and what an earlier job left."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from worlds import losses, make_config, write_text

from unmask.config import RunConfig
from unmask.distributed.watchdog import Watchdog
from unmask.distributed.world import World, join_world
from unmask.errors import Stopped, UsageError
from unmask.training.checkpoint.resume import find_checkpoint, mark_begun, stopped


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE=x is no number"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is set and MASTER_ADDR is not"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "WORLD_SIZE is set and MASTER_PORT is not"),
        ({"TORCHELASTIC_RESTART_COUNT": "-"}, "TORCHELASTIC_RESTART_COUNT=- is no number"),
    ],
)
def test_half_an_environment_is_told(environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said), join_world("cpu"):
        pass


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_to_wait_that_is_none_is_told(timeout: float) -> None:
    with pytest.raises(UsageError, match="above 0 seconds"), join_world("cpu", timeout=timeout):
        pass


class NoStore:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


def test_a_store_that_is_gone_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = threading.Event()
    watchdog = Watchdog(NoStore(), rank=1, size=2, timeout=0.5)

    def leave(code: int) -> None:
        left.set()
        watchdog._stop.set()

    monkeypatch.setattr("unmask.distributed.watchdog.os._exit", leave)
    with watchdog:
        time.sleep(1.5)
        assert not left.is_set()  # nobody is timed before the first step
        watchdog.armed = True
        watchdog.tick()
        assert left.wait(20)
    assert "rank 1: no progress for 0 s; the process that keeps the group" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of twelve steps, done, and a job of torchrun's with a name that was used before."""
    write_text(tmp_path)
    config = make_config(tmp_path, "run", valid_every=12, sample_every=0)
    losses(config)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run7")
    return config


def found(config: RunConfig, restarts: int, *, resume: bool = False) -> int | None:
    checkpoint = find_checkpoint(config, World(restarts=restarts), resume=resume)
    return None if checkpoint is None else checkpoint.step


def test_a_restart_goes_on_only_where_its_job_has_begun(run: RunConfig) -> None:
    for restarts in (0, 1):  # refused at first, and so when torchrun tries again
        with pytest.raises(UsageError, match="holds a run at step 12; go on with --resume"):
            found(run, restarts)
    mark_begun(run, World())
    assert found(run, 1) == 12
    with pytest.raises(UsageError, match="holds a run at step 12"):  # another job of the same name
        found(run, 0)
    with pytest.raises(UsageError, match="holds a run at step 12"):
        found(run, 1)


def test_a_stop_of_an_earlier_job_is_no_stop_of_this_one(run: RunConfig) -> None:
    longer = make_config(Path(run.out).parent, "run", steps=20)
    mark_begun(longer, World())
    stopped(longer, World(), 12)
    with pytest.raises(Stopped):  # torchrun starts again what was asked to stop
        found(longer, 1)
    assert found(longer, 0, resume=True) == 12
    mark_begun(longer, World())
    assert found(longer, 1) == 12
