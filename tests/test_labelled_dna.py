"""Sequences of DNA given their class: a table with splits, the recipe, labels by name, guidance, and the judge."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from unmask import cli
from unmask.config import DataConfig, load_config
from unmask.corpora import Document
from unmask.data.packing import rows_of
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.caduceus import Caduceus
from unmask.errors import UsageError
from unmask.model import Model
from unmask.objectives.mdlm import MDLM

BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "dna"
DNA = load_tokenizer("dna")
SHARES = {"high": 0.9, "low": 0.1, "middle": 0.5, "rising": 0.7}  # of G and C
LENGTH = 40


def sequence(rng: random.Random, share: float) -> str:
    return "".join(rng.choice("GC" if rng.random() < share else "AT") for _ in range(LENGTH))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As the published one is: one table, its splits by chromosome."""
    rng = random.Random(0)
    lines = ["chr\tsequence\tTAG\tdata_label"]
    for split, num in (("training", 60), ("validation", 25), ("test", 25)):
        for name, share in SHARES.items():
            lines += [f"chr1\t{sequence(rng, share)}\t{name}_1\t{split}" for _ in range(num)]
    path = tmp_path_factory.mktemp("cells") / "cells.txt"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def options(table: str, out: Path, **more: str) -> dict[str, str]:
    small = {"denoiser.hidden": "16", "denoiser.blocks": "1", "denoiser.states": "4", "batch": "8", "valid_rows": "8"}
    paths = {"data.train.path": table, "data.valid.path": table, "data.length": str(LENGTH + 3)}
    return small | paths | {"out": str(out), "steps": "50", "valid_every": "50"} | more


@pytest.fixture(scope="module")
def run(table: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from unmask.training.loop import train

    out = tmp_path_factory.mktemp("cells") / "run"
    train(load_config(BENCHMARKS / "cells.toml", options(table, out, **{"optim.lr": "2e-2"})), device="cpu")
    return out


def strong(texts: list[str]) -> float:
    text = "".join(texts)
    return sum(text.count(base) for base in "GC") / len(text)


# --- use --------------------------------------------------------------------------------------------------------------


def test_a_class_is_asked_for_by_its_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = {}
    for name in ("high_1", "low_1"):
        for weight in ("0", "1.5"):
            words = ["generate", str(run), "--label", name, "--guidance", weight, "--num", "12", "--json"]
            assert cli.run([*words, "--steps", "10"]) == 0
            shares[name, weight] = strong(json.loads(capsys.readouterr().out)["texts"])
    assert shares["high_1", "0"] > shares["low_1", "0"] + 0.2
    assert shares["high_1", "1.5"] > shares["low_1", "1.5"] + 0.2
    assert shares["high_1", "1.5"] - shares["low_1", "1.5"] > shares["high_1", "0"] - shares["low_1", "0"]
    assert cli.run(["generate", str(run), "--label", "hihg_1"]) == 2
    assert "did you mean 'high_1'?" in capsys.readouterr().err


def test_a_sequence_costs_least_given_its_own_class(run: Path) -> None:
    model = unmask.load(run, device="cpu")
    text = "GCCGCGGCCGGGCTCGCCGGCGCGCCGGACGCGCCGGCCG"
    own, other = (model.score(text, label=name, num_samples=32).nats for name in ("high_1", "low_1"))
    assert own < other - 5


@pytest.mark.parametrize("equivariance", ["none", "ps", "ph"])
def test_every_caduceus_with_classes_is_guided(equivariance: Any) -> None:
    """By p(x | c)^(1 + w) p(x)^(-w) of its own two answers, on both strands alike."""
    torch.manual_seed(0)
    denoiser = Caduceus(hidden=16, blocks=1, states=4, classes=2, equivariance=equivariance).for_tokenizer(DNA)
    network = denoiser.build(num_ids=DNA.num_ids, mask_id=DNA.mask_id)
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model = Model(denoiser=network, tokenizer=DNA, objective=MDLM(form="count"), length=8, labels=("a", "b"))
    plain, labelled, guided = (
        model.generate(40, 8, seed=1, label=label, guidance=weight)
        for label, weight in ((None, None), ("a", None), ("a", 2.0))
    )
    assert plain != labelled != guided
    assert model.generate(40, 8, seed=1, label="a", guidance=-1.0) == plain  # -1 leads back to no class
    with pytest.raises(UsageError, match="guidance needs a condition"):
        model.generate(1, 8, guidance=1.0)
    none = Model(
        denoiser=dataclasses.replace(denoiser, classes=0).build(num_ids=DNA.num_ids, mask_id=DNA.mask_id),
        tokenizer=DNA,
        objective=MDLM(),
        length=8,
    )
    with pytest.raises(UsageError, match="it knows none"):
        none.generate(1, 8, label="a", guidance=1.0)


# --- splits of one table ----------------------------------------------------------------------------------------------


def test_rows_of_one_table_are_learned_or_held_out(table: str, tmp_path: Path) -> None:
    from unmask.corpora.csv import Csv

    def read(*only: str) -> Csv:
        return Csv(path=table, delimiter="\t", field="sequence", label_field="TAG", only=only)

    def rows(train: Csv, valid: Csv) -> Any:
        data = DataConfig(train=train, valid=valid, length=64, packing="pad", cache=str(tmp_path / "cache"))
        return rows_of(data, DNA, "train")

    train = read("data_label=training")
    assert rows(train, read("data_label=test", "data_label=validation")).report.documents == 4 * 60
    for other in (read(), read("chr=chr1"), read("data_label=training", "data_label=test")):
        with pytest.raises(UsageError, match=r"read the same file .* let `only` ask for different values"):
            rows(train, other)


# --- the judge --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("cells")


def test_the_judge_tells_classes_apart_on_either_strand(cells: Any) -> None:
    rng = random.Random(1)
    known = [Document(sequence(rng, share), label=name) for name, share in SHARES.items() for _ in range(60)]
    judge = cells.Judge.learn(known, sorted(SHARES))
    fresh = [sequence(rng, SHARES[name]) for name in ("high", "low") for _ in range(30)]
    told = judge.of(fresh)
    assert sum(one == ("high", "low")[i // 30] for i, one in enumerate(told)) > 45
    assert judge.of([cells.other_strand(one) for one in fresh]) == told


def test_copies_are_found_on_either_strand(cells: Any) -> None:
    rng = random.Random(2)
    one, other = (sequence(rng, 0.5) for _ in range(2))
    made = [one[:24] + other, other, cells.other_strand(one)[3:30], one[:23] + "A" + other]
    assert cells.copied(made, [one[:23] + one[23:]]) == [1, 0, 1, int(one[23] == "A")]


def test_the_table_is_made_by_one_command(
    cells: Any, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"denoiser.hidden": "16", "denoiser.blocks": "1", "denoiser.states": "4", "batch": "16", "valid_rows": "8"}
    small |= {"data.length": str(LENGTH + 3), "steps": "1"}
    recipe = [word for key, value in small.items() for word in (f"--{key}", value)]
    words = [table, "--out", str(tmp_path / "run"), "--num", "3", "--guidance", "0", "1", "--sampling-steps", "2"]
    monkeypatch.setattr(sys, "argv", ["cells.py", *words, "--device", "cpu", *recipe])
    assert cells.main() == 0
    said = (tmp_path / "run" / "cells.md").read_text()
    assert [line.split("|")[1].strip() for line in said.splitlines()[4:]] == [
        "real, held out",
        "guidance 0",
        "guidance 1",
    ]
    assert "| high | low | middle | rising |" in said

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "written").glob("*/*.txt")}

    before = files()
    assert len(before) == 8
    capsys.readouterr()
    assert cells.main() == 0
    assert files() == before
    assert (tmp_path / "run" / "cells.md").read_text() == said
    assert "step" not in capsys.readouterr().out

    model = unmask.load(str(tmp_path / "run"))
    args = argparse.Namespace(out=str(tmp_path / "run"), num=3, sampling_steps=2, batch_size=8)
    own = cells.written(model, 0, "high_1", args)
    assert files() == before
    torch.nn.init.zeros_(next(model.denoiser.parameters()))
    assert cells.written(model, 0, "high_1", args) != own  # other weights
    assert len(files()) == 9
