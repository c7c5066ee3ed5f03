"""Recipes that build on others: what they resolve to, what is refused, and what the built-in ones say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.config import RECIPE_FILE, DataConfig, OptimConfig, RunConfig, load_config, read_recipe, to_dict
from unmask.corpora.stdlib import Stdlib
from unmask.corpora.text import Text
from unmask.denoisers.dit import DiT
from unmask.errors import ConfigError
from unmask.noise.cosine import Cosine
from unmask.noise.polynomial import Polynomial
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.samplers.drawing import Drawing


def write(folder: Path, **recipes: str) -> Path:
    """The recipes as TOML files of these names; the first one's path."""
    for name, text in recipes.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(recipes))}.toml"


# --- what a recipe and its base are together --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "own", "expected"),
    [
        ("steps = 5\nbatch = 8", "steps = 6", {"steps": 6, "batch": 8}),
        ("[optim]\nlr = 0.5\nclip = 2.0", "[optim]\nlr = 0.25", {"optim": OptimConfig(lr=0.25, clip=2.0)}),
        ("[optim]\nbetas = [0.1, 0.2]", "[optim]\nbetas = [0.3, 0.4]", {"optim": OptimConfig(betas=(0.3, 0.4))}),
        # a table without a name is that of the base's plug-in, a plug-in named again is the same one
        (
            '[objective]\nname = "mdlm"\nform = "count"',
            '[objective]\nnoise = "cosine"',
            {"objective": MDLM(form="count", noise=Cosine())},
        ),
        ("[denoiser]\nblocks = 2", "[denoiser]\nheads = 4", {"denoiser": DiT(blocks=2, heads=4)}),
        ("[denoiser]\nblocks = 2", 'denoiser = "dit"', {"denoiser": DiT(blocks=2)}),
        ("[denoiser]\nblocks = 2", '[denoiser]\nname = "dit"', {"denoiser": DiT(blocks=2)}),
        ('denoiser = "dit"', "[denoiser]\nblocks = 2", {"denoiser": DiT(blocks=2)}),
        # another plug-in: nothing of the old one lingers, at any depth
        (
            "[data]\ntrain = { limit_mb = 1.0 }\nlength = 7",
            '[data]\ntrain = { name = "text", path = "a" }',
            {"data": DataConfig(train=Text(path="a"), length=7)},
        ),
        (
            "[data]\ntrain = { limit_mb = 1.0 }",
            '[data]\ntrain = "stdlib"',
            {"data": DataConfig(train=Stdlib(limit_mb=1.0))},
        ),
        (
            '[objective]\nsteps = 7\nnoise = { name = "polynomial", power = 5.0 }',
            '[objective]\nnoise = "cosine"',
            {"objective": MDLM(steps=7, noise=Cosine())},
        ),
        (
            '[objective]\nsteps = 7\nnoise = { name = "polynomial", power = 5.0 }',
            "[objective]\nnoise = { power = 4.0 }",
            {"objective": MDLM(steps=7, noise=Polynomial(power=4.0))},
        ),
        (
            '[objective]\nform = "count"\n[denoiser]\nblocks = 2',
            'objective = "ar"\n[denoiser]\ncausal = true',
            {"objective": AR(), "denoiser": DiT(blocks=2, causal=True)},
        ),
        # a base need not be whole: only what comes out is read as a run
        ('objective = "ar"', "[denoiser]\ncausal = true", {"objective": AR(), "denoiser": DiT(causal=True)}),
    ],
)
def test_a_recipe_is_laid_over_its_base(tmp_path: Path, base: str, own: str, expected: dict[str, Any]) -> None:
    path = write(tmp_path, own=f'base = "under.toml"\n{own}', under=base)
    assert load_config(path) == dataclasses.replace(RunConfig(), **expected)


KEYS = {
    "steps": st.integers(1, 9),
    "optim.lr": st.sampled_from([0.1, 0.2]),
    "optim.warmup": st.sampled_from([1.0, 2.0]),
    "objective.noise": st.sampled_from(["cosine", "polynomial", "log_linear"]),
    "data.length": st.integers(2, 9),
}


@settings(max_examples=80, deadline=None)
@given(
    under=st.fixed_dictionaries({}, optional=KEYS),
    over=st.fixed_dictionaries({}, optional=KEYS),
    typed=st.fixed_dictionaries({}, optional=KEYS),
)
def test_a_base_means_what_the_command_line_means(
    tmp_path_factory: pytest.TempPathFactory, under: dict[str, Any], over: dict[str, Any], typed: dict[str, Any]
) -> None:
    """Of three levels each is an override of the one below."""

    def nested(flat: dict[str, Any]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in flat.items():
            table, _, last = key.rpartition(".")
            (data.setdefault(table, {}) if table else data)[last] = value
        return data

    folder = tmp_path_factory.mktemp("recipes")
    (folder / "under.json").write_text(json.dumps(nested(under)), encoding="utf-8")
    (folder / "over.json").write_text(json.dumps({"base": "under.json"} | nested(over)), encoding="utf-8")
    (folder / "top.json").write_text(json.dumps({"base": "over.json"} | nested(typed)), encoding="utf-8")
    expected = load_config(folder / "under.json", over | typed)
    assert load_config(folder / "top.json") == load_config(folder / "over.json", typed) == expected


def test_a_base_is_found_from_the_file_that_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", mid='base = "../low.json"\nbatch = 16')
    (tmp_path / "low.json").write_text('{"base": "demo", "steps": 7}', encoding="utf-8")
    top = write(tmp_path, top='base = "sub/mid.toml"\nkeep = 5')
    monkeypatch.chdir(tmp_path / "sub")
    expected = dataclasses.replace(load_config("demo"), steps=7, batch=16, keep=5)
    assert load_config(top) == load_config("../top.toml") == expected
    assert "base" not in read_recipe(top)
    # a built-in recipe is meant by its bare name, also in a file that is called as it is
    assert load_config(write(tmp_path, demo='base = "demo"\nkeep = 5')).keep == 5


def test_what_a_base_gives_can_be_taken_out(tmp_path: Path) -> None:
    """TOML has no word for none; JSON and the command line have."""
    (tmp_path / "own.json").write_text('{"base": "stories", "data": {"valid": null}}', encoding="utf-8")
    assert load_config(tmp_path / "own.json") == load_config("stories", {"data.valid": "none"})
    assert load_config(tmp_path / "own.json").data.valid is None


def test_the_command_line_overrides_what_the_base_says(tmp_path: Path) -> None:
    path = write(tmp_path, own='base = "demo"\n[objective]\nnoise = { name = "polynomial", power = 3.0 }')
    assert load_config(path, {"objective.noise.power": "4"}).objective == MDLM(noise=Polynomial(power=4.0))
    assert load_config(path, {"objective.noise": "cosine"}).objective == MDLM(noise=Cosine())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipes", "sentence"),
    [
        ({"a": 'base = "a.toml"'}, "{0}/a.toml → {0}/a.toml: the bases lead around in a circle: take one of them out"),
        (
            {"a": 'base = "b.toml"', "b": 'base = "c.toml"', "c": 'base = "./b.toml"'},
            "{0}/a.toml → {0}/b.toml → {0}/c.toml → {0}/b.toml: the bases lead around in a circle: "
            "take one of them out",
        ),
        (
            {"a": 'base = "b.toml"', "b": 'base = "dmeo"'},
            "{0}/a.toml → {0}/b.toml: no recipe file or built-in recipe 'dmeo'; did you mean 'demo'?",
        ),
        ({"a": 'base = "c.toml"'}, "{0}/a.toml: cannot read the recipe {0}/c.toml: No such file or directory"),
        ({"a": 'base = "runs/b"'}, "{0}/a.toml: base = 'runs/b' is no TOML or JSON file, which a recipe is"),
        ({"a": 'base = "b.txt"'}, "{0}/a.toml: base = 'b.txt' is no TOML or JSON file, which a recipe is"),
        (
            {"a": "base = 3"},
            "{0}/a.toml: base must be a built-in recipe's name or the path of a TOML or JSON file, got 3",
        ),
        ({"a": 'base = "b.toml"', "b": "steps = = 5"}, "{0}/a.toml: {0}/b.toml is not valid TOML: {1}"),
    ],
    ids=["itself", "around", "unknown", "gone", "no file", "text", "number", "no recipe"],
)
def test_a_base_that_is_none_is_refused(tmp_path: Path, recipes: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, **recipes))
    start, _, _ = sentence.format(tmp_path, "\0").partition("\0")
    assert str(error.value).startswith(start)
    assert "\n" not in str(error.value).partition("TOML")[0]
    assert error.value.exit_code == 2


def test_a_base_that_is_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^\S*a\.toml: \S*list\.json: a recipe is a table of options$"):
        load_config(write(tmp_path, a='base = "list.json"'))


def test_what_a_run_wrote_says_everything(tmp_path: Path) -> None:
    """Its recipe has no base, and one that is put into it is no key."""
    written = to_dict(load_config("stories_ar"))
    assert "base" not in written
    (tmp_path / RECIPE_FILE).write_text(json.dumps(written | {"base": "demo"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown key 'base'"):
        load_config(tmp_path)


# --- the built-in ones ------------------------------------------------------------------------------------------------


def test_recipes_that_build_on_others_say_what_they_always_said() -> None:
    stories = {"train": "stories/train.txt.xz", "valid": "stories/valid.txt.xz"}
    texts = {part: Text(path=path, separator="<|endoftext|>") for part, path in stories.items()}
    assert load_config("stories_ar") == RunConfig(
        out="runs/stories_ar",
        steps=3200,
        batch=512,
        tokenizer="bpe:8191",
        precision="bf16",
        compile=True,
        log_every=50,
        valid_every=1600,
        valid_rows=512,
        save_every=1600,
        sample_every=1600,
        keep=1,
        data=DataConfig(**texts, packing="pad", length=256),
        denoiser=DiT(hidden=512, blocks=6, heads=8, tied=True, dropout=0.1, causal=True),
        objective=AR(),
        drawing=Drawing(),
        optim=OptimConfig(lr=5e-3, weight_decay=0.1, warmup=300, decay_fraction=0.6, ema=0.998),
    )
    plain = {"conditioning": "constant", "tied": True, "qk_norm": False, "zero_init": False}
    assert load_config("python") == RunConfig(
        out="runs/python",
        steps=3000,
        batch=128,
        precision="bf16",
        log_every=50,
        valid_every=1000,
        valid_rows=512,
        save_every=1000,
        sample_every=1000,
        keep=1,
        data=DataConfig(length=256),
        denoiser=DiT(hidden=384, blocks=8, heads=6, dropout=0.1, **plain),
        objective=MDLM(form="count"),
        optim=OptimConfig(lr=1.5e-3, muon=False, warmup=200, ema=0.999),
    )


def test_the_papers_settings_stand_by_themselves() -> None:
    text = (Path(load_config.__code__.co_filename).parent / "recipes" / "paper.toml").read_text(encoding="utf-8")
    assert "base" not in [line.partition("=")[0].strip() for line in text.splitlines()]
