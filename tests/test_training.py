"""The training loop: what it reports, what it keeps, what it refuses, and that its arithmetic does not depend on how
a batch is cut."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import unmask
import unmask.denoisers.dit
import unmask.training.loop
import unmask.training.state
from tiny import PLAIN
from unmask.config import OptimConfig, RunConfig, load_config
from unmask.corpora.jsonl import Jsonl
from unmask.corpora.text import Text
from unmask.data.batch import make_batch
from unmask.data.packing import build_rows
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network
from unmask.devices import pick_precision
from unmask.distributed.world import World
from unmask.errors import ConfigError, DataError, ModelFolderError, NonFiniteError, UsageError
from unmask.evaluation.bound import Bound
from unmask.model import load
from unmask.noise.log_linear import LogLinear
from unmask.objectives.ar import AR
from unmask.objectives.chunked_loss import LossSum
from unmask.objectives.d3pm import D3PM
from unmask.objectives.mdlm import MDLM
from unmask.processes.absorbing import Absorbing
from unmask.training.callbacks import Callback
from unmask.training.checkpoint.files import best_checkpoint, load_checkpoint
from unmask.training.ema import Ema
from unmask.training.loop import Run, train
from unmask.training.monitor import Guard
from unmask.training.optim import learning_rate, make_optimizer

SMALL = {"size": "nano", "hidden": 32, "blocks": 2, "heads": 2, "qk_norm": False, "zero_init": False}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder) if "loss" in line}


def kept(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*"))


def weights(folder: Path) -> dict[str, Tensor]:
    found = load_checkpoint(folder)
    assert found is not None
    return {f"{file}/{name}": t for file, group in found.tensors.items() for name, t in group.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not a[name].equal(b[name])] == []


# --- a run and what it leaves -----------------------------------------------------------------------------------------


def test_the_loss_falls(trained: Any, trained_ar: Any) -> None:
    for run in (trained, trained_ar):
        reported = [report.loss for report in run.record.reports]
        assert len(reported) == 60
        assert reported[0] == pytest.approx(math.log(257), rel=0.02)  # the head begins as the uniform law
        assert np.mean(reported[-10:]) < 0.6 * reported[0]
        bounds = [line["valid_nats_per_token"] for line in lines(run.folder) if "valid_nats_per_token" in line]
        assert bounds[-1] < 0.7 * bounds[0]


def test_metrics_hold_every_step_and_validation(trained: Any) -> None:
    written = lines(trained.folder)
    steps = [line for line in written if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 61))
    clocks = {"seconds", "train_seconds"}
    assert set(steps[0]) == {"step", "loss", "lr", "grad_norm", "tokens_per_second", "tokens"} | clocks
    assert [line["loss"] for line in steps] == [report.loss for report in trained.record.reports]
    for i, line in enumerate(steps):
        assert line["lr"] == learning_rate(trained.config.optim, i, 60)
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
    assert [line["seconds"] for line in steps] == sorted(line["seconds"] for line in steps)
    valid = [line for line in written if "valid_ppl" in line]
    assert [line["step"] for line in valid] == [0, 20, 40, 60]
    assert valid[0]["valid_sequences"] == 8
    assert valid[0]["valid_bits_per_byte"] > 0
    assert [line["step"] for line in written if "sample" in line] == [30, 60]


def test_log_every_thins_the_metrics(tmp_path: Path, make_config: Any) -> None:
    train(make_config(tmp_path / "r", log_every=5), device="cpu")
    assert list(losses(tmp_path / "r")) == [5, 10]


def test_the_callbacks_hear_everything_in_order(tmp_path: Path, make_config: Any, record: Any) -> None:
    config = make_config(tmp_path / "r", steps=5, valid_every=2, save_every=3, sample_every=4)
    bounds: list[float] = []

    class Second(Callback):
        def on_valid(self, step: int, bound: Bound) -> None:
            bounds.append(bound.nats_per_token)

    train(config, callbacks=[record, Second()], device="cpu")
    improved = [0, *(int(bounds[i] < min(bounds[1:i], default=math.inf)) for i in range(1, len(bounds)))]
    expected: list[tuple[Any, ...]] = [("start",), ("valid", 0)]
    at = 0
    for step in range(1, 6):
        expected.append(("step", step))
        better = 0
        if step in (2, 4, 5):
            at += 1
            better = improved[at]
            expected.append(("valid", step))
        expected += [("sample", step)] * (step in (4, 5))
        expected += [("save", step)] * (step in (3, 5) or bool(better))
    assert record.events == [*expected, ("end",)]
    assert set(record.info) >= {"parameters", "device", "train", "valid", "resumed_step", "skipped"}
    assert record.info["resumed_step"] == 0


@pytest.mark.parametrize("event", ["on_start", "on_step", "on_save"])
def test_a_callback_that_fails_ends_the_run_in_order(tmp_path: Path, make_config: Any, record: Any, event: str) -> None:
    class Fails(Callback):
        pass

    def fail(*_: Any) -> None:
        raise RuntimeError("mine")

    setattr(Fails, event, fail)
    with pytest.raises(RuntimeError, match="mine"):
        train(make_config(tmp_path / "r"), callbacks=[record, Fails()], device="cpu")
    assert record.events[-1] == ("end",)


def test_looking_at_the_model_does_not_change_it(tmp_path: Path, make_config: Any) -> None:
    """Validation and samples draw nothing that training draws."""
    train(make_config(tmp_path / "plain", valid_every=12), device="cpu")
    train(make_config(tmp_path / "looked", valid_every=1, sample_every=2, save_every=12), device="cpu")
    assert losses(tmp_path / "plain") == losses(tmp_path / "looked")
    assert_same(weights(tmp_path / "plain"), weights(tmp_path / "looked"))


def test_the_seed_decides(tmp_path: Path, make_config: Any) -> None:
    runs = {name: make_config(tmp_path / name, seed=seed, steps=3) for name, seed in (("a", 5), ("b", 5), ("c", 2**70))}
    for config in runs.values():
        train(config, device="cpu")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_validation_and_the_model_use_the_average(tmp_path: Path, make_config: Any) -> None:
    train(make_config(tmp_path / "r", steps=6), device="cpu")
    found = load_checkpoint(tmp_path / "r")
    assert found is not None
    model = load(tmp_path / "r", device="cpu")
    state = model.denoiser.state_dict()
    assert all(state[name].equal(tensor) for name, tensor in found.tensors["ema"].items())
    assert not state["norm.weight"].equal(found.tensors["model"]["norm.weight"])
    train(make_config(tmp_path / "none", steps=6, optim={"ema": 0.0}), device="cpu")
    plain = load_checkpoint(tmp_path / "none")
    assert plain is not None
    assert "ema" not in plain.tensors
    assert_same(dict(load(tmp_path / "none", device="cpu").denoiser.state_dict()), plain.tensors["model"])


def test_the_last_and_the_best_are_kept(tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation is best at step 6 and never again: that checkpoint, its model and the last two stay, also when the
    run is taken up later."""
    script = iter([9.0, 8.0, 3.0, 5.0, 4.0, 6.0, 3.5])
    monkeypatch.setattr(
        Run, "validate", lambda self: Bound(draws_BS=torch.tensor([[next(script)]]), tokens_B=torch.tensor([1]))
    )
    config = make_config(tmp_path / "r", steps=18, valid_every=3, save_every=3, keep=2)
    train(dataclasses.replace(config, steps=12), device="cpu")
    assert kept(tmp_path / "r") == [6, 9, 12]
    model = train(config, resume=True, device="cpu")
    assert kept(tmp_path / "r") == [6, 15, 18]
    best = best_checkpoint(tmp_path / "r")
    assert best is not None
    assert best.name == "step-00000006"
    found = load_checkpoint(best)
    assert found is not None
    assert all(model.denoiser.state_dict()[name].equal(t) for name, t in found.tensors["ema"].items())


def test_a_held_out_corpus_of_its_own(tmp_path: Path, make_config: Any, record: Any) -> None:
    other = tmp_path / "valid.txt"
    other.write_text("the moon rose\n" * 20, encoding="utf-8")
    train(make_config(tmp_path / "r", steps=1, data={"valid": Text(path=str(other))}), callbacks=[record], device="cpu")
    assert "280 bytes" in record.info["valid"]


# --- the learning rate, the average, the optimizer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup": 4}, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 19: 1.0}),
        ({"warmup": 0}, {0: 1.0, 19: 1.0}),
        ({"warmup": 40}, {0: 0.025, 19: 0.5}),  # longer than the run
        ({"warmup": 0, "schedule": "cosine"}, {0: 0.5 * (1 + math.cos(math.pi / 20)), 9: 0.5, 19: 0.0}),
        ({"warmup": 4, "schedule": "cosine"}, {1: 0.5, 3: 1.0, 11: 0.5, 19: 0.0}),
        ({"warmup": 4, "schedule": "cosine", "min_ratio": 0.1}, {3: 1.0, 11: 0.55, 19: 0.1}),
        (
            {"warmup": 4, "schedule": "wsd", "decay_fraction": 0.25},
            {0: 0.25, 4: 1.0, 15: 1.0, 16: 0.8, 17: 0.6, 18: 0.4, 19: 0.2},
        ),
        (
            {"warmup": 0, "schedule": "wsd", "decay_fraction": 0.5, "min_ratio": 0.5},
            {9: 1.0, 10: 1.0, 15: 0.75, 19: 0.55},
        ),
        ({"warmup": 0, "schedule": "wsd", "decay_fraction": 0.0}, {0: 1.0, 19: 1.0}),
    ],
    ids=str,
)
def test_learning_rates(options: dict[str, Any], expected: dict[int, float]) -> None:
    """Of a run of 20 steps, as parts of lr."""
    config = OptimConfig(**({"lr": 3.0, "schedule": "constant"} | options))
    rates = [learning_rate(config, step, 20) / 3.0 for step in range(20)]
    assert {step: rates[step] for step in expected} == pytest.approx(expected, abs=1e-12)
    assert all(0 <= rate <= 1 for rate in rates)
    after = rates[options["warmup"] :]
    assert after == sorted(after, reverse=True)  # once warm it never rises


def test_a_warmup_below_one_is_a_share_of_the_run() -> None:
    for schedule in ("constant", "cosine", "wsd"):
        share, steps = (OptimConfig(lr=1.0, warmup=warmup, schedule=schedule) for warmup in (0.05, 30))  # type: ignore[arg-type]
        assert [learning_rate(share, i, 600) for i in range(600)] == [learning_rate(steps, i, 600) for i in range(600)]
    assert learning_rate(OptimConfig(), 0, 10) == OptimConfig().lr  # a run of a few steps has none


def test_the_average_follows_the_ramp() -> None:
    network = DiT(**SMALL).build(num_ids=10, mask_id=9)
    ema = Ema(network, 0.99)
    weight = network.norm.weight
    average = weight.detach().clone()
    torch.testing.assert_close(ema.shadow["norm.weight"], average)
    for n in range(1, 6):  # the first update is number 1
        with torch.no_grad():
            weight.mul_(1.5).add_(n)
        ema.update()
        decay = min(0.99, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * weight.detach()
        torch.testing.assert_close(ema.shadow["norm.weight"], average)
    assert [Ema.decay_at(0.9999, n) for n in (1, 2, 90)] == [2 / 11, 3 / 12, 0.91]
    assert Ema.decay_at(0.9, 10**6) == 0.9


def test_the_average_is_lent_not_kept() -> None:
    network = DiT(**SMALL).build(num_ids=10, mask_id=9)
    ema = Ema(network, 0.5)
    with torch.no_grad():
        network.norm.weight.fill_(7.0)
    with contextlib.suppress(RuntimeError), ema.applied():
        assert network.norm.weight.equal(torch.ones(32))
        raise RuntimeError("whatever happens inside")
    assert network.norm.weight.equal(torch.full((32,), 7.0))
    assert ema.shadow["norm.weight"].equal(torch.ones(32))


def test_weight_decay_is_for_matrices(tmp_path: Path) -> None:
    network = DiT(**SMALL).build(num_ids=10, mask_id=9)
    optimizer, names = make_optimizer(network, OptimConfig(weight_decay=0.3))
    assert sorted(names) == sorted(name for name, _ in network.named_parameters())
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] == 0.3 for p in g["params"]}
    for name, p in network.named_parameters():
        assert (id(p) in decayed) == (p.ndim > 1), name


# --- one step, however it is computed ---------------------------------------------------------------------------------


def one_step(config: RunConfig, *, double: bool = False) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, gradient norm and gradients of a run's first step."""
    shutil.rmtree(config.out, ignore_errors=True)
    run = Run(config, World(), resume=False, init=None)
    with torch.no_grad():  # away from the start, where a zero head hides everything below it
        generator = torch.Generator().manual_seed(1)
        for p in run.network.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    if double:
        run.network.double()
    loss, norm, _ = run.forward_backward(run.loader.fetch(0))
    return (
        float(loss),
        float(norm),
        {n: p.grad.clone() for n, p in run.network.named_parameters() if p.grad is not None},
    )


OBJECTIVES = [
    (DiT(**SMALL, dropout=0.0), MDLM(form="count")),
    (DiT(**SMALL, dropout=0.0, conditioning="level", cond_dim=8), MDLM()),
    (DiT(**SMALL, dropout=0.0, conditioning="constant", cond_dim=8, tied=True), D3PM(steps=20)),
    (DiT(**SMALL, dropout=0.0, causal=True), AR()),
]
NAMES = ["count", "time", "d3pm", "ar"]


@pytest.mark.parametrize(("denoiser", "objective"), OBJECTIVES, ids=NAMES)
@pytest.mark.parametrize("packing", ["wrap", "pad"])
def test_accumulation_gives_the_gradients_of_the_whole_batch(
    tmp_path: Path, make_config: Any, denoiser: DiT, objective: Any, packing: str
) -> None:
    """Also where rows hold different numbers of tokens: the loss is a sum, divided once by the global count."""
    source = tmp_path / "lines.jsonl"
    texts = [("the cat sat " * (1 + i % 3))[: 5 + 3 * (i % 7)] for i in range(64)]
    source.write_text("".join(json.dumps({"text": t + str(i)}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    make = {
        "denoiser": denoiser,
        "objective": objective,
        "data": {"train": Jsonl(path=str(source)), "packing": packing},
        "optim": {"clip": 0.0},
    }
    whole = one_step(make_config(tmp_path / "r", **make), double=True)
    for micro in (1, 3, 4, 8):
        cut = one_step(make_config(tmp_path / "r", **make, micro_batch=micro), double=True)
        assert cut[0] == pytest.approx(whole[0], rel=1e-6)  # reported in float32
        assert cut[1] == pytest.approx(whole[1], rel=1e-6)
        for name, gradient in whole[2].items():
            scale = float(gradient.abs().max()) + 1e-12
            assert float((cut[2][name] - gradient).abs().max()) / scale < 1e-10, (micro, name)


@pytest.mark.parametrize(("denoiser", "objective"), OBJECTIVES, ids=NAMES)
def test_checkpointed_activations_give_the_same_gradients(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch, denoiser: DiT, objective: Any
) -> None:
    """With dropout, too: the recomputation drops the same."""
    used: list[Any] = []
    real = unmask.denoisers.dit.checkpoint
    monkeypatch.setattr(unmask.denoisers.dit, "checkpoint", lambda *a, **k: (used.append(a), real(*a, **k))[1])
    denoiser = dataclasses.replace(denoiser, dropout=0.3)
    make = {"denoiser": denoiser, "objective": objective}
    plain = one_step(make_config(tmp_path / "r", **make))
    assert not used
    saved = one_step(make_config(tmp_path / "r", **make, checkpoint_activations=True))
    assert saved[:2] == plain[:2]
    assert_same(saved[2], plain[2])
    assert used
    other = one_step(make_config(tmp_path / "r", **make, seed=9))
    assert other[0] != plain[0]


def test_clipping_bounds_the_gradient_and_reports_what_it_was(tmp_path: Path, make_config: Any) -> None:
    """The first momentum is a tenth of the gradient that the optimizer saw."""
    norms = {}
    for clip in (0.0, 0.01):
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        run = Run(make_config(tmp_path / "r", optim={"clip": clip}), World(), resume=False, init=None)
        loss, reported, _ = run.forward_backward(run.loader.fetch(0))
        run.update(1e-3, loss, reported)
        seen = math.sqrt(sum(float(s["exp_avg"].square().sum()) for s in run.optimizer.state.values())) / 0.1
        norms[clip] = float(reported), seen
    assert norms[0.0][0] == norms[0.01][0] > 0.01
    assert norms[0.0][1] == pytest.approx(norms[0.0][0], rel=1e-4)
    assert norms[0.01][1] == pytest.approx(0.01, rel=1e-3)


def test_bf16_trains_with_float32_weights(tmp_path: Path, make_config: Any, record: Any) -> None:
    train(make_config(tmp_path / "r", steps=20, precision="bf16"), callbacks=[record], device="cpu")
    reported = [report.loss for report in record.reports]
    assert reported[-1] < 0.8 * reported[0]
    assert {t.dtype for t in weights(tmp_path / "r").values()} == {torch.float32}
    exact = one_step(make_config(tmp_path / "s"))
    rough = one_step(make_config(tmp_path / "s", precision="bf16"))
    assert rough[0] != exact[0]  # it is really computed in another precision
    assert rough[0] == pytest.approx(exact[0], rel=0.02)


def test_precision_is_chosen_once(tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device a run begins on; what it has written decides from then on, also where another would be chosen."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)  # whatever this machine has
    auto = make_config(tmp_path / "plain", precision="auto", steps=2)
    train(auto, device="cpu")
    assert load_config(tmp_path / "plain").precision == "fp32"
    train(dataclasses.replace(auto, steps=3), resume=True, device="cpu")  # chosen again, the same
    train(make_config(tmp_path / "whole", precision="bf16"), device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(unmask.training.state, "pick_precision", lambda name, device: "bf16")  # as on a GPU
        train(make_config(tmp_path / "r", precision="auto", steps=4), device="cpu")
    assert load_config(tmp_path / "r").precision == "bf16"
    train(load_config(tmp_path / "r", {"steps": 12}), resume=True, device="cpu")
    assert_same(weights(tmp_path / "r"), weights(tmp_path / "whole"))
    with pytest.raises(ConfigError, match=r"^precision is 'fp32', the run in .* has 'bf16'; it cannot change"):
        train(make_config(tmp_path / "r", precision="auto", steps=14), resume=True, device="cpu")


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_computes_in_bf16_where_it_has_it(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    def supported(*, including_emulation: bool) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert pick_precision("auto", torch.device("cuda", 1)) == ("bf16" if native else "fp32")
    assert pick_precision("auto", torch.device("mps")) == "fp32"
    assert pick_precision("fp32", torch.device("cuda")) == "fp32"


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ({"avx512_f": True, "avx512_bf16": True}, "bf16"),
        ({"amx_bf16": True, "avx512_bf16": False}, "bf16"),
        ({"avx2": True, "avx512_bf16": False}, "fp32"),
        ({"avx2": True}, "fp32"),
        (None, "fp32"),  # a torch that cannot say
    ],
)
def test_a_cpu_computes_in_bf16_where_it_has_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool] | None, precision: str
) -> None:
    if capabilities is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert pick_precision("auto", torch.device("cpu")) == precision
    assert pick_precision("fp32", torch.device("cpu")) == "fp32"


# --- what is not a number ---------------------------------------------------------------------------------------------


def poisoned_loss(self: MDLM, network: Any, batch: Any) -> LossSum:
    loss = MDLM.clean_loss(self, network, batch)  # type: ignore[attr-defined]
    return LossSum(loss.nats * math.nan, loss.tokens)


def poisoned_gradient(self: MDLM, network: Any, batch: Any) -> LossSum:
    """A finite loss whose gradient is not: the root's slope at 0."""
    loss = MDLM.clean_loss(self, network, batch)  # type: ignore[attr-defined]
    return LossSum(loss.nats + torch.sqrt((network.norm.weight * 0).sum()), loss.tokens)


@pytest.mark.parametrize(
    ("poison", "what"),
    [(poisoned_loss, "loss nan"), (poisoned_gradient, "gradient norm nan")],
    ids=["loss", "gradient"],
)
def test_what_is_not_a_number_never_reaches_the_weights(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch, poison: Callable[..., LossSum], what: str
) -> None:
    config = make_config(tmp_path / "r")
    runs: list[Run] = []

    class Kept(Run):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            runs.append(self)

    class Poison(Callback):
        def on_step(self, report: Any) -> None:
            if report.step == 4:
                monkeypatch.setattr(MDLM, "loss", poison)

    monkeypatch.setattr(unmask.training.loop, "Run", Kept)
    monkeypatch.setattr(MDLM, "clean_loss", MDLM.loss, raising=False)
    with pytest.raises(NonFiniteError, match=f"^{what} at step 5, batch of rows ") as error:
        train(config, callbacks=[Poison()], device="cpu")
    rows = [str(i) for i in runs[0].loader.indices(4)]
    assert ", ".join(rows[:4]) in str(error.value)  # the batch is named
    assert "8 in all" in str(error.value)
    found = load_checkpoint(tmp_path / "r")
    assert found is not None
    assert found.step == 4
    assert_same(dict(found.tensors["model"]), dict(runs[0].network.state_dict()))
    assert_same(dict(found.tensors["ema"]), dict(runs[0].ema.shadow))  # type: ignore[union-attr]
    assert list(losses(tmp_path / "r")) == [1, 2, 3, 4]
    # Once the cause is gone the run goes on as if nothing had been.
    monkeypatch.setattr(MDLM, "loss", MDLM.clean_loss)  # type: ignore[attr-defined]
    train(config, resume=True, device="cpu")
    train(dataclasses.replace(config, out=str(tmp_path / "clean")), device="cpu")
    assert losses(tmp_path / "r") == losses(tmp_path / "clean")
    assert_same(weights(tmp_path / "r"), weights(tmp_path / "clean"))


# --- beginning and going on -------------------------------------------------------------------------------------------


def test_init_begins_with_the_weights_of_a_model(tmp_path: Path, make_config: Any, trained: Any) -> None:
    still = make_config(tmp_path / "still", steps=1, optim={"lr": 0.0})
    model = train(still, init=trained.folder, device="cpu")
    assert_same(dict(model.denoiser.state_dict()), dict(trained.model.denoiser.state_dict()))
    further = train(make_config(tmp_path / "further", steps=2), init=trained.model_folder, device="cpu")
    assert not further.denoiser.norm.weight.equal(model.denoiser.norm.weight)
    first = losses(tmp_path / "further")[1]
    assert first < 0.6 * trained.record.reports[0].loss  # it did not begin again


def test_init_from_what_does_not_fit(tmp_path: Path, make_config: Any, trained: Any, corpus_file: Path) -> None:
    chars = tmp_path / "chars.txt"
    chars.write_text(corpus_file.read_text(encoding="utf-8").replace("\n", " "), encoding="utf-8")
    other = make_config(tmp_path / "r", tokenizer="chars", data={"train": Text(path=str(chars))})
    with pytest.raises(UsageError, match="has another tokenizer than this run"):
        train(other, init=trained.folder, device="cpu")
    wider = make_config(tmp_path / "r", denoiser=DiT(size="nano", hidden=48, blocks=1, heads=2))
    with pytest.raises(ModelFolderError, match=r"has shape .*the config asks for"):
        train(wider, init=trained.folder, device="cpu")
    with pytest.raises(ModelFolderError, match="no model folder"):
        train(make_config(tmp_path / "r"), init=tmp_path / "nowhere", device="cpu")
    with pytest.raises(UsageError, match="give --resume or --init, not both"):
        train(make_config(tmp_path / "r"), init=trained.folder, resume=True, device="cpu")
    with pytest.raises(UsageError, match="is a model's folder, not a run's; give another --out"):
        train(make_config(trained.model_folder), device="cpu")
    assert not (tmp_path / "r").exists()


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, make_config: Any) -> tuple[Path, RunConfig]:
    """A run at step 4 of 12. Copy it."""
    folder = tmp_path_factory.mktemp("half") / "r"
    train(make_config(folder, steps=4), device="cpu")
    return folder, make_config(folder)


@pytest.fixture
def halfway(half: tuple[Path, RunConfig], tmp_path: Path) -> RunConfig:
    shutil.copytree(half[0], tmp_path / "r")
    return dataclasses.replace(half[1], out=str(tmp_path / "r"))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("seed", {"seed": 1}),
        ("batch", {"batch": 4}),
        ("valid_rows", {"valid_rows": 4}),
        ("optim.lr", {"optim": dataclasses.replace(PLAIN, lr=1.0)}),
        ("optim.betas", {"optim": dataclasses.replace(PLAIN, betas=(0.5, 0.999))}),
        ("denoiser.hidden", {"denoiser": DiT(size="nano", hidden=64, blocks=1, heads=2)}),
        ("objective.form", {"objective": MDLM()}),
        ("objective", {"objective": D3PM()}),
        ("objective.noise", {"objective": MDLM(form="count", noise=unmask.noise.Cosine())}),
        ("precision", {"precision": "bf16"}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_decides_the_weights_cannot_change(halfway: RunConfig, key: str, change: dict[str, Any]) -> None:
    before = {p: p.read_bytes() for p in Path(halfway.out).rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=f"^{key} is .*, the run in .* has .*; it cannot change"):
        train(dataclasses.replace(halfway, **change), resume=True, device="cpu")
    assert {p: p.read_bytes() for p in Path(halfway.out).rglob("*") if p.is_file()} == before


def test_the_rest_may_change(halfway: RunConfig, tmp_path: Path, make_config: Any) -> None:
    """A longer run, looked at and kept otherwise, in another place: the same losses as one that never stopped."""
    moved = tmp_path / "moved"
    shutil.move(halfway.out, moved)
    changed = dataclasses.replace(
        halfway, out=str(moved), steps=9, valid_every=4, save_every=2, keep=5, sample_every=3, log_every=1
    )
    train(changed, resume=True, device="cpu")
    train(make_config(tmp_path / "straight", steps=9), device="cpu")
    assert losses(moved) == losses(tmp_path / "straight")
    assert_same(weights(moved), weights(tmp_path / "straight"))


def test_a_run_may_go_on_in_less_memory(tmp_path: Path, make_config: Any) -> None:
    """On fewer GPUs, say: the work is cut otherwise and the sums round otherwise, that is all."""
    still = DiT(size="nano", hidden=32, blocks=2, heads=2, dropout=0.0)  # dropout depends on the cut
    straight = make_config(tmp_path / "straight", steps=9, denoiser=still)
    train(straight, device="cpu")
    config = dataclasses.replace(straight, out=str(tmp_path / "r"))
    train(dataclasses.replace(config, steps=4), device="cpu")
    train(dataclasses.replace(config, micro_batch=2, checkpoint_activations=True), resume=True, device="cpu")
    assert losses(tmp_path / "r") == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)


def test_a_run_is_not_overwritten(halfway: RunConfig) -> None:
    before = weights(Path(halfway.out))
    with pytest.raises(UsageError, match="holds a run at step 4; go on with --resume, or give another --out"):
        train(halfway, device="cpu")
    assert_same(weights(Path(halfway.out)), before)
    with pytest.raises(UsageError, match="is at step 4 already; give more --steps"):
        train(dataclasses.replace(halfway, steps=4), resume=True, device="cpu")
    with pytest.raises(UsageError, match="is at step 4 already"):
        train(dataclasses.replace(halfway, steps=2), resume=True, device="cpu")


def test_nothing_to_resume(tmp_path: Path, make_config: Any) -> None:
    with pytest.raises(ModelFolderError, match="holds no checkpoint to resume; leave --resume out to begin"):
        train(make_config(tmp_path / "r"), resume=True, device="cpu")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("change", ["one letter", "one line more", "shorter"])
def test_changed_data_is_noticed(tmp_path: Path, make_config: Any, change: str, corpus_file: Path) -> None:
    text = corpus_file.read_text(encoding="utf-8")
    source = tmp_path / "own.txt"
    source.write_text(text, encoding="utf-8")
    config = make_config(tmp_path / "r", data={"train": Text(path=str(source))})
    train(dataclasses.replace(config, steps=2), device="cpu")
    changed = {"one letter": "z" + text[1:], "one line more": text + "new\n", "shorter": text[:-40]}[change]
    source.write_text(changed, encoding="utf-8")
    with pytest.raises(DataError, match=r"the data changed since the run in .* began; restore it"):
        train(config, resume=True, device="cpu")
    source.write_text(text, encoding="utf-8")
    train(config, resume=True, device="cpu")  # restored, it goes on


def test_a_trained_tokenizer_is_trained_once(tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path / "r", tokenizer="bpe:280", steps=2)
    train(config, device="cpu")
    monkeypatch.setattr(unmask.training.state, "load_tokenizer", lambda *_: pytest.fail("trained again"))
    train(dataclasses.replace(config, steps=3), resume=True, device="cpu")
    assert load(tmp_path / "r", device="cpu").tokenizer.num_ids == 281


def test_metrics_cut_by_a_kill_are_mended(halfway: RunConfig, tmp_path: Path, make_config: Any) -> None:
    """Lines beyond the checkpoint and a line cut in the middle go; all earlier ones stay."""
    path = Path(halfway.out) / "metrics.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "loss": 99.0}\n{"step": 6, "lo')
    train(halfway, resume=True, device="cpu")
    train(make_config(tmp_path / "straight"), device="cpu")
    assert losses(Path(halfway.out)) == losses(tmp_path / "straight")
    steps = [line["step"] for line in lines(Path(halfway.out)) if "loss" in line]
    assert steps == list(range(1, 13))


# --- conditional training ---------------------------------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Questions of 3–8 letters and answers of 1–9."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"question": "ab" * (1 + i % 3) + "?" + str(i), "answer": "x" * (1 + i % 9)} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def conditional_rows(pairs: Path, folder: Path) -> Any:
    corpus = Jsonl(path=str(pairs), field="answer", prompt_field="question")
    return build_rows(corpus, load_tokenizer("bytes"), policy="pad", length=16, cache_dir=folder)


def test_a_prompt_is_never_noised_and_not_scored(pairs: Path, tmp_path: Path) -> None:
    rows = conditional_rows(pairs, tmp_path / "cache")
    taken = rows.take(np.arange(60))
    x, valid, prefix = map(torch.from_numpy, (taken.x, taken.valid_len, taken.prefix_len))
    assert prefix.min() >= 3
    masking = Absorbing(LogLinear(), num_ids=258, mask_id=257)
    position = torch.arange(16)
    answers = (position >= prefix[:, None]) & (position < valid[:, None])
    for step in range(40):
        batch = make_batch(x, valid, prefix, seed=0, step=step)
        assert batch.scored_BL.equal(answers)
        for objective in (MDLM(), MDLM(form="count"), MDLM(steps=3), D3PM(steps=3)):
            noised = objective.noised(batch, masking)
            assert not bool((noised.masked_BL & ~answers).any())
            assert noised.z_BL[~answers].equal(x[~answers])
            assert (noised.z_BL == 257).equal(noised.masked_BL)
    # Every answer token is masked now and then.
    ever = torch.stack(
        [MDLM().noised(make_batch(x, valid, prefix, seed=1, step=s), masking).masked_BL for s in range(80)]
    ).any(0)
    assert ever.equal(answers)


@pytest.mark.parametrize("objective", [MDLM(), MDLM(form="count", noise=unmask.noise.Cosine()), MDLM(steps=4), AR()])
def test_the_loss_is_that_of_the_answer_alone(pairs: Path, tmp_path: Path, objective: Any) -> None:
    """A network that ignores what it sees gives each token a price: only the answers' are paid."""
    rows = conditional_rows(pairs, tmp_path / "cache")
    taken = rows.take(np.arange(60))
    x, valid, prefix = map(torch.from_numpy, (taken.x, taken.valid_len, taken.prefix_len))
    price = torch.linspace(0, 3, 258)

    class Blind(Network):
        num_ids, mask_id, uses_level, causal = 258, 257, False, isinstance(objective, AR)

        def __init__(self) -> None:
            super().__init__()
            self.price = torch.nn.Parameter(price.clone())

        def trunk(self, z: Tensor, level: Tensor | None = None, **_: Any) -> Tensor:
            return torch.zeros(*z.shape, 1)

        def head(self, h: Tensor) -> Tensor:
            return self.price + 0 * h

        def head_parameters(self) -> list[Any]:
            return [self.price]

    def nats(x: Tensor) -> float:
        with torch.no_grad():
            loss = objective.loss(Blind(), make_batch(x, valid, prefix, seed=0, step=0))
        assert int(loss.tokens) == int((valid - prefix).sum())
        return float(loss.nats)

    prompts, padding = torch.arange(16) < prefix[:, None], torch.arange(16) >= valid[:, None]
    assert nats(torch.where(prompts, 65, x)) == pytest.approx(nats(x), rel=1e-6)
    assert nats(torch.where(padding, 65, x)) == pytest.approx(nats(x), rel=1e-6)
    assert nats(torch.where(prompts | padding, x, 65)) != pytest.approx(nats(x), rel=1e-3)


def test_a_conditional_run(pairs: Path, tmp_path: Path, make_config: Any, record: Any) -> None:
    config = make_config(
        tmp_path / "r",
        steps=10,
        data={
            "train": Jsonl(path=str(pairs), field="answer", prompt_field="question"),
            "packing": "pad",
            "length": 16,
            "held_out": 0.2,
        },
    )
    train(config, callbacks=[record], device="cpu")
    reported = [report.loss for report in record.reports]
    assert reported[0] == pytest.approx(math.log(257), rel=0.02)  # a mean over the answers' tokens, no others
    assert reported[-1] < reported[0]
    with pytest.raises(UsageError, match="documents with a prompt need the packing 'pad' or 'fill', not 'wrap'"):
        train(make_config(tmp_path / "s", data={"train": config.data.train}), device="cpu")
    assert not (tmp_path / "s").exists()


def test_an_objective_and_a_corpus_of_every_kind_trains(tmp_path: Path, make_config: Any) -> None:
    """One step each of what recipes may combine."""
    cases: list[dict[str, Any]] = [
        {"objective": MDLM(noise=unmask.noise.Geometric()), "denoiser": DiT(**SMALL, conditioning="sigma")},
        {"objective": MDLM(steps=10, carry_over=False)},
        {"objective": MDLM(steps=10, zero_masking=False)},
        {"objective": D3PM(steps=10), "denoiser": DiT(**SMALL, tied=True)},
        {"data": {"packing": "sentence"}},
        {"data": {"train": unmask.corpora.Stdlib(limit_mb=0.02)}},
    ]
    for i, case in enumerate(cases):
        model = train(make_config(tmp_path / str(i), steps=1, **case), device="cpu")
        assert math.isfinite(losses(tmp_path / str(i))[1])
        assert isinstance(model.generate(length=8)[0], str)


def test_a_loss_far_above_its_mean_is_noted() -> None:
    guard = Guard("stop", 0)
    rows = np.arange(3)

    def said(step: int, loss: float) -> str:
        note, counts = guard.look(step, loss, 1.0, rows, Path("run"))
        assert counts
        return note

    rng = np.random.default_rng(0)
    assert not any(said(step, 2.0 + 0.1 * float(x)) for step, x in enumerate(rng.standard_normal(200).clip(-3, 3)))
    assert re.fullmatch(r"loss 4 at step 200 is far above its mean 2\.\d+: rows 0, 1, 2", said(200, 4.0))
    assert not said(201, 2.1)
    assert said(202, 4.0)  # one spike does not hide the next


def test_a_run_starts_without_the_compiler(tmp_path: Path) -> None:
    """To import it takes seconds, of which a short run would be half; sharded tensors likewise."""
    script = """
import sys, unmask
overrides = {"steps": 2, "out": sys.argv[1], "denoiser.hidden": 16, "batch": 2, "valid_rows": 2, "optim.muon": "true"}
texts = unmask.corpora.Memory(texts=["a few words " * 20, "some others " * 20])
unmask.train(unmask.load_config("demo", {**overrides, "sample_every": 0, "data.train": texts, "data.valid": texts}))
found = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor"} & sys.modules.keys()
assert not found, found
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=True)
