"""What a run tells while it trains: plain lines where nobody watches, samples for what is held out."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tiny import TINY, MakeConfig
from unmask.cli._terminal import TrainProgress
from unmask.config import RunConfig
from unmask.corpora.jsonl import Jsonl
from unmask.training.callbacks import Callback, Sample, StepReport
from unmask.training.loop import train

INFO = {"train": "", "valid": "", "processes": 1, "parameters": 1, "device": "cpu", "skipped": [], "resumed_step": 0}


def told(capsys: pytest.CaptureFixture[str], pattern: str) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if re.search(pattern, line)]


def test_the_loss_stands_in_a_log_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainProgress()
    progress.on_start(RunConfig(steps=100, log_every=5), INFO)
    for step in range(1, 101):  # a second each
        progress.on_step(StepReport(step, 4.0 - step / 100, 1e-3, 1.0, 5000.0, float(step)))
    lines = told(capsys, "loss")
    assert [int(line.split()[1]) for line in lines] == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95, 100]
    assert re.fullmatch(r"step +25  loss 3\.7500, lr 1\.00e-03, 5,000 tok/s, eta 0:01:15", lines[2])


def test_a_resumed_run_reckons_by_its_own_steps(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainProgress()
    progress.on_start(RunConfig(steps=200, log_every=1), INFO | {"resumed_step": 100})
    progress.on_step(StepReport(150, 1.0, 1e-3, 1.0, 1.0, 100.0))
    assert told(capsys, "eta 0:01:40")


class Samples(Callback):
    def __init__(self) -> None:
        self.texts: list[Sample] = []

    def on_sample(self, step: int, text: str) -> None:
        assert isinstance(text, Sample)
        self.texts.append(text)


def pairs(path: Path, kinds: bool) -> tuple[Jsonl, Jsonl]:
    """Prompts that are trained on and others that are held out, of letters each."""
    corpora = []
    for name, letters in (("train", "abcd"), ("valid", "wxyz")):
        lines = [
            {"q": f"{letter * 3}:", "text": letter * 4, "kind": ("up", "down")[i % 2]}
            for i, letter in enumerate(letters)
        ]
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        label = {"label_field": "kind"} if kinds else {}
        corpora.append(Jsonl(path=str(path / f"{name}.jsonl"), prompt_field="q", **label))
    return corpora[0], corpora[1]


@pytest.mark.parametrize("kinds", [False, True])
def test_samples_are_for_held_out_prompts_and_tell_their_label(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str], kinds: bool
) -> None:
    corpus, valid = pairs(tmp_path, kinds)
    config = make_config(
        tmp_path / "run",
        steps=6,
        batch=4,
        sample_every=1,
        denoiser=dataclasses.replace(TINY, classes=2 if kinds else 0),
        data={"train": corpus, "valid": valid, "packing": "pad", "length": 12},
    )
    samples = Samples()
    train(config, callbacks=[samples, TrainProgress()], device="cpu")
    prompts = {text.prompt for text in samples.texts}
    assert prompts <= {f"{letter * 3}:" for letter in "wxyz"}
    assert len(prompts) > 1
    assert all(text == text.prompt + text.continuation for text in samples.texts)
    labels = {text.prompt: text.label for text in samples.texts}
    right = {"www:": "up", "xxx:": "down", "yyy:": "up", "zzz:": "down"}
    assert labels == ({prompt: right[prompt] for prompt in prompts} if kinds else dict.fromkeys(prompts))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    written = [line for line in lines if "sample" in line]
    assert [line["prompt"] for line in written] == [text.prompt for text in samples.texts]
    assert [line.get("label") for line in written] == [text.label for text in samples.texts]
    assert told(capsys, r"sample of (up|down) after '...:': '" if kinds else "sample after '...:': '")


def test_a_sample_is_one_line_of_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainProgress()
    progress.on_start(RunConfig(), INFO)
    progress.on_sample(7, "a long text\n" * 40)
    assert told(capsys, "sample: .*'$")


def test_a_prompt_that_fits_no_canvas_ends_no_run(tmp_path: Path, make_config: MakeConfig) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"q": "a[MASK]b", "text": f"{i}"}) for i in range(4)))
    corpus = Jsonl(path=str(path), prompt_field="q")
    data = {"train": corpus, "valid": corpus, "packing": "pad", "length": 12}
    samples = Samples()
    train(make_config(tmp_path / "run", steps=2, sample_every=1, data=data), callbacks=[samples], device="cpu")
    assert [text.prompt for text in samples.texts] == ["", ""]


def test_tensorboard_is_told_the_same_numbers(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the package: what is handed to it, and where its files are asked for."""
    scalars: list[tuple[str, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (Path(folder), purge_step) == (tmp_path / "run" / "tensorboard", 1)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, step))

        def add_text(self, name: str, text: str, step: int) -> None:
            scalars.append((name, step))

        def close(self) -> None:
            scalars.append(("closed", 0))

    package: Any = types.ModuleType("tensorboard")
    package.__spec__ = types.SimpleNamespace(name="tensorboard")
    writer: Any = types.ModuleType("torch.utils.tensorboard")
    writer.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    train(make_config(tmp_path / "run", steps=4, log_every=2, valid_every=4, sample_every=4), device="cpu")
    assert {("train/loss", 2), ("train/lr", 4), ("valid/nats_per_token", 0), ("valid/ppl", 4), ("sample", 4)} <= {
        *scalars
    }
    assert ("train/loss", 1) not in scalars
    assert scalars[-1] == ("closed", 0)


def test_the_machines_that_trained_a_run_are_kept(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its checkpoints, in order, each once where it goes on there."""
    for steps, where in ((1, "a"), (2, "a"), (3, "b")):
        monkeypatch.setattr("unmask.training.state.made_with", lambda where=where: {"unmask": "0", "machine": where})
        train(make_config(tmp_path / "run", steps=steps), device="cpu", resume=steps > 1)
    state = json.loads((tmp_path / "run/checkpoints/step-00000003/state.json").read_text())
    assert [one["machine"] for one in state["made_with"]] == ["a", "b"]
