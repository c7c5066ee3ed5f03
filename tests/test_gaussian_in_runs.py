"""Gaussian states in a run: trained, resumed, saved, loaded and used, from Python and the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from resuming import straight_and_stopped
from unmask import objectives
from unmask.cli import run
from unmask.data.batch import make_batch
from unmask.denoisers.dit import DiT
from unmask.storage.model_folder import unshared

DIT = DiT(hidden=16, blocks=1, heads=2, dropout=0.0, conditioning="level")
OBJECTIVES: dict[str, Any] = {
    "plaid": objectives.Plaid(dim=4),
    "diffusion_lm": objectives.DiffusionLM(dim=4, steps=50),
    "ssd_lm": objectives.SSDLM(block=8, steps=50),
}
COMMANDS = list(OBJECTIVES)  # objectives by their names
OBJECTIVES |= {"plaid read twice": objectives.Plaid(dim=4, self_conditioning=0.5)}
LEARNED = {
    "plaid": ["embedding.weight", "entry.weight", "gamma.first_1", "gamma.log_width_1", "gamma.pieces_M"],
    "diffusion_lm": ["embedding.weight", "entry.weight", "entry.bias"],
    "ssd_lm": [],
}
LEARNED["plaid read twice"] = LEARNED["plaid"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_run_resumes_bit_for_bit(make_config: Any, tmp_path: Path, name: str) -> None:
    how: dict[str, Any] = {"denoiser": DIT, "objective": OBJECTIVES[name], "optim": {"lr": 1e-2, "ema": 0.9}}
    straight, config = make_config(tmp_path / "straight", **how), make_config(tmp_path / "run", **how)
    model, one = straight_and_stopped(straight, config)
    for part in LEARNED[name]:  # moved, and averaged
        assert not one.tensors["model"][f"objective.{part}"].equal(one.tensors["ema"][f"objective.{part}"])
    loaded = unmask.load(Path(straight.out) / "model", device="cpu")
    assert loaded.objective == OBJECTIVES[name]
    for tensor_name, tensor in unshared(loaded.denoiser).items():
        assert tensor.equal(unshared(model.denoiser)[tensor_name])
    sampler = loaded.make_sampler(steps=4)
    assert loaded.generate(1, 8, seed=1, sampler=sampler) == model.generate(1, 8, seed=1, sampler=sampler)
    half = unmask.load(Path(straight.out) / "model", device="cpu", dtype="bf16")
    assert half.score("hello", num_samples=8).nats > 0
    assert half.generate(1, 8, sampler=half.make_sampler(steps=2))


@pytest.mark.parametrize("name", COMMANDS)
def test_training_lowers_the_bound(name: str) -> None:
    """Rows of one token each: which is all there is to know."""
    torch.manual_seed(0)
    network, objective = DIT.build(num_ids=9, mask_id=8), OBJECTIVES[name]
    objective.attach(network)
    x_BL = torch.arange(8)[:, None].expand(8, 12).clone()
    before = objective.bound(network, x_BL, num_samples=16).nats_per_token
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
    for step in range(60):
        optimizer.zero_grad()
        loss = objective.loss(network, make_batch(x_BL, seed=0, step=step))
        (loss.nats / loss.tokens).backward()
        optimizer.step()
    after = objective.bound(network, x_BL, num_samples=16).nats_per_token
    assert after < 0.9 * before
    assert after > math.log(8) / 12  # the entropy of the rows


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(name: str) -> None:
    torch.manual_seed(0)
    network, objective = DIT.build(num_ids=9, mask_id=8), OBJECTIVES[name]
    objective.attach(network)
    for p in network.double().parameters():
        torch.nn.init.normal_(p, std=0.2)
    length_B, prompt_B = torch.tensor([10, 7, 9, 10, 3, 5]), torch.tensor([0, 2, 0, 3, 1, 0])
    batch = make_batch(torch.randint(8, (6, 10)), length_B, prompt_B, seed=0, step=0)
    found = []
    for cuts in ([(0, 6)], [(0, 2), (2, 5), (5, 6)]):
        network.zero_grad()
        for lo, hi in cuts:
            objective.loss(network, batch.rows(lo, hi)).nats.backward()
        found.append({n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None})
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)
    with torch.no_grad():
        assert bool((objective.position_nats(network, batch)[~batch.scored_BL] == 0).all())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line(corpus_file: Path, tmp_path: Path, capsys: Any, name: str) -> None:
    out = str(tmp_path / "run")
    level = ["--denoiser.conditioning", "level"]
    sizes = ["--denoiser.hidden", "16", "--denoiser.blocks", "1", "--denoiser.heads", "2", *level]
    data = f"--data.train.name text --data.train.path {corpus_file} --data.length 24 --steps 2 --batch 4".split()
    assert (
        run(["train", "--out", out, "--objective", name, *sizes, *data, "--sample_every", "0", "--device", "cpu"]) == 0
    )
    capsys.readouterr()
    assert run(["generate", out, "--length", "8", "--prompt", "ab", "--steps", "3", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("ab")
    assert run(["eval", out, "--data", str(corpus_file), "--max-rows", "2"]) == 0


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ([], "conditioning"),
        (["--denoiser.causal", "true"], "sees both sides"),
        (["--denoiser.conditioning", "level", "--objective.steps", "0"], "steps"),
        (["--denoiser.conditioning", "level", "--objective.steps", "-1"], "steps"),
    ],
)
def test_what_makes_no_sense_is_refused(
    corpus_file: Path, tmp_path: Path, capsys: Any, name: str, options: list[str], match: str
) -> None:
    out = tmp_path / "run"
    data = f"--data.train.name text --data.train.path {corpus_file} --data.length 24 --steps 2 --batch 4".split()
    assert run(["train", "--out", str(out), "--objective", name, *data, *options, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert match in said
    assert len(said.strip().splitlines()) == 1
    assert not out.exists()
