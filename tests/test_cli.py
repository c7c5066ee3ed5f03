"""The command line: help with an example, the result alone on stdout, JSON that parses, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from unmask.cli import Parser, _commands, run
from unmask.config import load_config, to_dict
from unmask.data.packing import rows_of
from unmask.data.tokenizers import load_tokenizer
from unmask.devices import pick_precision
from unmask.evaluation.harness.lm_eval_adapter import harness_model
from unmask.evaluation.harness.model import HarnessModel
from unmask.evaluation.per_base import score_bases
from unmask.evaluation.score import score
from unmask.model import load
from unmask.objectives.draws import Draws
from unmask.samplers.ancestral import Ancestral

COMMANDS = sorted(_commands())


@pytest.fixture
def recipe(tmp_path: Path, make_config: Any) -> Path:
    """A recipe of three steps into tmp_path/run."""
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(to_dict(make_config(tmp_path / "run", steps=3))), encoding="utf-8")
    return path


Capture = pytest.CaptureFixture[str]


# --- help -------------------------------------------------------------------------------------------------------------


def test_the_commands_are_there() -> None:
    assert {
        "demo",
        "edit",
        "eval",
        "export",
        "fill",
        "generate",
        "import",
        "plugins",
        "samplers",
        "score",
        "train",
    } <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"usage: unmask {command}")
    assert [line for line in out.splitlines() if len(line) > 80 and not line.startswith("  unmask ")] == []
    assert re.search("\nExamples?:\n", out)
    examples = re.findall(rf"^  (unmask {command}\b.*)$", out, re.MULTILINE)
    assert examples
    module = __import__(f"unmask.cli.{_commands()[command]}", fromlist=["add_arguments"])
    for example in examples:
        parser = Parser(prog="unmask", allow_abbrev=False)
        module.add_arguments(parser)
        words = shlex.split(example.partition(">")[0])[2:]
        if getattr(module, "TAKES_OVERRIDES", False):
            words, overrides = unmask.cli._split_overrides(words, parser)
            if command == "train":  # those of others are a sampler's
                load_config("demo", overrides)
        parser.parse_args(words)  # an error would raise


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help"]])
def test_the_overview_lists_every_command(words: list[str], capsys: Capture) -> None:
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\S.*\S$", out, re.MULTILINE), command
    assert max(map(len, out.splitlines())) <= 80


def test_the_version(capsys: Capture) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"unmask {unmask.__version__}\n"


def test_options_lists_what_can_be_overridden(capsys: Capture, tmp_path: Path) -> None:
    assert run(["train", "--options"]) == 0
    keys = dict(line.removeprefix("--").split()[:2] for line in capsys.readouterr().out.splitlines())
    (tmp_path / "empty.toml").write_text("", encoding="utf-8")
    assert load_config(tmp_path / "empty.toml", keys) == load_config("fast")
    assert keys["optim.betas"] == "0.9,0.95"
    # of another recipe, with what is typed beside it
    assert run(["train", "paper", "--options", "--objective", "d3pm"]) == 0
    keys = dict(line.removeprefix("--").split()[:2] for line in capsys.readouterr().out.splitlines())
    assert load_config(tmp_path / "empty.toml", keys) == load_config("paper", {"objective": "d3pm"})


# --- train, eval ------------------------------------------------------------------------------------------------------


def test_train_prints_the_folder_and_goes_on(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(["train", str(recipe), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'run'}\n"
    assert "valid" in err
    assert "\x1b" not in err  # no terminal, no bar
    # Overrides may stand before the recipe; a run's folder is a recipe; the result as JSON.
    assert (
        run(["train", "--steps", "5", "--log-every=1", str(tmp_path / "run"), "--resume", "--json", "--device", "cpu"])
        == 0
    )
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["model"] == str(tmp_path / "run")
    assert result["steps"] == 5
    assert result["ppl"] > 1
    assert "going on from step 3" in err
    assert run(["train", str(recipe), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "holds a run at step 5; go on with --resume, or give another --out" in err


def test_a_run_folder_that_was_moved_goes_on_where_it_is(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(["train", str(recipe), "--device", "cpu"]) == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    assert run(["train", str(tmp_path / "moved"), "--resume", "--steps", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "moved")
    assert not (tmp_path / "run").exists()


def test_train_without_a_recipe_is_fast(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    fast = load_config("fast")
    (tmp_path / "fast").mkdir()  # somebody's run of that name is another one
    (tmp_path / "fast" / "recipe.json").write_text(json.dumps(to_dict(load_config("demo"))), encoding="utf-8")
    small = {"steps": "1", "batch": "4", "valid_rows": "4", "data.length": "16", "denoiser.blocks": "1"}
    small |= {"data.train": "text", "data.train.path": str(corpus_file), "denoiser.hidden": "16", "sample_every": "0"}
    words = [word for key, value in small.items() for word in (f"--{key}", value)]
    assert run(["train", *words, "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{fast.out}\n"
    precision = pick_precision("auto", torch.device("cpu"))  # of this machine
    assert f"parameters on cpu in {precision}" in err
    written = json.loads(Path(out.strip(), "recipe.json").read_text())
    shutil.rmtree(tmp_path / "fast")
    assert written == json.loads(json.dumps(to_dict(load_config("fast", small)))) | {"precision": precision}
    assert run(["train", "--resume", *words, "--steps", "2", "--device", "cpu"]) == 0


def test_train_takes_typed_overrides(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    words = "--steps 1 --objective mdlm --objective.noise polynomial --objective.noise.power 3 --optim.betas 0.8,0.9"
    assert run(["train", str(recipe), *words.split(), "--micro-batch=none", "--device", "cpu"]) == 0
    model = load(tmp_path / "run", device="cpu")
    assert model.objective == unmask.objectives.MDLM(form="count", noise=unmask.noise.Polynomial(power=3.0))
    kept = load_config(tmp_path / "run")
    assert kept.optim.betas == (0.8, 0.9)
    capsys.readouterr()


def test_train_init(recipe: Path, trained: Any, tmp_path: Path, capsys: Capture) -> None:
    words = ["--init", str(trained.folder), "--optim.lr", "0", "--steps", "1", "--device", "cpu"]
    assert run(["train", str(recipe), *words]) == 0
    assert load(tmp_path / "run", device="cpu").generate(seed=3) == trained.model.generate(seed=3)
    capsys.readouterr()


@pytest.mark.parametrize("kind", ["trained", "trained_ar"])
def test_eval_prints_numbers_and_protocol(
    kind: str, request: pytest.FixtureRequest, corpus_file: Path, capsys: Capture
) -> None:
    folder = str(request.getfixturevalue(kind).folder)
    words = ["eval", folder, "--data", str(corpus_file), "--max-rows", "20", "--device", "cpu"]
    assert run([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out)
    exact = kind == "trained_ar"
    assert result["protocol"]["kind"] == ("exact" if exact else "upper bound")
    assert result["protocol"]["estimator"] == ("exact" if exact else "count")
    assert result["protocol"]["rows"] == result["sequences"] == 20
    assert result["protocol"]["length"] == 32
    low, high = result["ppl_ci95"]
    assert 1 < low < result["ppl"] < high
    assert result["bits_per_byte_ci95"][0] < result["bits_per_byte"] < result["bits_per_byte_ci95"][1]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert f"perplexity  {'=' if exact else '≤'} {result['ppl']:.4f}" in text
    for word in ("nats/token", "bits/byte", "95% interval", "packing=wrap", "seed=0", "corpus"):
        assert word in text
    assert run([*words, "--json", "--batch", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["ppl"] == pytest.approx(result["ppl"], rel=1e-5)


def test_eval_of_a_run_takes_what_it_held_out(trained: Any, capsys: Capture) -> None:
    assert run(["eval", str(trained.folder), "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    data = load_config(trained.folder).data
    rows = rows_of(data, load_tokenizer("bytes"), "valid")
    assert found["tokens"] == rows.report.tokens
    assert found["protocol"]["data"] == "held out by the run"
    assert found["tokens"] < 0.5 * rows_of(data, load_tokenizer("bytes"), "train").report.tokens
    assert run(["eval", str(trained.model_folder), "--device", "cpu"]) == 2
    assert "give --data FILE" in capsys.readouterr().err
    assert run(["eval", str(trained.folder), "--length", "16", "--device", "cpu"]) == 2
    assert "as it was packed" in capsys.readouterr().err


def test_eval_by_another_estimator_and_packing(
    trained: Any, fresh_model: Any, corpus_file: Path, capsys: Capture, tmp_path: Path
) -> None:
    words = ["eval", str(trained.folder), "--data", str(corpus_file), "--max-rows", "9", "--json", "--device", "cpu"]
    assert run([*words, "--estimator", "T=7", "--packing", "sentence", "--length", "30", "--num-samples", "2"]) == 0
    protocol = json.loads(capsys.readouterr().out)["protocol"]
    assert (protocol["estimator"], protocol["packing"], protocol["length"]) == ("T=7", "sentence", 30)
    assert protocol["draws_per_row"] == 2
    fresh_model.packing = "pad"  # as a model that was trained so has it
    fresh_model.save(tmp_path / "padded")
    for folder, packing, given in ((tmp_path / "padded", "pad", "row lengths"), (trained.folder, "wrap", "nothing")):
        assert run(["eval", str(folder), *words[2:]]) == 0  # a run's recipe knows it for itself
        protocol = json.loads(capsys.readouterr().out)["protocol"]
        assert (protocol["packing"], protocol["given"]) == (packing, given)


def test_score_tells_each_text_as_the_library_does(
    trained: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("tac eht\n"))
    words = ["score", str(trained.folder), "the cat", "-", "--num-samples", "8", "--device", "cpu"]
    assert run([*words, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert [one["text"] for one in scores] == ["the cat", "tac eht"]
    for one in scores:
        bound = trained.model.score(one["text"], num_samples=8)
        assert (one["nats"], one["bits_per_byte"]) == pytest.approx((bound.nats, bound.bits_per_byte))
        assert one["nats_ci95"][0] < one["nats"] < one["nats_ci95"][1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("tac eht"))
    assert run(words) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"≤ \d+\.\d{3} bits/byte  \d+\.\d\d ± \d+\.\d\d nats  \d+ tokens  the cat", first)
    assert second.endswith("tac eht")
    assert run(["score", str(trained.folder)]) == 2
    assert "nothing to work on: give a text" in capsys.readouterr().err


def test_a_score_has_as_many_draws_wherever_it_is_asked_for(trained: Any, capsys: Capture) -> None:
    assert run(["score", str(trained.folder), "the cat", "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    bound = trained.model.score("the cat")
    assert told["scores"][0]["nats"] == pytest.approx(bound.nats, rel=1e-6)
    groups = Draws.of(told["draws"])
    assert groups.groups == bound.draws_BS.shape[1]
    for asked in (score, score_bases, HarnessModel.__init__, harness_model):
        assert signature(asked).parameters["num_samples"].default == told["draws"]


def test_a_model_that_gives_no_numbers(fresh_model: Any, trained: Any, tmp_path: Path, capsys: Capture) -> None:
    """A sentence and exit code 1 instead of a NaN, which JSON does not have; other texts keep their scores."""
    with torch.no_grad():  # finite, as a model folder must be, and beyond what float32 can multiply
        embedding = next(p for p in fresh_model.denoiser.parameters() if p.shape[0] == fresh_model.tokenizer.num_ids)
        embedding[ord("@")] = 3e38
    fresh_model.save(tmp_path / "broken")
    (tmp_path / "a.txt").write_text("a @ b @ c @ " * 20, encoding="utf-8")
    both = str(tmp_path / "broken"), str(trained.folder)
    words = ["--data", str(tmp_path / "a.txt"), "--device", "cpu", "--json"]
    for first, others in ((both[0], []), (both[1], ["--against", both[0]])):
        assert run(["eval", first, *others, *words]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"unmask: {both[0]} gives nan nats on ")
        assert err.endswith("which is no finite number: see its weights\n")
    assert run(["score", both[0], "@@@@@@", "the cat", "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    one, two = json.loads(out, parse_constant=pytest.fail)["scores"]
    assert one["nats"] is None
    assert two["nats"] > 0
    assert "no finite number for text 1: see its weights" in err
    assert run(["score", both[0], "the cat", "--device", "cpu", "--json", "--num-samples", "1"]) == 0
    (one,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["scores"]
    assert one["nats_ci95"] is None  # a single draw


def test_a_standard_output_that_is_closed_is_no_crash() -> None:
    command = f"'{sys.executable}' -m unmask models >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- generate, fill ---------------------------------------------------------------------------------------------------


def test_generate_prints_the_texts_alone(trained: Any, capsys: Capture) -> None:
    words = ["generate", str(trained.folder), "--num", "2", "--length", "20", "--prompt", "the ", "--seed", "4"]
    assert run([*words, "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    expected = trained.model.generate(num=2, length=20, prompt="the ", seed=4)
    assert out == "\n\n".join(expected) + "\n"
    assert err == ""
    assert run([*words, "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["texts"] == expected
    assert result["prompts"] == ["the "]
    assert result["seed"] == 4
    assert run([*words, "--device", "cpu", "--watch"]) == 0  # without a terminal nothing is shown
    assert capsys.readouterr() == (out, "")


def test_generate_takes_prompts_a_suffix_and_a_sampler(trained: Any, capsys: Capture) -> None:
    words = [
        "generate",
        str(trained.folder),
        "--prompt",
        "the ",
        "--prompt",
        "a ",
        "--suffix",
        " mat",
        "--length",
        "24",
    ]
    options = ["--steps", "inf", "--temperature", "0.5", "--top-k", "9", "--top-p", "0.9", "--device", "cpu", "--json"]
    assert run([*words, *options]) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    sampler = Ancestral(steps=None, temperature=0.5, top_k=9, top_p=0.9)
    assert texts == trained.model.generate(length=24, prompt=["the ", "a "], suffix=" mat", sampler=sampler)
    for name in ("left_to_right", "ancestral", "semi_ar", "posterior"):
        assert run([*words, "--sampler", name, "--device", "cpu"]) == 0
        assert capsys.readouterr().out.startswith("the ")
    for more in (
        ["confidence", "--tokens", "3", "--random", "0.2", "--temperature-end", "0.1"],
        ["block", "--size", "8", "--inner", "entropy", "--tokens", "2", "--draw", "argmax"],
        ["refine", "--rounds", "1", "--share", "0.3", "--steps", "4"],
        ["remdm", "--variant", "rescale", "--eta", "0.3", "--steps", "6"],
        ["semi_ar", "--window", "16", "--inner", "margin", "--tokens", "4", "--length", "40"],
    ):
        assert run([*words, "--sampler", *more, "--device", "cpu"]) == 0
        assert capsys.readouterr().out.startswith("the ")
    assert run([*words, "--sampler", "block", "--inner", "entropi", "--device", "cpu"]) == 2
    assert "did you mean 'entropy'" in capsys.readouterr().err
    words += ["--sampler", "semi_ar", "--window", "8", "--stride", "4", "--length", "40"]
    assert run([*words, "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out) > 40


def test_generate_with_an_autoregressive_model(trained_ar: Any, capsys: Capture) -> None:
    assert run(["generate", str(trained_ar.folder), "--prompt", "the", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == trained_ar.model.generate(prompt="the")[0] + "\n"


def test_fill_prints_the_texts_alone(trained: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["fill", str(trained.folder), "the [MASK:3] sat", "--device", "cpu"]
    assert run(words) == 0
    expected = trained.model.fill("the [MASK:3] sat")
    assert capsys.readouterr() == (expected[0] + "\n", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a [MASK:2] pipe\n"))
    assert run(["fill", str(trained.folder), "-", "x[MASK]", "--json", "--device", "cpu"]) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert texts == trained.model.fill(["from a [MASK:2] pipe", "x[MASK]"])


# --- import, export, plugins, demo ------------------------------------------------------------------------------------


def test_export_and_import_are_inverse(tmp_path: Path, capsys: Capture, make_config: Any) -> None:
    from unmask.denoisers.dit import DiT
    from unmask.training.loop import train

    denoiser = DiT(size="nano", hidden=32, blocks=1, heads=2, conditioning="constant", cond_dim=8, qk_norm=False)
    train(make_config(tmp_path / "run", steps=2, denoiser=denoiser), device="cpu")
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(tmp_path / "out")}
    words = ["import", str(tmp_path / "out"), str(tmp_path / "back"), "--tokenizer", "bytes", "--json"]
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["num_ids"] == 258
    first, back = load(tmp_path / "run", device="cpu"), load(tmp_path / "back", device="cpu")
    assert first.generate(seed=1) == back.generate(seed=1)
    assert run(words) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_the_demo_in_small(trained: Any, capsys: Capture) -> None:
    """The whole of it with a small model: writes, fills, and says what to try next."""
    assert run(["demo", "--model", str(trained.folder), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "a story of 32 tokens in 64 steps:\nOnce upon a time" in out
    assert re.search(r"filled:\nThe .* was very sad because ", out, re.DOTALL)
    assert len(re.findall(rf"^  .+ (generate|fill|edit) {re.escape(str(trained.folder))}", out, re.MULTILINE)) == 3
    assert run(["demo", "--model", str(trained.folder), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == out


# --- from outside -----------------------------------------------------------------------------------------------------


def test_as_a_program(trained: Any, tmp_path: Path) -> None:
    """`python -m unmask` gives what the function gives; a reader that goes away is no error."""
    command = [sys.executable, "-m", "unmask", "fill", str(trained.folder), "the [MASK:3]\n" * 40, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == trained.model.fill("the [MASK:3]\n" * 40)[0] + "\n"
    read, write = os.pipe()
    os.close(read)
    try:
        for unbuffered in ("", "1"):
            how: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "check": False}
            how["env"] = os.environ | {"PYTHONUNBUFFERED": unbuffered}
            gone = subprocess.run([sys.executable, "-m", "unmask", "--help"], stdout=write, **how)
            assert (gone.returncode, gone.stderr) == (0, "")
    finally:
        os.close(write)


def test_memory_that_runs_out_is_one_line(
    trained: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import unmask.model

    for error in (MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")):
        monkeypatch.setattr(unmask.model.Model, "generate", lambda *a, e=error, **k: (_ for _ in ()).throw(e))
        assert run(["generate", str(trained.folder), "--device", "cpu"]) == 1
        assert capsys.readouterr() == ("", "unmask: out of memory; use a smaller batch, length or model\n")
    monkeypatch.setattr(unmask.model.Model, "generate", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert run(["generate", str(trained.folder), "--device", "cpu"]) == 130
    assert capsys.readouterr() == ("", "unmask: interrupted\n")


def test_a_stopped_run_says_how_to_go_on(recipe: Path, tmp_path: Path, capsys: Capture) -> None:
    """75: stopped by request, everything saved. (Real signals to a real process: tests/faults/test_resume.py.)"""
    import signal

    from unmask.training.callbacks import MetricsFile

    real = MetricsFile.on_step

    def stop_at_2(self: Any, report: Any) -> None:
        real(self, report)
        if report.step == 2:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsFile, "on_step", stop_at_2)
        assert run(["train", str(recipe), "--out", str(tmp_path / "my run"), "--device", "cpu"]) == 75
    assert signal.getsignal(signal.SIGTERM) is before
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("unmask: stopped at step 2 of 3, all is saved; go on with: ")
    words = shlex.split(last.partition("go on with: ")[2])
    assert words[0] == "unmask"
    assert run([*words[1:], "--device", "cpu"]) == 0
    assert load(tmp_path / "my run", device="cpu")


def test_every_constraint_given_must_hold(trained: Any, capsys: Capture) -> None:
    begin = ["generate", str(trained.folder), "--length", "6", "--device", "cpu"]
    assert run([*begin, "--choices", "a,b", "--choices", "b,c"]) == 0
    assert capsys.readouterr().out.strip() == "b"
    assert run([*begin, "--choices", "yes", "--choices", "no"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_windows_inside_another_sampler_are_the_models(trained: Any, capsys: Capture) -> None:
    begin = ["generate", str(trained.folder), "--length", "12", "--device", "cpu", "--inner", "semi_ar", "--sampler"]
    assert run([*begin, "refine"]) == 0
    assert run([*begin, "block"]) == 2
    assert "put block into semi_ar" in capsys.readouterr().err
