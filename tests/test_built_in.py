"""Models by name, weights in parts, and the length a model writes by itself."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from unmask.cli import _sampling, run
from unmask.errors import ModelFolderError
from unmask.model import Model, load
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.block import Block
from unmask.samplers.confidence import Confidence
from unmask.samplers.drawing import Drawing
from unmask.storage import built_in
from unmask.storage.model_folder import unshared
from unmask.storage.tensor_file import read_tensors, write_tensors
from unmask.storage.weight_parts import joined, weight_files, write_parts


@pytest.fixture
def shelf(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of built-in models with one in it, `stories`, its weights in bf16 parts; the current folder is empty."""
    models, here = tmp_path / "models", tmp_path / "here"
    model.save(models / "stories")
    here.mkdir()
    (models / "stories" / "model.safetensors").unlink()
    write_parts(models / "stories", {k: v.bfloat16() for k, v in unshared(model.denoiser).items()}, most=20_000)
    (models / "stories" / "card.md").write_text("# stories\n\nTiny tales.\n\nMore of it.\n", encoding="utf-8")
    monkeypatch.setattr(built_in, "MODELS", models)
    monkeypatch.chdir(here)
    return models


def test_parts_hold_what_the_whole_holds(shelf: Path, model: Model) -> None:
    paths = weight_files(shelf / "stories")
    assert len(paths) > 2
    assert all(path.stat().st_size < 25_000 for path in paths)
    loaded = load("stories", device="cpu")
    for name, p in unshared(loaded.denoiser).items():
        assert p.dtype == torch.float32
        assert p.equal(unshared(model.denoiser)[name].bfloat16().float()), name


def test_a_folder_here_is_taken_before_a_built_in_model(shelf: Path, fresh_model: Model) -> None:
    with torch.no_grad():
        fresh_model.denoiser.get_parameter("output.bias").fill_(3.0)
    fresh_model.save("stories")
    assert load("stories", device="cpu").denoiser.get_parameter("output.bias").eq(3.0).all()


def test_names_that_are_not_there(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFolderError, match=r"no model folder 'storys'.*did you mean 'stories'"):
        load("storys")
    for sly in ("../models/nothing", "stories/..", ""):
        with pytest.raises(ModelFolderError):
            load(sly)
    monkeypatch.setattr(built_in, "MODELS", shelf / "none")
    with pytest.raises(ModelFolderError, match="no model folder 'stories'; give a folder"):
        load("stories")


def lose_a_part(folder: Path) -> None:
    weight_files(folder)[-1].unlink()


def lose_the_first(folder: Path) -> None:
    weight_files(folder)[0].unlink()


def add_the_whole(folder: Path) -> None:
    write_tensors(folder / "model.safetensors", {"a": torch.ones(1)})


def say_another_count(folder: Path) -> None:
    last = weight_files(folder)[-1]
    last.rename(folder / last.name.replace("-of-000", "-of-001"))


def repeat_a_tensor(folder: Path) -> None:
    first, second, *_ = weight_files(folder)
    both = read_tensors(first) | read_tensors(second)
    second.unlink()
    write_tensors(second, both)


def link_a_part(folder: Path) -> None:
    path = weight_files(folder)[1]
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def no_weights(folder: Path) -> None:
    for path in weight_files(folder):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_part, "is missing"),
        (lose_the_first, "is not part 1 of"),
        (add_the_whole, "holds both model.safetensors and model-00001"),
        (say_another_count, "is not part"),
        (repeat_a_tensor, "is in an earlier part already"),
        (link_a_part, "is a symbolic link"),
        (no_weights, "model.safetensors is missing"),
    ],
)
def test_parts_that_do_not_make_a_whole(shelf: Path, damage: Any, message: str) -> None:
    damage(shelf / "stories")
    with pytest.raises(ModelFolderError, match=message):
        load("stories")


def test_parts_join_to_what_was_cut(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(i + 1, 7) for i in range(9)}
    for most in (1, 200, 1 << 20):
        folder = tmp_path / str(most)
        folder.mkdir()
        write_parts(folder, tensors, most)
        back = joined(read_tensors, weight_files(folder))
        assert back.keys() == tensors.keys()
        assert all(back[name].equal(t) for name, t in tensors.items())


def test_a_load_leaves_the_compiler_alone(shelf: Path) -> None:
    """torch's compiler takes seconds to import, and a draw on the meta device does so."""
    code = f"import sys, unmask; unmask.load({str(shelf / 'stories')!r}); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_command_lists_and_shows(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    assert capsys.readouterr().out == "stories      Tiny tales.\n"
    assert run(["models", "stories"]) == 0
    assert capsys.readouterr().out.endswith("More of it.\n")
    assert run(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"]["stories"]["folder"] == str(shelf / "stories")
    assert run(["models", "nothing"]) == 1
    assert "no model folder 'nothing'" in capsys.readouterr().err


def test_generate_without_a_name_takes_the_default(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--device", "cpu", "--length", "12", "--json"]) == 0
    unnamed = capsys.readouterr().out
    assert run(["generate", "stories", "--device", "cpu", "--length", "12", "--json"]) == 0
    assert json.loads(unnamed) == json.loads(capsys.readouterr().out)


def test_the_length_of_a_text(shelf: Path, model: Model, make_config: Any, tmp_path: Path) -> None:
    assert model.typical_length is None  # trained on full windows
    folder = shelf / "stories"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"typical_length": 7}))
    told = load("stories", device="cpu")
    rows: list[int] = []
    told.generate(2, watch=lambda step: rows.append(step.tokens_BL.shape[1]))
    assert set(rows) == {7}
    told.save(tmp_path / "again")
    assert load(tmp_path / "again", device="cpu").typical_length == 7
    for wrong in (0, model.length + 1, "7", 7.0, True):
        (folder / "config.json").write_text(json.dumps(config | {"typical_length": wrong}))
        with pytest.raises(ModelFolderError, match="typical_length"):
            load("stories")


def test_a_model_may_draw_in_a_way_of_its_own(shelf: Path, model: Model, tmp_path: Path) -> None:
    """Where nobody says otherwise: with any sampler that is named by a word, but not with one that somebody made."""
    folder = shelf / "stories"
    config = json.loads((folder / "config.json").read_text())
    assert "drawing" not in config  # nothing special is not said
    (folder / "config.json").write_text(json.dumps(config | {"drawing": {"top_p": 0.6}}))
    told = load("stories", device="cpu")
    assert told.sampler == Ancestral(top_p=0.6).bind(None)
    assert told.generate(seed=3) == told.generate(seed=3, sampler=Ancestral(top_p=0.6))
    assert told.generate(seed=3) != told.generate(seed=3, sampler=Ancestral())
    told.save(tmp_path / "again")
    assert load(tmp_path / "again", device="cpu").drawing == told.drawing

    def chosen(*words: str) -> Any:
        parser = argparse.ArgumentParser()
        _sampling.add_arguments(parser)
        args = parser.parse_args(words)
        args.overrides, args.flags = {}, []
        return _sampling.make_sampler(args, told)

    assert chosen() == told.sampler
    assert chosen("--steps", "7", "--temperature", "0.5") == Ancestral(top_p=0.6, steps=7, temperature=0.5).bind(None)
    assert chosen("--top-p", "1") == Ancestral().bind(None)
    assert chosen("--sampler", "confidence") == Confidence(top_p=0.6)
    assert chosen("--sampler", "block", "--steps", "9") == Block(inner=Confidence(top_p=0.6, steps=9))
    for wrong in (7, None, {"top_p": 2}, {"top_p": "much"}, {"steps": 7}, {"draw": "os.system"}):
        (folder / "config.json").write_text(json.dumps(config | {"drawing": wrong}))
        with pytest.raises(ModelFolderError, match=r"drawing|top_p"):
            load("stories")


def test_a_recipe_says_how_its_model_draws(tmp_path: Path, make_config: Any) -> None:
    from unmask.training.loop import train

    config = dataclasses.replace(make_config(tmp_path / "run", steps=1), drawing=Drawing(top_p=0.5))
    assert train(config, device="cpu").sampler == Ancestral(top_p=0.5).bind(None)
    assert load(tmp_path / "run", device="cpu").sampler == Ancestral(top_p=0.5).bind(None)
    other = dataclasses.replace(config, steps=2, drawing=Drawing(top_k=3))  # no part of what is trained: it may change
    assert train(other, device="cpu", resume=True).drawing == Drawing(top_k=3)


def test_a_run_on_whole_texts_knows_their_length(tmp_path: Path, make_config: Any) -> None:
    from unmask.training.loop import train

    config = make_config(tmp_path / "run", steps=1, data={"packing": "sentence"})
    trained = train(config, device="cpu")
    assert trained.typical_length is not None
    assert 20 <= trained.typical_length <= 32  # sentences of 22 to 29 bytes and their end
    shutil.rmtree(tmp_path / "run")
