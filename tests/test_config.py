"""Recipes: read strictly, written so that they read back the same, overridden with the right types."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask import corpora, denoisers, noise, objectives, samplers
from unmask.cli import Parser, _split_overrides
from unmask.config import (
    DataConfig,
    OptimConfig,
    RunConfig,
    Word,
    from_dict,
    load_config,
    option_choices,
    option_paths,
    read_recipe,
    to_dict,
)
from unmask.corpora.jsonl import Jsonl
from unmask.corpora.stdlib import Stdlib
from unmask.corpora.text import Text
from unmask.denoisers.dit import DiT
from unmask.errors import ConfigError, UsageError
from unmask.noise.cosine import Cosine
from unmask.noise.geometric import Geometric
from unmask.noise.log_linear import LogLinear
from unmask.noise.polynomial import Polynomial
from unmask.objectives.ar import AR
from unmask.objectives.d3pm import D3PM
from unmask.objectives.mdlm import MDLM
from unmask.registry import renamed
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.semi_ar import SemiAR

EMPTY = "# every default\n"


def toml(value: Any) -> str:
    """One value as TOML; None has no spelling there and is left out of tables."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def write_toml(path: Path, data: dict[str, Any]) -> Path:
    path.write_text("".join(f"{k} = {toml(v)}\n" for k, v in data.items() if v is not None), encoding="utf-8")
    return path


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.toml"
    path.write_text(EMPTY, encoding="utf-8")
    return path


# --- round trips ------------------------------------------------------------------------------------------------------

NEEDED = {
    "path": "some/file",
    "source": "a/file",
    "target": "b/file",
    "dataset": "some/name",
    "window": 8,
    "of": (corpora.Stdlib(),),
}  # options without a default


@pytest.mark.parametrize(
    ("room", "name"),
    [(room, name) for room in (noise, objectives, denoisers, samplers, corpora) for name in room.room.names()],
    ids=lambda v: v if isinstance(v, str) else v.__name__.rpartition(".")[2],
)
def test_every_plugin_reads_back_the_same(room: Any, name: str) -> None:
    cls = room.room.get(name)
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    plugin = cls(**{key: NEEDED[key] for key in required})
    base = room.room.base
    data = json.loads(json.dumps(to_dict(plugin)))
    assert data["name"] == name
    assert from_dict(base, data) == plugin
    if required:
        with pytest.raises(ConfigError, match=f"here.{required[0]} is missing"):
            from_dict(base, name, "here")
    else:
        assert from_dict(base, name) == plugin  # a bare name means the defaults


def test_defaults_read_back_the_same(tmp_path: Path, empty: Path) -> None:
    assert load_config(empty) == RunConfig()
    assert load_config(write_toml(tmp_path / "all.toml", to_dict(RunConfig()))) == RunConfig()
    (tmp_path / "all.json").write_text(json.dumps(to_dict(RunConfig())), encoding="utf-8")
    assert load_config(tmp_path / "all.json") == RunConfig()


fractions = st.floats(0, 1, exclude_min=True, exclude_max=True)
positive = st.floats(1e-9, 1e3)
words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)
noises = st.one_of(
    st.builds(Cosine),
    st.builds(Polynomial, power=positive),
    st.builds(Geometric, sigma_min=st.floats(1e-6, 1), sigma_max=st.floats(2, 50)),
)
objectives_ = st.one_of(
    st.builds(MDLM, noise=noises, steps=st.none() | st.integers(1, 10**9)),
    st.builds(MDLM, noise=noises, steps=st.integers(1, 99), carry_over=st.booleans(), zero_masking=st.booleans()),
    st.builds(D3PM, noise=noises, steps=st.integers(1, 99), carry_over=st.booleans()),
)
nets = st.builds(
    DiT,
    size=st.sampled_from(["nano", "medium"]),
    hidden=st.none() | st.sampled_from([64, 1024]),
    blocks=st.none() | st.integers(1, 99),
    conditioning=st.sampled_from(["none", "constant", "level", "sigma"]),
    tied=st.booleans(),
    dropout=st.floats(0, 1, exclude_max=True),
)
corpora_ = st.one_of(
    st.builds(Text, path=words, separator=st.none() | words),
    st.builds(Jsonl, path=words, field=words, prompt_field=st.none() | words),
    st.builds(Stdlib, limit_mb=st.none() | positive),
)
configs = st.builds(
    RunConfig,
    out=words,
    seed=st.integers(-(2**70), 2**70),
    steps=st.integers(1, 10**12),
    batch=st.just(64),
    micro_batch=st.none() | st.integers(1, 64),
    tokenizer=words,
    data=st.builds(
        DataConfig,
        train=corpora_,
        valid=st.none() | corpora_,
        held_out=fractions,
        share=fractions,
        packing=st.sampled_from(["wrap", "pad", "sentence"]),
        length=st.integers(2, 10**6),
        cache=st.none() | words,
    ),
    denoiser=nets,
    objective=objectives_,
    optim=st.builds(
        OptimConfig,
        lr=positive,
        betas=st.tuples(fractions, fractions),
        warmup=st.integers(0, 10**6),
        schedule=st.sampled_from(["constant", "cosine", "wsd"]),
        ema=st.floats(0, 1, exclude_max=True),
    ),
    precision=st.sampled_from(["auto", "fp32", "bf16"]),
    compile=st.booleans(),
    keep=st.integers(1, 9),
)


@settings(max_examples=60)
@given(config=configs)
def test_any_config_reads_back_the_same(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> None:
    folder = tmp_path_factory.mktemp("config")
    data = to_dict(config)
    assert load_config(write_toml(folder / "recipe.toml", data)) == config
    (folder / "recipe.json").write_text(json.dumps(data), encoding="utf-8")
    assert load_config(folder / "recipe.json", {}) == config
    # A run's folder stands for its recipe, and is where the run is, whatever the recipe said when it began.
    assert load_config(folder) == dataclasses.replace(config, out=str(folder))


def test_built_in_recipes_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    demo = load_config("demo")
    assert demo.objective == MDLM()
    assert load_config("python").objective == MDLM(form="count")
    assert demo.data.train == Stdlib()
    with pytest.raises(ConfigError, match=r"built-in recipe 'dmeo'; did you mean 'demo'\?"):
        load_config("dmeo")


# --- overrides --------------------------------------------------------------------------------------------------------


def spelled(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(spelled, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("key", option_paths(RunConfig()))
def test_every_option_can_be_given(empty: Path, key: str) -> None:
    """Its own default, typed, changes nothing; a word of no type is refused where the type is not text."""
    value = option_paths(RunConfig())[key]
    assert load_config(empty, {key: spelled(value)}) == RunConfig()
    if key in option_choices(RunConfig()) or isinstance(value, int | float | list):
        with pytest.raises(ConfigError, match=key.partition(".")[0]):
            load_config(empty, {key: "qqqq"})


@pytest.mark.parametrize(
    ("given_", "key", "value"),
    [
        ({"steps": "1e3"}, "steps", 1000),
        ({"steps": "1_000"}, "steps", 1000),
        ({"seed": "9007199254740993"}, "seed", 9007199254740993),  # no float holds it
        ({"seed": "-7"}, "seed", -7),
        ({"micro_batch": "16"}, "micro_batch", 16),
        ({"micro_batch": "none"}, "micro_batch", None),
        ({"compile": "on"}, "compile", True),
        ({"compile": "No"}, "compile", False),
        ({"optim.lr": "1e-3"}, "optim.lr", 1e-3),
        ({"optim.lr": "1"}, "optim.lr", 1.0),
        ({"optim.betas": "0.8,0.95"}, "optim.betas", [0.8, 0.95]),
        ({"data.cache": "none"}, "data.cache", None),
        ({"tokenizer": "none"}, "tokenizer", "none"),  # no option that may be left out
        ({"tokenizer": "1"}, "tokenizer", "1"),
        ({"objective.steps": "1000"}, "objective.steps", 1000),
        ({"data.train": "stdlib", "data.train.limit_mb": "0.5"}, "data.train.limit_mb", 0.5),
    ],
    ids=lambda v: str(v),
)
def test_overrides_are_typed(empty: Path, given_: dict[str, str], key: str, value: Any) -> None:
    found = option_paths(load_config(empty, given_))[key]
    assert (found, type(found)) == (value, type(value))


def test_a_plugin_named_then_given_options(empty: Path) -> None:
    assert load_config(empty, {"objective.noise": "cosine"}).objective == MDLM(noise=Cosine())
    typed = {"objective.noise": "polynomial", "objective.noise.power": "3"}
    assert load_config(empty, typed).objective == MDLM(noise=Polynomial(power=3.0))
    with pytest.raises(ConfigError, match=r"unknown key 'objective\.noise\.power'"):
        load_config(empty, {"objective.noise": "cosine", "objective.noise.power": "3"})


def test_naming_a_plugin_drops_the_old_ones_options(tmp_path: Path) -> None:
    path = write_toml(tmp_path / "r.toml", to_dict(RunConfig(objective=MDLM(noise=Polynomial(power=5.0), steps=7))))
    assert load_config(path).objective == MDLM(noise=Polynomial(power=5.0), steps=7)
    assert load_config(path, {"objective.noise": "cosine"}).objective == MDLM(noise=Cosine(), steps=7)
    typed = {"objective": "ar", "denoiser.causal": "true"}
    assert load_config(path, typed).objective == AR()
    # the same name again is no other plug-in
    for typed in ({"objective.noise": "polynomial"}, {"objective": "mdlm"}, {"objective.name": "mdlm"}):
        assert load_config(path, typed).objective == MDLM(noise=Polynomial(power=5.0), steps=7)
    assert load_config(path, {"objective.name": "d3pm"}).objective == D3PM()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            {
                "objective.noise.power": "3",
                "objective.noise": "polynomial",
                "objective.steps": "9",
                "objective": "d3pm",
            },
            {"objective": D3PM(noise=Polynomial(power=3.0), steps=9)},
        ),
        (
            {"objective.noise.power": "3", "objective.noise": "polynomial", "objective": "mdlm"},  # the recipe's own
            {"objective": MDLM(noise=Polynomial(power=3.0), steps=7)},
        ),
        (
            {"objective.noise.sigma_max": "9", "objective.noise": "geometric", "objective.steps": "3"},
            {"objective": MDLM(noise=Geometric(sigma_max=9.0), steps=3)},
        ),
        (
            {"data.train.path": "x.jsonl", "data.train": "jsonl", "data.train.field": "body", "data.length": "64"},
            {"data": DataConfig(train=Jsonl(path="x.jsonl", field="body"), length=64)},
        ),
        (
            {"data.valid.path": "v.txt", "data.valid": "text", "data.valid.separator": "--"},
            {"data": DataConfig(train=Text(path="a"), valid=Text(path="v.txt", separator="--"))},
        ),
        (
            {"objective": "ar", "denoiser.causal": "true", "denoiser": "dit", "denoiser.blocks": "2"},
            {"objective": AR(), "denoiser": DiT(causal=True, blocks=2)},
        ),
    ],
    ids=lambda v: " ".join(v),
)
def test_overrides_mean_the_same_in_any_order(tmp_path: Path, typed: dict[str, str], expected: dict[str, Any]) -> None:
    """What was given for a plug-in holds before and after its name; what the recipe gave another one is gone."""
    recipe = RunConfig(objective=MDLM(noise=Polynomial(power=5.0), steps=7), data=DataConfig(train=Text(path="a")))
    path = write_toml(tmp_path / "r.toml", to_dict(recipe))
    for order in itertools.permutations(typed):
        assert load_config(path, {key: typed[key] for key in order}) == dataclasses.replace(recipe, **expected), order


def test_flags_mean_the_same_in_any_order_and_the_last_of_two_counts(empty: Path) -> None:
    parser = Parser()
    for words in itertools.permutations(("--objective.steps=16", "--objective=d3pm", "--objective.noise=cosine")):
        rest, typed = _split_overrides([*words, "--steps", "7", "--steps", "8"], parser)
        config = load_config(empty, typed)
        assert (rest, config.objective, config.steps) == ([], D3PM(steps=16, noise=Cosine()), 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[denoiser]\nblocks = 2", {"denoiser": DiT(blocks=2)}),
        ("[objective]\nsteps = 9", {"objective": MDLM(steps=9)}),
        ('[objective]\nname = "d3pm"\nnoise = {}', {"objective": D3PM()}),
        ("[data]\ntrain = { limit_mb = 0.5 }", {"data": DataConfig(train=Stdlib(limit_mb=0.5))}),
    ],
)
def test_a_table_without_a_name_is_the_default_plugins(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path) == dataclasses.replace(RunConfig(), **expected)


def test_a_recipes_own_words_are_not_taken_for_typed_ones(tmp_path: Path) -> None:
    """A file or field called none, a separator 1,2: only what is typed on the command line is read by its type."""
    config = RunConfig(data=DataConfig(train=Text(path="1", separator="none"), cache="none"))
    path = write_toml(tmp_path / "r.toml", to_dict(config))
    assert load_config(path, {"steps": "5"}) == dataclasses.replace(config, steps=5)
    path.write_text('steps = "5"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="steps: expected int, got '5'"):
        load_config(path)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 5", "'steps'"),
        ("[optim]\nlearning_rate = 1.0", "learning_rate"),
        ("[optim]\nwarm_up = 1", "'warmup'"),
        ('objective = { name = "mdlm", stepps = 3 }', "'steps'"),
        ('objective = { name = "mdml" }', "'mdlm'"),
        ('objective = { name = "mdlm", noise = "cosin" }', "'cosine'"),
        ('objective = { name = "mdlm", noise = { name = "cosine", power = 2 } }', r"'objective\.noise\.power'"),
        ("objective = { power = 3 }", "power"),
        ('data = { valid = { path = "x" } }', "data.valid"),  # there is no default
        ("objective = 3", "name"),
        ('objective = { name = "../x" }', "objective"),
        ('steps = "five"', "steps"),
        ("steps = 1.5", "steps"),
        ("steps = true", "steps"),
        ("steps = 0", "steps"),
        ("seed = 1" + "0" * 400, "seed"),
        ("compile = 1", "compile"),
        ('tokenizer = ["bytes"]', "tokenizer"),
        ("micro_batch = 65", "micro_batch"),
        ("sample_every = -1", "sample_every"),
        ("optim = 3", "optim"),
        ("[optim]\nlr = nan", "optim.lr"),
        ("[optim]\nlr = -1.0", "lr"),
        ("[optim]\nclip = -1.0", "clip"),
        ("[optim]\nwarmup = -1", "warmup"),
        ("[optim]\nema = 1.0", "ema"),
        ("[optim]\nbetas = [0.9, 1.0]", "betas"),
        ("[optim]\nbetas = [0.9]", "optim.betas"),
        ("[optim]\nbetas = 0.9", "optim.betas"),
        ('[optim]\nschedule = "cosin"', "'cosine'"),
        ("[data]\nlength = 1", "length"),
        ("[data]\nheld_out = 1.0", "held_out"),
        ("[data]\nshare = 0", "data.share must lie above 0"),
        ('[data]\ntrain = "text"', "path"),
        ('[data]\ntrain = { name = "text", path = "a", separator = "" }', "separator"),
        ('denoiser = { name = "dit", hidden = 33 }', "hidden"),
        ('denoiser = { name = "dit", dropout = 1.0 }', "dropout"),
        ("steps = = 5", "TOML"),
        ("steps = 5\nsteps = 6", "TOML"),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"optm.lr": "1"}, "'optim'"),
        ({"optim.lrr": "1"}, "'lr'"),
        ({"steps.more": "1"}, "steps.more"),
        ({"optim": "adam"}, "optim"),
        ({"steps": "many"}, "steps"),
        ({"steps": "none"}, "steps"),
        ({"steps": "1e400"}, "steps"),
        ({"optim.lr": "fast"}, "optim.lr"),
        ({"optim.betas": "0.9"}, "optim.betas"),
        ({"optim.betas": "0.9,x"}, "optim.betas"),
        ({"compile": "maybe"}, "compile"),
        ({"precision": "fp8"}, "precision"),
        ({"data.valid.path": "x"}, r"data\.valid"),
        ({"objective.noise.power": "3"}, "power"),
        ({"objective.noise.power": "3", "objective": "d3pm"}, "power"),
        ({"data.valid": "txt"}, "'text'"),
    ],
)
def test_a_wrong_override_is_refused_by_name(empty: Path, typed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(empty, typed)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    (tmp_path / "latin.toml").write_bytes(b'out = "\xe9"')
    for name, message in (
        ("list.json", "table"),
        ("deep.json", "JSON"),
        ("latin.toml", "TOML"),
        ("gone.toml", "gone.toml"),
        (".", "no run has begun"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_recipe(tmp_path / name)


# --- combinations that mean nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MDLM(carry_over=False), "carry_over"),
        (lambda: MDLM(zero_masking=False), "zero_masking"),
        (lambda: MDLM(form="count", steps=8), "count"),
        (lambda: MDLM(steps=0), "steps"),
        (lambda: D3PM(steps=None), "steps"),
        (lambda: D3PM(form="count"), "count"),
        (lambda: DiT(causal=True, conditioning="level"), "noise"),
        (lambda: DiT(causal=True, conditioning="sigma"), "noise"),
        (
            lambda: RunConfig(objective=MDLM(), denoiser=DiT(causal=True)),
            "causal",
        ),
        (
            lambda: RunConfig(objective=D3PM(), denoiser=DiT(causal=True)),
            "causal",
        ),
        (lambda: RunConfig(objective=AR(), denoiser=DiT()), "causal"),
        (
            lambda: RunConfig(objective=MDLM(form="count"), denoiser=DiT(conditioning="level")),
            "count",
        ),
        (
            lambda: RunConfig(objective=MDLM(form="count"), denoiser=DiT(conditioning="sigma")),
            "count",
        ),
        (lambda: SemiAR(window=1), "window"),
        (lambda: SemiAR(window=8, stride=9), "stride"),
        (lambda: SemiAR(window=8, inner=samplers.LeftToRight()), "window"),
        (lambda: Ancestral(steps=0), "steps"),
        (lambda: Ancestral(temperature=float("nan")), "temperature"),
        (lambda: Ancestral(top_p=0.0), "top_p"),
        (lambda: Ancestral(top_k=-1), "top_k"),
        (lambda: Polynomial(power=0.0), "power"),
        (lambda: Geometric(sigma_min=3.0, sigma_max=2.0), "sigma_min"),
    ],
)
def test_a_meaningless_combination_is_refused_with_a_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MDLM(steps=8, carry_over=False),
        lambda: MDLM(steps=8, zero_masking=False),
        lambda: D3PM(steps=8, carry_over=True, zero_masking=True),
        lambda: RunConfig(objective=AR(), denoiser=DiT(causal=True)),
        lambda: RunConfig(objective=AR(), denoiser=DiT(causal=True, conditioning="constant")),
        lambda: RunConfig(objective=MDLM(form="count"), denoiser=DiT(conditioning="constant")),
        lambda: RunConfig(objective=MDLM(), denoiser=DiT(conditioning="sigma")),
        lambda: RunConfig(objective=D3PM(noise=LogLinear()), denoiser=DiT(conditioning="level")),
    ],
)
def test_a_meaningful_combination_is_not(make: Any) -> None:
    make()


def test_choices_are_those_that_are_accepted(empty: Path) -> None:
    """Every word that --options offers for a plain choice is taken, and is what the option then has."""
    for key, choices in option_choices(RunConfig()).items():
        if key in ("data.train", "data.valid", "denoiser", "objective"):
            continue  # plug-ins may need options or one another
        for choice in choices:
            if key in ("denoiser.causal", "data.anchor", "best_is") or (
                key.startswith("objective.") and choice in ("false", "count")
            ):
                continue  # needs a second option beside it
            assert spelled(option_paths(load_config(empty, {key: choice}))[key]) == choice, (key, choice)


def test_typed_words_stay_plain_text_in_the_config(empty: Path) -> None:
    config = load_config(empty, {"tokenizer": "chars", "precision": "bf16", "data.cache": "here"})
    for value in (config.tokenizer, config.precision, config.data.cache):
        assert type(value) is str
    assert from_dict(tuple[int, ...], Word("1,2,3")) == (1, 2, 3)


# --- unions and renamed keys ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """Fields that may be of several types, and one that had another name."""

    amount: int | Literal["auto", "all"] | None = None
    noise: noise.Noise | float = 0.5
    several: tuple[int, ...] | str = ()
    num_steps: int = renamed("steps", "max_steps", default=8)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ({"amount": 3}, Options(amount=3)),
        ({"amount": "all"}, Options(amount="all")),
        ({"amount": Word("12")}, Options(amount=12)),
        ({"amount": Word("auto")}, Options(amount="auto")),
        ({"amount": Word("none")}, Options(amount=None)),
        ({"noise": 0.25}, Options(noise=0.25)),
        ({"noise": "cosine"}, Options(noise=Cosine())),
        ({"noise": {"name": "polynomial", "power": 3.0}}, Options(noise=Polynomial(power=3.0))),
        ({"several": [1, 2]}, Options(several=(1, 2))),
        ({"several": "none of them"}, Options(several="none of them")),
        ({"num_steps": 3}, Options(num_steps=3)),
    ],
    ids=str,
)
def test_a_union_takes_what_one_of_its_members_takes(data: dict[str, Any], options: Options) -> None:
    assert from_dict(Options, data) == options
    assert from_dict(Options, to_dict(options), saved=True) == options


@pytest.mark.parametrize(
    ("data", "noun"),
    [
        ({"amount": "al"}, "all"),
        ({"amount": 1.5}, "int"),
        ({"amount": True}, "amount"),
        ({"noise": {"name": "polynomial", "powr": 3.0}}, "power"),  # the member that is a table says what is wrong
        ({"noise": None}, "noise"),
        ({"several": 3}, "several"),
    ],
    ids=str,
)
def test_what_no_member_takes_is_refused(data: dict[str, Any], noun: str) -> None:
    with pytest.raises(ConfigError, match=noun):
        from_dict(Options, data)


def test_a_renamed_key_names_the_new_one_and_reads_in_what_was_saved() -> None:
    for old in ("steps", "max_steps"):
        with pytest.raises(ConfigError, match="num_steps"):
            from_dict(Options, {old: 3})
        assert from_dict(Options, {old: 3}, saved=True) == Options(num_steps=3)


def test_choices_of_a_union_are_those_of_all_members() -> None:
    assert option_choices(Options(noise=0.5))["amount"] == ["auto", "all", "none"]  # type: ignore[arg-type]
    assert "cosine" in option_choices(Options())["noise"]  # type: ignore[arg-type]
