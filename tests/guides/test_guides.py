"""The guides of CONTRIBUTING.md, executed: each plug-in is found, trained, resumed, measured, used, saved and loaded.

Two small runs hold them: `sums` has corpus, objective and schedule, `gru` the denoiser. Sampler, metric and constraint
are used with both, or refused; both are fine-tuned with the head.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from guide_files import PAGE, Bench, Guide, read_guides

import unmask
from unmask.constraints import Regex
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import UnmaskError, UsageError
from unmask.model import Model
from unmask.objectives.mdlm import MDLM
from unmask.registry import register, room_of
from unmask.storage.model_folder import unshared
from unmask.training.checkpoint.files import load_checkpoint

ROOMS = ["noise", "objectives", "denoisers", "samplers", "metrics", "corpora", "constraints", "heads"]
GUIDES = list(zip(read_guides(), ROOMS, strict=True))


def own_class(room: str) -> type[Any]:
    """The guide's class of that room."""
    modules = {guide.module for guide, _ in GUIDES}
    package = importlib.import_module(f"unmask.{room}")
    [cls] = [cls for cls in map(package.room.get, package.room.names()) if cls.__module__ in modules]
    return cls  # type: ignore[no-any-return]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_there_is_a_guide_for_every_room() -> None:
    assert sorted(ROOMS) == sorted(unmask._ROOMS)
    for number, (guide, room) in enumerate(GUIDES, 1):
        assert guide.heading.startswith(f"{number}. Add a")
        assert f"unmask.{room}" in guide.source


@pytest.mark.parametrize("guide", [guide for guide, _ in GUIDES], ids=lambda guide: guide.file)
def test_a_guide_is_short_and_derives_from_bases_alone(guide: Guide) -> None:
    assert 15 <= guide.code_lines <= 40
    bases = {"Noise", "LearnedNoise", "Objective", "Denoiser", "Network", "Sampler", "Metric", "Corpus", "Constraint"}
    bases |= {"Head", "nn.Module"}
    classes = [node for node in ast.walk(ast.parse(guide.source)) if isinstance(node, ast.ClassDef)]
    assert classes
    assert {ast.unparse(base) for node in classes for base in node.bases} <= bases


def test_the_recipe_of_the_page_is_read(bench: Bench, tmp_path: Path) -> None:
    [recipe] = re.findall(r"^```toml\n# sums.toml\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "sums.toml").write_text(recipe)
    assert type(unmask.load_config(tmp_path / "sums.toml").objective) is own_class("objectives")
    other = unmask.load_config(tmp_path / "sums.toml", {"denoiser": "gru", "objective": "ar"})
    assert type(other.denoiser) is own_class("denoisers")


# --- how a plug-in becomes known --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("guide", "room"), GUIDES, ids=ROOMS)
def test_register_makes_it_known(bench: Bench, guide: Guide, room: str) -> None:
    cls = own_class(room)
    package = importlib.import_module(f"unmask.{room}")
    package.room.discard(package.room.name_of(cls))
    assert guide.module not in package.room.names()
    assert register(cls) is cls
    assert package.room.get(guide.module) is cls is getattr(package, cls.__name__)
    assert cls.__name__ in dir(package)
    assert package.room.summary(guide.module)


@pytest.mark.parametrize(("guide", "room"), GUIDES, ids=ROOMS)
def test_a_file_in_the_rooms_folder_is_a_plugin(
    guide: Guide, room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.import_module(f"unmask.{room}")
    (tmp_path / guide.file).write_text(guide.source, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(package.room, "_registered", {})
    try:
        cls = package.room.get(guide.module)
        assert dataclasses.is_dataclass(cls)
        assert room_of(cls) is package.room
        assert package.room.name_of(cls) == guide.module
        assert package.room.summary(guide.module) == (ast.get_docstring(ast.parse(guide.source)) or "").splitlines()[0]
    finally:
        sys.modules.pop(f"unmask.{room}.{guide.module}", None)
        vars(package).pop(guide.module, None)


# --- train, resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sums", "gru"])
def test_objects_in_python_train_the_same_bits_in_one_go(
    bench: Bench, name: str, request: pytest.FixtureRequest
) -> None:
    """Never registered and never stopped: every tensor of the run is that of the command line's two halves."""
    halves: Path = request.getfixturevalue(name)
    config = unmask.load_config(bench.recipe(name), {"out": f"{halves}-straight", "steps": "8"})
    for room in ("noise", "objectives", "denoisers", "corpora"):
        room_of(own_class(room)).discard(room_of(own_class(room)).name_of(own_class(room)))
    try:
        unmask.train(config, device="cpu")
    finally:
        bench.run("plugins", "--json")
    one, other = load_checkpoint(Path(config.out)), load_checkpoint(halves)
    assert one is not None
    assert other is not None
    assert one.step == other.step == 8
    for group, tensors in one.tensors.items():
        assert tensors.keys() == other.tensors[group].keys()
        for tensor_name, tensor in tensors.items():
            assert tensor.equal(other.tensors[group][tensor_name]), (group, tensor_name)
    if name == "sums":  # the schedule has learned, and its average has not got as far
        k, mean_k = (one.tensors[group]["objective.noise.log_k"].exp().item() for group in ("model", "ema"))
        assert abs(k - 1.5) > abs(mean_k - 1.5) > 1e-4


def test_the_objective_refuses_a_causal_denoiser_before_the_first_step(bench: Bench, tmp_path: Path) -> None:
    changes = {"denoiser": "gru", "out": str(tmp_path / "run")}
    with pytest.raises(UsageError, match="sides"):
        unmask.train(unmask.load_config(bench.recipe("sums"), changes), device="cpu")
    assert not (tmp_path / "run" / "recipe.json").exists()


# --- eval -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sign"), [("sums", "≤"), ("gru", "=")])
def test_eval_prints_what_the_number_is(
    bench: Bench, name: str, sign: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(request.getfixturevalue(name)), "--max-rows", "4", "--device", "cpu"]
    capsys.readouterr()
    assert bench.run(*words, "--num-samples", "2") == 0
    assert f"perplexity  {sign} " in capsys.readouterr().out
    assert bench.run(*words, "--metric", '{"name": "known_ngrams", "n": 2, "texts": 3}') == 0
    assert re.search(r"known n-grams ≈ [01]\.\d+", capsys.readouterr().out)


def test_the_metric_counts(diffusion: Model) -> None:
    metric = own_class("metrics")(n=1, texts=8)
    written = "".join(diffusion.generate(8, seed=7)).encode()
    digits = sum(letter in b"0123456789" for letter in written)
    assert 0 < digits < len(written)
    measured = unmask.evaluate(diffusion, ["0123", "456789"], metric=metric, seed=7)
    assert (measured.n, measured.value) == (len(written), pytest.approx(digits / len(written)))
    assert measured.sign == "≈"
    assert measured.protocol["texts"] == 8


def test_the_objectives_bound_is_masked_diffusions(diffusion: Model) -> None:
    """Whose bound the numerics hold to enumeration: clipping is of the loss alone."""
    objective: Any = diffusion.objective
    x_BL = torch.tensor([diffusion.tokenizer.encode("(17+5)=22\n(1+2)=3\n")])
    batch = unmask.make_batch(x_BL.repeat(32, 1), seed=0, step=0)
    plain, wide = MDLM(noise=objective.noise), dataclasses.replace(objective, most=1e9)
    with torch.no_grad():
        nats_BL, plain_BL = (each.position_nats(diffusion.denoiser, batch) for each in (objective, plain))
        losses = [float(each.loss(diffusion.denoiser, batch).nats) for each in (objective, wide, plain)]
    torch.testing.assert_close(nats_BL, plain_BL)
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)
    assert losses[0] < losses[1]
    assert diffusion.score("(1+2)=3", seed=1).kind == "upper bound"


def test_the_schedule_is_one(bench: Bench) -> None:
    """Exact ends, the derivative by differences, the inverse; the module and its description agree."""
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    for k in (0.5, 1.0, 3.0):
        noise = own_class("noise")(k=k)
        learned = noise.build().double()
        assert noise.alpha(t)[[0, -1]].tolist() == [1, 0]
        assert (noise.alpha(t).diff() < 0).all()
        torch.testing.assert_close(noise.inverse(noise.alpha(t)), t, atol=1e-6, rtol=1e-5)
        slope = (learned.alpha(t[1:-1] + 1e-6) - learned.alpha(t[1:-1] - 1e-6)) / 2e-6
        torch.testing.assert_close(slope, learned.dalpha(t[1:-1]), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(learned.alpha(t).detach(), noise.alpha(t), atol=1e-6, rtol=1e-6)
        assert learned.weight(t[1:]).requires_grad
        assert not noise.weight(t[1:]).requires_grad


# --- generate, constrain ----------------------------------------------------------------------------------------------


def is_balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if not 0 <= depth <= 1:
            return False
    return depth == 0


MIDDLE = ["--sampler", "middle_first", "--temperature", "0.8"]


@pytest.mark.parametrize("sampler", [[], MIDDLE], ids=["own", "middle_first"])
def test_generate_and_constrain(
    bench: Bench, sums: Path, sampler: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(sums), "--length", "12", "--num", "3", "--json", "--device", "cpu", *sampler]
    capsys.readouterr()
    assert bench.run(*words, "--regex", "[0-9]{12}") == 0
    assert all(re.fullmatch("[0-9]{12}", text) for text in json.loads(capsys.readouterr().out)["texts"])
    balanced = ["--constraint", '{"name": "balanced", "depth": 1}', "--regex", "[()+0-9]*", "--min-tokens", "9"]
    assert bench.run(*words, *balanced) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert len(texts) == 3
    assert all(is_balanced(text) and len(text) >= 9 for text in texts)


def test_many_texts_go_to_a_folder(bench: Bench, sums: Path, diffusion: Model, tmp_path: Path) -> None:
    """Also beyond a window, where the sampler that is bound to the learned schedule stands inside another."""
    for length in (12, diffusion.length + 4):
        words = ["--num", "3", "--part-size", "2", "--length", str(length), "--out", str(tmp_path / str(length))]
        for _ in range(2):  # again: everything is there already
            assert bench.run("generate", str(sums), *words, "--device", "cpu") == 0
        parts = sorted((tmp_path / str(length)).glob("part-*.jsonl"))
        texts = [json.loads(line)["text"] for part in parts for line in part.read_text().splitlines()]
        assert texts == diffusion.generate(3, length)


def test_what_an_autoregressive_model_cannot_do_is_refused(
    bench: Bench, gru: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(gru), "--length", "12", "--num", "3", "--json", "--device", "cpu"]
    capsys.readouterr()
    assert bench.run(*words) == 0
    assert len(json.loads(capsys.readouterr().out)["texts"]) == 3
    for refused, noun in (
        (MIDDLE, "left_to_right"),
        (["--regex", "[0-9]{12}"], "diffusion"),
        (["--constraint", '{"name": "balanced"}'], "diffusion"),
    ):
        assert bench.run(*words, *refused) == 2
        assert noun in capsys.readouterr().err


def test_the_sampler_opens_middles_and_holds_a_gap(diffusion: Model) -> None:
    sampler = diffusion.make_sampler("middle_first", temperature=0.5)
    opened: list[list[int]] = []
    (text,) = diffusion.generate(1, 7, sampler=sampler, watch=lambda step: opened.append(step.position_N.tolist()))
    assert opened == [[3], [1, 5], [0, 2, 4, 6]]
    assert diffusion.generate(1, 7, sampler=sampler) == [text]
    for length in range(1, 20):
        opened.clear()
        diffusion.generate(1, length, sampler=sampler, watch=lambda step: opened.append(step.position_N.tolist()))
        assert len(opened) == sampler.max_calls(length)
        assert sorted(position for step in opened for position in step) == list(range(length))
    (filled,) = diffusion.fill("([MASK:2]+[MASK:3])", sampler=sampler, constraint=Regex(pattern="[0-9]+"), seed=3)
    assert re.fullmatch(r"\([0-9]{2}\+[0-9]{3}\)", filled)
    assert len(diffusion.generate(2, diffusion.length + 9, sampler=sampler)) == 2  # windows are put around it


def test_the_recurrent_cache_gives_the_networks_own_law(recurrent: Model) -> None:
    network, z_BL = recurrent.denoiser, torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        whole, cache = network.trunk(z_BL), network.new_cache(2, 9)
        for start, stop in ((0, 3), (3, 4), (3, 4), (4, 9), (0, 2)):
            part = network.trunk(z_BL, cache=cache, span=(start, stop))
            torch.testing.assert_close(part, whole[:, start:stop])
        later = z_BL.clone()
        later[:, 5] = (later[:, 5] + 1) % 256
        assert network.trunk(later)[:, :6].equal(whole[:, :6])  # nothing sees itself, nor what comes after
        assert not network.trunk(later)[:, 6].equal(whole[:, 6])
    with pytest.raises(UsageError, match="cond"):
        network.trunk(z_BL, cond=torch.zeros(2))
    texts = ["(1+2)=3", "(17+5)=22\n(1"]
    together = recurrent.score(texts).nats_B
    torch.testing.assert_close(together, torch.cat([recurrent.score(text).nats_B for text in texts]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("may_end", [True, False])
def test_the_constraints_automaton(bench: Bench, may_end: bool) -> None:
    """Against a count of the brackets, for every text of up to five of the letters ( ) x."""
    tokenizer = load_tokenizer("bytes")
    automaton = own_class("constraints")(depth=1).automaton(tokenizer, may_end=may_end)
    texts = [""]
    for length in range(5):
        texts += [text + letter for text in texts[-(3**length) :] for letter in "()x"]
    assert len(set(texts)) == (3**6 - 1) // 2
    for text in texts:
        ids = tokenizer.encode(text)
        assert automaton.accepts(ids) == is_balanced(text), text
        assert automaton.accepts([*ids, tokenizer.eot_id, 40]) == (may_end and is_balanced(text)), text


def test_the_corpus_is_its_documents(bench: Bench) -> None:
    sums = own_class("corpora")
    texts = [document.text for document in sums(num=20).documents()]
    assert texts == [document.text for document in sums(num=20).documents()]
    for text in texts:
        a, b, total = map(int, re.fullmatch(r"\((\d+)\+(\d+)\)=(\d+)\n", text).groups())  # type: ignore[union-attr]
        assert a + b == total
    assert len({sums(num=20).fingerprint(), sums(num=21).fingerprint(), sums(num=20, seed=1).fingerprint()}) == 3
    with pytest.raises(UsageError, match="num"):
        sums(num=0)


# --- fine-tune --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sums", "gru"])
def test_both_are_fine_tuned_with_the_head(
    bench: Bench, name: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which sums have a 7, of a network of ours and of one from scratch, which reads from left to right."""
    sums = [f"({a}+{b})={a + b}" for a in range(12) for b in range(12)]
    rows = [f"{text}\t{'with' if '7' in text else 'without'}\n" for text in sums]
    (tmp_path / "sums.tsv").write_text("text\tlabel\n" + "".join(rows))
    words = ["finetune", str(request.getfixturevalue(name)), "--head", "attentive", "--head.queries", "3"]
    options = {"data.train": tmp_path / "sums.tsv", "out": tmp_path / "out", "seeds": 1, "epochs": 16, "optim.lr": 0.01}
    words += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    assert bench.run(*words, "--patience", "16", "--device", "cpu") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["task"]["head"] == {"name": "attentive", "class": "attentive.Attentive", "queries": 3}
    assert report["results"]["model"]["valid"]["accuracy"]["mean"] > report["guess"]["valid"]["accuracy"]
    classifier = unmask.load_classifier(tmp_path / "out", device="cpu")
    alone = [classifier.classify(text)[0].probabilities["with"] for text in sums[:5]]
    together = [one.probabilities["with"] for one in classifier.classify(sums[:5])]
    assert together == pytest.approx(alone, abs=1e-5)
    unmask.heads.room.discard("attentive")
    try:
        with pytest.raises(UnmaskError, match="'attentive' is the class Attentive"):
            unmask.load_classifier(tmp_path / "out", device="cpu")
    finally:
        bench.run("plugins", "--json")


# --- save, load -------------------------------------------------------------------------------------------------------

ELSEWHERE = """
import json, sys
import unmask
from unmask import plugin_modules

folders, files = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sentences = []
for folder in folders:
    try:
        unmask.load(folder, device="cpu")
    except unmask.UnmaskError as e:
        sentences.append(str(e))
plugin_modules.load_plugins(files)
texts = [unmask.load(folder, device="cpu").generate(2, 10, seed=5) for folder in folders]
print(json.dumps([sentences, texts]))
"""


def test_another_process_loads_with_the_plugins_and_misses_the_class_without(
    bench: Bench, diffusion: Model, recurrent: Model, tmp_path: Path
) -> None:
    folders = [tmp_path / "diffusion", tmp_path / "recurrent"]
    texts = []
    for folder, model in zip(folders, (diffusion, recurrent), strict=True):
        model.save(folder)
        again = unmask.load(folder, device="cpu")
        assert all(unshared(again.denoiser)[name].equal(t) for name, t in unshared(model.denoiser).items())
        texts.append(model.generate(2, 10, seed=5))
        assert again.generate(2, 10, seed=5) == texts[-1]
    files = tmp_path / "files"
    files.mkdir()
    for name in bench.plugins[1::2]:
        shutil.copy(name, files)
    given = [json.dumps([str(path) for path in paths]) for paths in (folders, sorted(files.iterdir()))]
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sentences, loaded = json.loads(done.stdout)
    assert loaded == texts
    for sentence, cls in zip(sentences, ("Clipped", "GRU"), strict=True):
        assert f"{cls} of the module {cls.lower()}" in sentence
        assert "\n" not in sentence
