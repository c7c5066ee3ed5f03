"""Parameters outside the denoiser, by a schedule that has some: trained, averaged, resumed, saved, loaded, exported."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "parallel"))
import learned_power
from learned_power import LearnedPower

import unmask
from unmask.data.batch import make_batch
from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.distributed.world import World
from unmask.errors import ModelFolderError, UsageError
from unmask.objectives.d3pm import D3PM
from unmask.objectives.mdlm import MDLM
from unmask.objectives.mdlm_warm import MDLMWarm
from unmask.objectives.terms import variance_gradient
from unmask.storage.model_folder import unshared
from unmask.storage.published import write_published
from unmask.storage.tensor_file import read_tensors, write_tensors
from unmask.training.checkpoint.files import load_checkpoint
from unmask.training.loop import Run, train
from unmask.training.run_view import RunView

DIT = DiT(hidden=16, blocks=1, heads=2, dropout=0.0, conditioning="sigma", cond_dim=8, qk_norm=False)
OWN = ("objective.noise.log_powers", "objective.noise.mixture")


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned_power.install(monkeypatch.setattr)
    monkeypatch.syspath_prepend(str(tmp_path))  # entry points are looked for once a path


@pytest.fixture
def config(make_config: Any, tmp_path: Path) -> Any:
    objective = MDLM(noise=LearnedPower())
    return make_config(tmp_path / "run", denoiser=DIT, objective=objective, optim={"lr": 1e-2, "ema": 0.9})


class StopAt(unmask.Callback):
    def __init__(self, step: int) -> None:
        self.last, self.notes = step, list[str]()

    def on_run(self, run: RunView) -> None:
        self.run = run

    def on_step(self, report: Any) -> None:
        if report.step == self.last:
            self.run.stop("seen enough")

    def on_note(self, step: int, text: str) -> None:
        self.notes.append(text)


def tensors(folder: Path | str) -> dict[str, dict[str, torch.Tensor]]:
    checkpoint = load_checkpoint(Path(folder))
    assert checkpoint is not None
    assert checkpoint.step == 12
    return checkpoint.tensors


@pytest.mark.parametrize("background", [False, True], ids=["whole", "in the background"])
def test_it_trains_and_resumes_bit_for_bit(config: Any, tmp_path: Path, background: bool) -> None:
    config = dataclasses.replace(config, async_save=background)
    straight = dataclasses.replace(config, out=str(tmp_path / "straight"))
    model = train(straight, device="cpu")
    stop = StopAt(5)
    train(config, callbacks=[stop], device="cpu")
    again = train(config, resume=True, device="cpu")
    assert "ended early: seen enough" in stop.notes
    one, other = tensors(straight.out), tensors(config.out)
    assert {group: set(named) for group, named in one.items()} == {group: set(named) for group, named in other.items()}
    for group, named in one.items():
        for name, tensor in named.items():
            assert tensor.equal(other[group][name]), (group, name)
    start = LearnedPower().build()
    for name in OWN:
        moved = one["model"][name] - start.state_dict()[name.removeprefix("objective.noise.")]
        assert moved.abs().min() > 1e-3  # every one of them
        assert not one["model"][name].equal(one["ema"][name])  # and its average follows
        assert {f"exp_avg/{name}", f"exp_avg_sq/{name}"} <= set(one["optimizer"])
        assert model.denoiser.state_dict()[name].equal(again.denoiser.state_dict()[name])


def test_sharded_checkpoints_have_them(config: Any) -> None:
    train(dataclasses.replace(config, save_as="sharded"), device="cpu")
    assert set(OWN) <= set(tensors(config.out)["model"])
    run = Run(dataclasses.replace(config, steps=14), World(), resume=True, init=None)
    assert unshared(run.network)[OWN[0]].equal(tensors(config.out)["model"][OWN[0]])


def test_a_model_folder_keeps_them(config: Any, tmp_path: Path) -> None:
    model = train(config, device="cpu")
    model.save(tmp_path / "copy")
    loaded = unmask.load(tmp_path / "copy", device="cpu")
    process = loaded.objective.process(loaded.denoiser)
    assert process is not None
    t = torch.linspace(0, 1, 9, dtype=torch.float64)
    assert isinstance(process.noise, unmask.noise.LearnedNoise)
    assert process.noise.alpha(t)[[0, -1]].tolist() == [1.0, 0.0]  # exact ends, whatever was learned
    assert not torch.allclose(process.noise.alpha(t), LearnedPower().alpha(t), atol=1e-4)
    for name, tensor in unshared(model.denoiser).items():
        assert unshared(loaded.denoiser)[name].equal(tensor), name
    file = tmp_path / "copy" / "model.safetensors"
    weights = {k: v.clone() for k, v in read_tensors(file).items()}
    file.unlink()
    write_tensors(file, {k: v for k, v in weights.items() if k != OWN[0]}, {"format": "pt"})
    with pytest.raises(ModelFolderError, match="log_powers"):
        unmask.load(tmp_path / "copy", device="cpu")


def test_samplers_read_it_as_numbers() -> None:
    """Bound to the module, whose parameters ask for gradients, they write what the same schedule without any gives."""
    torch.manual_seed(0)
    network = DiT(hidden=16, blocks=1, heads=2).build(num_ids=258, mask_id=257)
    model = unmask.Model(
        denoiser=network, tokenizer=unmask.load_tokenizer("bytes"), objective=MDLM(noise=LearnedPower()), length=16
    )
    for name in ("ancestral", "remdm", "predictor_corrector", "posterior"):
        learned, plain = model.make_sampler(name, steps=4), model.make_sampler(name, steps=4, noise=LearnedPower())
        if name == "posterior":  # for networks that may predict the mask
            assert not learned.schedule.alpha(torch.tensor([0.5])).requires_grad
        else:
            assert model.generate(2, 12, sampler=learned) == model.generate(2, 12, sampler=plain), name


def test_export_refuses_what_it_cannot_say(config: Any, tmp_path: Path) -> None:
    network = DIT.build(num_ids=5, mask_id=4)
    config.objective.attach(network)
    with pytest.raises(UsageError, match="published"):
        write_published(network, tmp_path / "out", length=8)


def test_init_takes_them_from_the_same_objective_and_begins_anew_otherwise(config: Any, tmp_path: Path) -> None:
    first = train(config, device="cpu")
    learned = unshared(first.denoiser)
    same = Run(dataclasses.replace(config, out=str(tmp_path / "a")), World(), resume=False, init=config.out)
    assert all(unshared(same.network)[name].equal(tensor) for name, tensor in learned.items())
    assert not same.init_note
    plain = dataclasses.replace(config, out=str(tmp_path / "b"), objective=MDLM())
    without = Run(plain, World(), resume=False, init=config.out)
    assert not set(OWN) & set(unshared(without.network))
    assert unshared(without.network)["embed.weight"].equal(learned["embed.weight"])
    assert "anew" in without.init_note


def test_networks_without_such_parameters_are_as_before() -> None:
    network = DIT.build(num_ids=5, mask_id=4)
    before = list(network.state_dict())
    MDLM().attach(network)
    assert network.objective is None
    assert list(network.state_dict()) == before
    MDLM(noise=LearnedPower()).attach(network)
    kept = network.objective
    assert list(network.state_dict()) == [*before, *OWN]  # after the network's own
    MDLM(noise=LearnedPower(high=3.0)).attach(network)
    assert network.objective is kept


def test_the_schedule_s_gradient_is_the_equation_s() -> None:
    """Through a linear head, with padding: what it should be of given nats, the numerics say."""
    objective = MDLM(noise=LearnedPower())
    torch.manual_seed(0)
    network = DiT(hidden=8, blocks=1, heads=2, dropout=0.0).build(num_ids=7, mask_id=6).double()
    torch.nn.init.normal_(network.output.weight)
    objective.attach(network)
    noise: Any = network.objective.noise.double()  # type: ignore[union-attr,operator]
    valid_B = torch.tensor([8, 8, 5, 8, 1, 8])
    batch = make_batch(torch.arange(48).view(6, 8) % 6, valid_B, seed=1, step=2)
    parameters = [noise.log_powers, noise.mixture]
    found = torch.autograd.grad(objective.loss(network, batch).nats, parameters)
    share_B = objective.row_nats(network, batch) / (valid_B.double().sqrt() * math.log(7))
    torch.testing.assert_close(found, torch.autograd.grad(variance_gradient(noise, batch.time_B, share_B), parameters))
    halves = [
        torch.autograd.grad(objective.loss(network, part).nats, parameters)
        for part in (batch.rows(0, 2), batch.rows(2, 6))
    ]  # however the batch is cut
    torch.testing.assert_close(found, tuple(a + b for a, b in zip(*halves, strict=True)))


def test_a_form_that_could_not_train_it_is_refused_before_the_first_step(config: Any) -> None:
    with pytest.raises(UsageError, match="continuous time"):
        train(dataclasses.replace(config, objective=D3PM(steps=4, noise=LearnedPower())), device="cpu")


def test_a_scalar_parameter_cannot_be_sharded_and_is_told() -> None:
    from unmask.distributed.parallel import _shard  # before it looks for other processes

    network: DiTNetwork = DIT.build(num_ids=5, mask_id=4)
    network.objective = torch.nn.ParameterDict({"p": torch.nn.Parameter(torch.zeros(()))})
    with pytest.raises(UsageError, match=r"objective\.p .* shape \(1,\)"):
        _shard(network, network, World(), bf16=False)


@pytest.mark.parametrize("objective", [unmask.objectives.UDLM, unmask.objectives.SEDD])
def test_objectives_that_do_not_train_a_schedule_refuse_one(objective: Any) -> None:
    with pytest.raises(UsageError, match="LearnedPower"):
        objective(noise=LearnedPower()).attach(DIT.build(num_ids=5, mask_id=4))


def test_beside_rows_that_look_back_it_has_the_gradient_of_the_others() -> None:
    """What counts a masked token is MDLM's, and a power of it would teach the schedule something else."""
    found = []
    for objective in (MDLM(noise=LearnedPower()), MDLMWarm(noise=LearnedPower(), share=0.5)):
        torch.manual_seed(0)
        network = DIT.build(num_ids=12, mask_id=11).double()
        objective.attach(network)
        batch = make_batch(torch.randint(0, 11, (16, 8)), seed=0, step=0, done=0.0)
        if not found:
            batch = batch.where(~MDLMWarm(share=0.5).looks_back_B(batch))
        objective.loss(network, batch).nats.backward()  # type: ignore[no-untyped-call]
        assert network.objective is not None
        found.append([p.grad for p in network.objective.parameters()])
    for alone, beside in zip(*found, strict=True):
        assert alone is not None
        assert float(alone.abs().max()) > 0
        torch.testing.assert_close(beside, alone, rtol=1e-9, atol=1e-12)
    with pytest.raises(UsageError, match="set power = 1"):
        MDLMWarm(noise=LearnedPower(), power=0.5).build(num_ids=12, width=8)
