"""`unmask bench`: the FLOP formulas against torch's own counter, the textbook against ours, the command's answers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from unmask.bench import Job, Result, flops, run_job, textbook
from unmask.bench.jobs import count_row_calls, measure
from unmask.cli import run
from unmask.denoisers.dit import DiT
from unmask.objectives.mdlm import MDLM
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.semi_ar import SemiAR
from unmask.sampling.canvas import Canvas

B, L, D, V = 4, 16, 32, 99
SIZES = {"length": L, "hidden": D, "blocks": 2, "vocab": V + 1}
JOB = Job(
    task="train", version="unmask", device="cpu", hidden=D, blocks=2, heads=2, length=L, vocab=V, batch=B,
    precision="fp32", steps=8, total=40, stride=8, repeats=2,
)  # fmt: skip
SMALL = [
    "--device",
    "cpu",
    "--hidden",
    "32",
    "--blocks",
    "1",
    "--heads",
    "2",
    "--length",
    "16",
    "--vocab",
    "50",
    "--batch",
    "2",
    "--steps",
    "4",
    "--repeats",
    "1",
]


def test_the_formulas_count_what_torch_counts() -> None:
    """A full-logits step forward and backward; attention written out, so that its products are seen."""
    net = DiT(hidden=D, blocks=2, heads=2, dropout=0.0).build(num_ids=V + 1, mask_id=V)
    x = torch.randint(0, V, (B, L))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            net(x)
        with FlopCounterMode(display=False) as both:
            textbook.loss(net, x).backward()  # type: ignore[no-untyped-call]
    row_calls = flops.denoise(row_calls=B, tokens=B * L, **SIZES)
    assert forward.get_total_flops() == pytest.approx(row_calls, rel=1e-6)
    assert both.get_total_flops() == pytest.approx(flops.train(tokens=B * L, masked=B * L, **SIZES), rel=1e-6)


def test_the_textbooks_loss_estimates_the_same_bound() -> None:
    torch.manual_seed(0)
    net = DiT(hidden=D, blocks=1, heads=2, dropout=0.0, zero_init=False).build(num_ids=V + 1, mask_id=V)
    torch.nn.init.normal_(net.output.weight, std=0.5)
    x = torch.randint(0, V, (2, L))
    with torch.no_grad():
        plain = torch.stack([textbook.loss(net, x) for _ in range(600)])
    ours = MDLM().bound(net, x, num_samples=600)
    assert float(plain.mean()) == pytest.approx(ours.nats_per_token, abs=5 * float(plain.std()) / 600**0.5)


def test_rows_of_calls_come_from_the_plan() -> None:
    blank = Canvas.blank(num=3, length=L, mask_id=V)
    assert count_row_calls(blank, Ancestral(steps=None)) == 3 * L
    assert count_row_calls(blank, Ancestral(steps=1)) == 3
    windows = SemiAR(window=8, stride=4, inner=Ancestral(steps=None))
    assert count_row_calls(blank, windows) == 3 * L  # every position opens once, in whatever window


@pytest.mark.parametrize("task", ["train", "sample", "semi-ar", "ar"])
@pytest.mark.parametrize("version", ["textbook", "unmask"])
def test_every_job_runs(task: str, version: str) -> None:
    result = measure(replace(JOB, task=task, version=version, profile=True))  # type: ignore[arg-type]
    assert result.seconds
    assert min(result.seconds) > 0
    assert result.tokens == B * (40 if task == "semi-ar" else L)
    assert result.flops > 0
    assert any(ms > 0 for _, _, ms in result.profile)


def test_the_peak_is_one_large_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.bench.jobs.clocked", lambda device, work: 2.0)  # the product itself takes long
    result = measure(replace(JOB, version="peak"))
    assert result.flops == 2 * 2048**3
    assert result.seconds == [0.2] * 3


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement in a process of its own, but for the peak."""

    def without_the_product(job: Job) -> Result:
        peak = Result(seconds=[1e-3], tokens=0, flops=1e9, peak_bytes=0, warm_up=0.0)
        return peak if job.version == "peak" else run_job(job)

    monkeypatch.setattr("unmask.bench.run_job", without_the_product)
    assert run(["bench", "sample", *SMALL, "--calls", "2"]) == 0
    out = capsys.readouterr().out
    assert "FLOP = " in out
    assert "MFU" in out
    assert "× the speed" in out
    assert "2 of its 4 equal calls timed, scaled up" in out
    assert run(["bench", "train", *SMALL, "--no-textbook", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["options"]["hidden"] == 32
    assert {"seconds", "tokens_per_second", "tflops", "mfu", "peak_gb"} <= answer["unmask"].keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--batch", "0"], "--batch must be at least 1"),
        (["semi-ar", "--length", "64", "--stride", "65"], "--stride 65 is beyond the window"),
        (["tran"], "is not a choice"),
        (["train", "--hidden", "33"], "must be a multiple of 2"),
    ],
)
def test_bad_options_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *words, "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
