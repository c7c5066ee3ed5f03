"""The commands that docs/ gives for several machines, each machine a torchrun of its own on this one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from worlds import losses, make_config, write_text

from matrix import ALL
from unmask.config import RunConfig, to_dict

DOCS = Path(__file__).parents[2] / "docs"
LONG = 180.0  # seconds that anything may take on a busy machine


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


@contextmanager
def started(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    paths = os.pathsep.join([environment.pop("PATH", ""), str(Path(sys.executable).parent), os.environ["PATH"]])
    here = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": paths,
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=here | environment, stdout=out, stderr=out, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def written(folder: Path, **changes: Any) -> RunConfig:
    write_text(folder)
    config = make_config(folder, "run", **changes)
    (folder / "recipe.json").write_text(json.dumps(to_dict(config)))
    return config


def documented(folder: Path, out: str, *options: str) -> list[str]:
    """The documented command for two machines, of one process each, with options of torchrun's."""
    text = (DOCS / "scaling.md").read_text()
    (command,) = re.findall(r"(?s)```sh\n(torchrun --nnodes 2 .*?)```", text)
    place = {"first-machine:29400": f"localhost:{free_port()}", "recipe.toml": str(folder / "recipe.json")}
    place |= {"8": "1", "/shared/runs/run7": out}
    torchrun, *words = [place.get(word, word) for word in shlex.split(command.replace("\\\n", " "))]
    return [torchrun, *options, *words]


def saved(run: str) -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(run).glob("checkpoints/step-*"))


def check_losses(config: RunConfig) -> None:
    """All that was logged is what one process logs."""
    lines = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    alone = losses(dataclasses.replace(config, out=f"{config.out}-alone"))["losses"]
    assert {line["step"]: line["loss"] for line in lines if "loss" in line} == pytest.approx(alone, rel=1e-3)


@pytest.mark.skipif(not ALL, reason="the next test gives more of the same: make faults")
def test_two_machines_give_one_machines_losses(tmp_path: Path) -> None:
    config = written(tmp_path)
    words = documented(tmp_path, config.out)
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with started(words, logs[0]) as first, started(words, logs[1]) as second:
        codes = [process.wait(timeout=LONG) for process in (first, second)]
    assert codes == [0, 0], "\n".join(log.read_text()[-2000:] for log in logs)
    check_losses(config)


def test_two_machines_begin_again_when_a_process_of_one_dies(tmp_path: Path) -> None:
    config = written(tmp_path, steps=120, save_every=20, valid_every=1000, sample_every=0)
    words = documented(tmp_path, config.out, "--max-restarts", "2")
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def told() -> str:
        return "\n".join(log.read_text() for log in logs)

    with started(words, logs[0], **apart) as first, started(words, logs[1], **apart) as second:
        end = time.monotonic() + LONG
        while not saved(config.out):
            assert first.poll() is None, told()
            assert time.monotonic() < end, told()
            time.sleep(0.05)
        (worker,) = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        codes = [process.wait(timeout=LONG) for process in (first, second)]
    assert codes == [0, 0], told()
    assert saved(config.out)[-1] == 120
    assert "going on from step" in told()
    ours = [line for line in told().splitlines() if "torch/distributed/elastic" not in line]
    assert not any("Traceback" in line for line in ours)  # torchrun logs one of its own where a machine leaves first
    check_losses(config)


@pytest.mark.skipif(not ALL, reason="waits for what does not come: make faults")
def test_machines_that_would_not_meet_again_are_told_before_they_begin(tmp_path: Path) -> None:
    config = written(tmp_path)
    words = documented(tmp_path, config.out, "--max-restarts", "1")
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with started(words, logs[0]) as first, started(words, logs[1]) as second:
        codes = [process.wait(timeout=LONG) for process in (first, second)]
    assert 0 not in codes
    told = "".join(log.read_text() for log in logs)
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, on every machine" in told
    assert not saved(config.out)


def test_the_job_for_slurm_saves_when_told_and_queues_again(tmp_path: Path) -> None:
    """A run that was stopped before goes on until it is told to stop; srun and scontrol are stand-ins."""
    config = written(tmp_path, steps=1_000_000, valid_every=1_000_000, save_every=20)
    assert losses(config, stop_at=3)["stopped"]
    (reached,) = saved(config.out)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, body in {
        "srun": 'echo $$ > "$HERE/srun.pid"\nexec "$@"',
        "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$HERE/queued"; fi',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    script = (DOCS / "slurm.sh").read_text()
    for old, new in {
        "/shared/runs/run7": config.out,
        "RECIPE=recipe.toml": f"RECIPE={tmp_path / 'recipe.json'}",
        "--nproc-per-node 8": "--nproc-per-node 2",
        ":29400": f":{free_port()}",
    }.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    job, log = tmp_path / "slurm.sh", tmp_path / "job.log"
    job.write_text(script)
    environment = {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "this", "SLURM_JOB_ID": "7", "HERE": str(tmp_path)}
    environment["PATH"] = str(tools)

    with started(["bash", str(job)], log, **environment) as process:
        end = time.monotonic() + LONG
        while saved(config.out)[-1] < reached + 20:
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.1)
        os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR1)  # as SLURM does, to the steps of the job
        process.wait(timeout=LONG)
    assert (tmp_path / "queued").read_text().splitlines() == ["requeue 7"], log.read_text()[-2000:]
    told = re.findall(r"stopped at step (\d+)", log.read_text())
    assert told
    assert saved(config.out)[-1] == int(told[-1])
    assert f"going on from step {reached}" in log.read_text()
