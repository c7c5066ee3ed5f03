"""The guides of CONTRIBUTING.md, executed: each plug-in is trained, resumed, measured, used, served, saved and loaded.

Two small runs hold all seven. In `sums` are the schedule, the objective and the corpus; `gru` has the denoiser. Sampler,
metric and constraint are used with both where they can be.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from guide_files import PAGE, Guide, read_guides, write_guides
from starlette.testclient import TestClient

import unmask
from unmask import plugin_modules
from unmask.cli import run
from unmask.constraints import Regex
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import UnmaskError, UsageError
from unmask.model import Model
from unmask.objectives.mdlm import MDLM
from unmask.registry import room_of
from unmask.server.app import make_app
from unmask.storage.model_folder import unshared
from unmask.training.checkpoint.files import load_checkpoint

RECIPE = """
batch = 8
log_every = 4
valid_every = 4
valid_rows = 8
save_every = 4
sample_every = 0
data = { train = { name = "sums", num = 120 }, length = 24, held_out = 0.2 }
optim = { muon = true, lr = 5e-3, warmup = 2, schedule = "constant", ema = 0.9 }
"""
SUMS = """
objective = { name = "clipped", most = 3.0, noise = { name = "power_law", k = 1.5 } }
denoiser = { name = "dit", hidden = 16, blocks = 1, heads = 2, dropout = 0.1 }
"""
GRU = """
objective = { name = "ar" }
denoiser = { name = "gru", hidden = 16 }
"""
CPU = ["--device", "cpu"]


@dataclass(frozen=True)
class House:
    """Where the guides' files lie, the words that name them to a command, and a folder for runs."""

    folder: Path
    words: list[str]

    def run(self, *words: str) -> int:
        return run([*words, *self.words])

    def recipe(self, name: str) -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(RECIPE + {"sums": SUMS, "gru": GRU}[name], encoding="utf-8")
        return path


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_modules, "loaded", [])
        for name in unmask._ROOMS:
            room = importlib.import_module(f"unmask.{name}").room
            patch.setattr(room, "_registered", dict(room._registered))
        yield House(folder, write_guides(folder))
    for guide in read_guides():
        sys.modules.pop(guide.file.removesuffix(".py"), None)


@pytest.fixture(scope="module", params=["sums", "gru"])
def trained(request: pytest.FixtureRequest, house: House) -> Path:
    """A run of 4 steps, stopped, and gone on with to 8, by the command line alone."""
    out = house.folder / "runs" / request.param
    assert house.run("train", str(house.recipe(request.param)), "--out", str(out), "--steps", "4", *CPU) == 0
    assert house.run("train", str(out), "--resume", "--steps", "8", *CPU) == 0
    return out


@pytest.fixture(scope="module")
def model(trained: Path) -> Model:
    return unmask.load(trained, device="cpu")


def is_diffusion(trained: Path) -> bool:
    return trained.name == "sums"


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guide", read_guides(), ids=lambda guide: guide.file)
def test_a_guide_is_short_and_derives_from_bases_alone(guide: Guide) -> None:
    assert 20 <= guide.code_lines + guide.source.count('"""') // 2 <= 42
    bases = {"Noise", "LearnedNoise", "Objective", "Denoiser", "Network", "Sampler", "Metric", "Corpus", "Constraint"}
    classes = [node for node in ast.walk(ast.parse(guide.source)) if isinstance(node, ast.ClassDef)]
    assert classes
    assert {ast.unparse(base) for node in classes for base in node.bases} <= bases


def test_there_is_a_guide_for_every_room(house: House) -> None:
    assert [guide.heading.partition(".")[0] for guide in read_guides()] == list("1234567")
    assert house.run("plugins", "--json") == 0
    rooms = {room_of(cls).package for room in unmask._ROOMS for cls in own_classes(room)}
    assert rooms == {f"unmask.{room}" for room in unmask._ROOMS}


def own_classes(room: str) -> list[type[Any]]:
    package = importlib.import_module(f"unmask.{room}")
    modules = {guide.file.removesuffix(".py") for guide in read_guides()}
    return [cls for cls in map(package.room.get, package.room.names()) if cls.__module__ in modules]


def test_the_recipe_of_the_page_is_read(house: House, tmp_path: Path) -> None:
    [recipe] = re.findall(r"^```toml\n# sums.toml\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "sums.toml").write_text(recipe)
    house.run("plugins", "--json")  # registers them
    config = unmask.load_config(tmp_path / "sums.toml")
    assert type(config.objective).__name__ == "Clipped"
    assert unmask.load_config(tmp_path / "sums.toml", {"denoiser": "gru", "objective": "ar"}).denoiser.causal


# --- train, resume ----------------------------------------------------------------------------------------------------


def test_objects_in_python_train_the_same_bits_in_one_go(house: House, trained: Path) -> None:
    """Passed as objects and never stopped: every tensor of the run is that of the command line's two halves."""
    config = unmask.load_config(house.recipe(trained.name), {"out": str(trained) + "-straight", "steps": "8"})
    for cls in (type(config.objective), type(config.denoiser), type(config.data.train)):
        room_of(cls).discard(room_of(cls).name_of(cls)) if cls.__module__ in sys.modules else None
    unmask.train(config, device="cpu")
    one, other = load_checkpoint(Path(config.out)), load_checkpoint(trained)
    assert one is not None
    assert other is not None
    assert one.step == other.step == 8
    for group, tensors in one.tensors.items():
        assert tensors.keys() == other.tensors[group].keys()
        for name, tensor in tensors.items():
            assert tensor.equal(other.tensors[group][name]), (group, name)
    if is_diffusion(trained):  # the schedule has learned, and its average has not got as far
        k, mean_k = (one.tensors[group]["objective.noise.log_k"].exp().item() for group in ("model", "ema"))
        assert abs(k - 1.5) > abs(mean_k - 1.5) > 1e-4


# --- eval -------------------------------------------------------------------------------------------------------------


def test_eval_prints_what_the_number_is(house: House, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert house.run("eval", str(trained), "--max-rows", "4", "--num-samples", "2", *CPU) == 0
    assert f"perplexity  {'≤' if is_diffusion(trained) else '='} " in capsys.readouterr().out
    metric = '{"name": "known_ngrams", "n": 2, "texts": 3}'
    assert house.run("eval", str(trained), "--metric", metric, "--max-rows", "4", *CPU) == 0
    assert re.search(r"known n-grams ≈ [01]\.\d+", capsys.readouterr().out)


def test_the_objectives_bound_is_masked_diffusions(trained: Path, model: Model) -> None:
    """Whose bound the numerics hold to enumeration: clipping is of the loss alone."""
    if not is_diffusion(trained):
        with pytest.raises(UsageError, match="sides"):
            unmask.objectives.Clipped().check(model.denoiser)  # type: ignore[attr-defined]
        return
    objective, x_BL = model.objective, torch.tensor([model.tokenizer.encode("(17+5)=22\n(1+2)=3\n")])
    plain = MDLM(noise=objective.noise)  # type: ignore[attr-defined]
    batch = unmask.make_batch(x_BL.repeat(32, 1), seed=0, step=0)
    with torch.no_grad():
        nats_BL, plain_BL = (each.position_nats(model.denoiser, batch) for each in (objective, plain))
        torch.testing.assert_close(nats_BL, plain_BL)
        wide = dataclasses.replace(objective, most=1e9)  # type: ignore[type-var]
        losses = [float(each.loss(model.denoiser, batch).nats) for each in (objective, wide, plain)]
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)
    assert losses[0] < losses[1]
    assert objective.kind == "upper bound"


# --- generate, constrain ----------------------------------------------------------------------------------------------


def test_generate_and_constrain(house: House, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(trained), "--length", "12", "--num", "3", "--json", *CPU]
    middle = ["--sampler", "middle_first", "--temperature", "0.8"]
    if not is_diffusion(trained):
        assert house.run(*words) == 0
        assert len(written(capsys.readouterr().out)) == 3
        for refused in (middle, ["--regex", "[0-9]{12}"], ["--constraint", '{"name": "balanced"}']):
            assert house.run(*words, *refused) == 2
            err = capsys.readouterr().err
            assert "autoregressive" in err or "left_to_right" in err
        return
    for sampler in ([], middle):
        assert house.run(*words, *sampler, "--regex", "[0-9]{12}") == 0
        assert len(re.findall(r"\b[0-9]{12}\b", capsys.readouterr().out)) == 3
        balanced = ["--constraint", '{"name": "balanced", "depth": 1}', "--constraint", '{"name": "length", "least": 9}']
        assert house.run(*words, *sampler, *balanced, "--regex", "[()+0-9]*") == 0
        texts = written(capsys.readouterr().out)
        assert len(texts) == 3
        assert all(is_balanced(text) for text in texts)


def written(out: str) -> list[str]:
    return [one["text"] for line in out.splitlines() for one in listed(json.loads(line))]


def listed(data: Any) -> list[dict[str, Any]]:
    return data if isinstance(data, list) else data.get("texts", [data])


def is_balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if not 0 <= depth <= 1:
            return False
    return depth == 0


def test_the_sampler_opens_middles_and_holds_a_gap(house: House, trained: Path, model: Model) -> None:
    if not is_diffusion(trained):
        with pytest.raises(UsageError, match="left_to_right"):
            model.generate(1, 8, sampler=model.make_sampler("middle_first"))
        return
    sampler = model.make_sampler("middle_first", temperature=0.5)
    opened: list[list[int]] = []
    (text,) = model.generate(1, 7, sampler=sampler, watch=lambda step: opened.append(sorted(step.position_N.tolist())))
    assert opened == [[3], [1, 5], [0, 2, 4, 6]]
    assert len(opened) == sampler.max_calls(7)
    assert model.generate(1, 7, sampler=sampler) == [text]
    filled = model.fill("([MASK:2]+[MASK:3])", sampler=sampler, constraint=Regex(pattern="[0-9]+"), seed=3)
    assert re.fullmatch(r"\([0-9]{2}\+[0-9]{3}\)", filled[0])
    assert len(model.generate(2, model.length + 9, sampler=sampler)) == 2  # windows are put around it


def test_the_recurrent_cache_gives_the_networks_own_law(trained: Path, model: Model) -> None:
    if is_diffusion(trained):
        return
    network, z_BL = model.denoiser, torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        whole, cache = network.trunk(z_BL), network.new_cache(2, 9)
        for start, stop in ((0, 3), (3, 4), (3, 4), (4, 9), (0, 2)):
            part = network.trunk(z_BL, cache=cache, span=(start, stop))
            torch.testing.assert_close(part, whole[:, start:stop])
        later = z_BL.clone()
        later[:, 5] += 1
        assert network.trunk(later)[:, :6].equal(whole[:, :6])  # nothing sees itself, nor what comes after
        assert not network.trunk(later)[:, 6].equal(whole[:, 6])
    with pytest.raises(UsageError, match="cond"):
        network.trunk(z_BL, cond=torch.zeros(2))


@pytest.mark.parametrize("may_end", [True, False])
def test_the_constraints_automaton(house: House, may_end: bool) -> None:
    """Against a count of the brackets, for every text of up to five of the letters ( ) x."""
    house.run("plugins", "--json")
    tokenizer = load_tokenizer("bytes")
    automaton = unmask.constraints.Balanced(depth=1).automaton(tokenizer, may_end=may_end)
    texts = [""]
    for _ in range(5):
        texts += [text + letter for text in texts[-(3 ** len(texts[-1])) :] for letter in "()x"]
    assert len(texts) == (3**6 - 1) // 2
    for text in texts:
        ids = tokenizer.encode(text)
        assert automaton.accepts(ids) == is_balanced(text), text
        assert automaton.accepts([*ids, tokenizer.eot_id, 40]) == (may_end and is_balanced(text)), text


def test_the_corpus_is_its_documents(house: House) -> None:
    house.run("plugins", "--json")
    sums = unmask.corpora.Sums
    texts = [document.text for document in sums(num=20).documents()]
    assert texts == [document.text for document in sums(num=20).documents()]
    assert all(re.fullmatch(r"\((\d+)\+(\d+)\)=(\d+)\n", text) for text in texts)
    assert len({sums(num=20).fingerprint(), sums(num=21).fingerprint(), sums(num=20, seed=1).fingerprint()}) == 3
    with pytest.raises(UsageError, match="num"):
        sums(num=0)


# --- serve ------------------------------------------------------------------------------------------------------------


def test_the_server_answers(trained: Path, model: Model) -> None:
    diffusion = is_diffusion(trained)
    with TestClient(make_app(model, name="mine"), base_url="http://localhost") as client:
        asked: dict[str, Any] = {"model": "mine", "prompt": "(1", "max_tokens": 8, "seed": 2}
        for sampler in (None, "middle_first") if diffusion else (None,):
            named = {} if sampler is None else {"sampler": sampler}
            answer = client.post("/v1/completions", json=asked | named)
            assert answer.status_code == 200, answer.text
            plain = model.generate(1, 10, "(1", seed=2, sampler=model.make_sampler(sampler))
            assert "(1" + answer.json()["choices"][0]["text"] == plain[0]
            streamed = client.post("/v1/completions", json=asked | named | {"stream": True}).text
            parts = [line[6:] for line in streamed.splitlines() if line.startswith("data:")]
            text = "".join(json.loads(part)["choices"][0]["text"] for part in parts if part != "[DONE]")
            assert "(1" + text == plain[0]
            held = client.post("/v1/completions", json=asked | named | {"regex": "[0-9]{8}"})
            if diffusion:
                assert re.fullmatch("[0-9]{8}", held.json()["choices"][0]["text"]), held.text
            else:
                assert (held.status_code, "diffusion" in held.text) == (400, True), held.text
        balanced = {"constraints": [{"name": "balanced", "depth": 1}], "regex": "[()x]{6}"}
        filled = client.post("/fill", json={"text": "[MASK:6]", "seed": 1, **balanced})
        if diffusion:
            assert is_balanced(filled.json()["texts"][0]["text"]), filled.text
        else:
            assert (filled.status_code, "diffusion" in filled.text) == (400, True), filled.text
            refused = client.post("/v1/completions", json=asked | {"sampler": "middle_first"})
            assert (refused.status_code, "left_to_right" in refused.text) == (400, True), refused.text
        answer = client.post("/score", json={"texts": ["(1+2)=3"], "seed": 0})
        assert answer.status_code == 200, answer.text
        print(answer.json())


# --- save, load -------------------------------------------------------------------------------------------------------

ELSEWHERE = """
import json, sys
import unmask
from unmask import plugin_modules

runs, files = json.loads(sys.argv[1]), json.loads(sys.argv[2])
missed = []
for run in runs:
    try:
        unmask.load(run, device="cpu")
    except unmask.UnmaskError as e:
        missed.append(str(e))
plugin_modules.load_plugins(files)
texts = [unmask.load(run, device="cpu").generate(2, 10, seed=5) for run in runs]
print(json.dumps([missed, texts]))
"""


def test_another_process_loads_with_the_plugins_and_misses_the_class_without(house: House, tmp_path: Path) -> None:
    runs, texts = [house.folder / "runs" / name for name in ("sums", "gru")], []
    for run_folder in runs:
        model = unmask.load(run_folder, device="cpu")
        model.save(tmp_path / run_folder.name)
        again = unmask.load(tmp_path / run_folder.name, device="cpu")
        assert all(unshared(again.denoiser)[name].equal(t) for name, t in unshared(model.denoiser).items())
        texts.append(again.generate(2, 10, seed=5))
    folders = [str(tmp_path / run_folder.name) for run_folder in runs]
    files = [word for word in house.words if word != "--plugin"]
    line = [sys.executable, "-c", ELSEWHERE, json.dumps(folders), json.dumps(files)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    missed, loaded = json.loads(done.stdout)
    assert loaded == texts
    for sentence, (cls, module) in zip(missed, [("Clipped", "clipped"), ("GRU", "gru")], strict=True):
        assert cls in sentence
        assert module in sentence
        assert "\n" not in sentence
    assert issubclass(unmask.UsageError, UnmaskError)
