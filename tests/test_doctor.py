"""`unmask doctor`: a healthy machine is told so, and each ill has its sentence."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from unmask import doctor
from unmask.cli import run
from unmask.doctor import Finding, examine
from unmask.errors import UsageError


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {f.what: f.verdict for f in findings}


def test_a_healthy_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--device", "cpu", "--out", str(tmp_path / "not" / "there")]) == 0
    out = capsys.readouterr().out
    for what in ("versions", "device", "disk", "network", "training", "resuming", "sampling"):
        assert f"ok       {what}" in out
    assert "bit for bit" in out
    assert out.endswith("this machine is fine\n")
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


def test_a_full_disk_and_a_closed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    sentences = [f.sentence for f in doctor.disk(tmp_path)]
    assert "make room" in sentences[0]
    assert "give another --out" in sentences[1]


def test_what_breaks_down_is_a_finding_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no\nsuch thing")

    monkeypatch.setattr(doctor, "network", broken)
    monkeypatch.setattr(doctor, "self_check", lambda device: iter([Finding("training", "ok", "fine")]))
    found = {f.what: f for f in examine("cpu")}
    assert found["network"].verdict == "problem"
    assert found["network"].sentence == "broke down with RuntimeError: no such thing"
    assert found["training"].verdict == "ok"


def test_a_network_that_fails_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_EXCHANGE", "raise OSError('no route')")
    assert [f.sentence for f in doctor.network()] == [
        "an exchange of 2 processes over gloo and the loopback failed: OSError: no route"
    ]
    monkeypatch.setattr(doctor, "_EXCHANGE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "NETWORK_SECONDS", 1)
    assert "hung for 1 s" in next(doctor.network()).sentence


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("here it is there")
    monkeypatch.setattr(doctor, "self_check", lambda device: iter(()))
    assert run(["doctor", "--device", "cuda", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["problems"] == 1
    sentence = next(f["sentence"] for f in answer["findings"] if f["verdict"] == "problem")
    with pytest.raises(UsageError) as error:
        next(doctor.devices("cuda"))
    assert sentence == str(error.value)


def test_a_network_that_learns_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.training.loop.learning_rate", lambda config, step, num_steps: 0.0)
    found = verdicts(list(doctor.self_check("cpu")))
    assert found["training"] == "problem"
    assert found["resuming"] == "ok"
