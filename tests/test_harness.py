"""unmask as a model of lm-evaluation-harness: its numbers, and runs of the harness itself where it is installed."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import Trained
from unmask.cli.lm_eval import harness_words
from unmask.errors import UsageError
from unmask.evaluation.harness.lm_eval_adapter import harness_model
from unmask.evaluation.harness.model import HarnessModel
from unmask.model import Model
from unmask.objectives.mdlm import MDLM

PAIRS = [
    ("the cat sat", " on the mat"),
    ("a dog ran ", "to the red hut"),
    ("", "the sun"),
    ("no rat ate", ""),
    ("the sun set", " x"),
    ("the cat sat on the mat and the dog ran to the hut", " the"),
]


def asked(model: Model, **how: Any) -> HarnessModel:
    return HarnessModel(model, **({"num_samples": 4, "batch": 4} | how))


def test_an_autoregressive_number_is_that_of_score_without_the_end(ar_model: Model) -> None:
    ask = asked(ar_model)
    tokens = ar_model.score(" on the mat", prompts="the cat sat").explain()[0]
    [(log_p, _)] = ask.loglikelihood([PAIRS[0]])
    assert log_p == pytest.approx(-sum(token.nats for token in tokens[:-1]), abs=1e-4)
    assert ask.kind == "exact"
    assert "exact" in ask.sentence()


def test_the_number_of_an_autoregressive_model_is_the_chain_rule(ar_model: Model) -> None:
    ask = asked(ar_model)
    (whole, _), (first, _), (second, _) = ask.loglikelihood([("the", " cat"), ("the", " c"), ("the c", "at")])
    assert whole == pytest.approx(first + second, abs=1e-4)


@pytest.mark.parametrize("how", [{}, {"order": "margin"}], ids=["bound", "order"])
def test_neither_batch_nor_order_of_requests_changes_a_number(model: Model, how: dict[str, Any]) -> None:
    pairs = PAIRS[:5]
    one = asked(model, batch=1, **how).loglikelihood(pairs)
    back = asked(model, batch=3, **how).loglikelihood([*pairs[::-1], *pairs[:2]])
    for (log_p, greedy), (other, also) in zip(one, back[4::-1], strict=True):
        assert log_p == pytest.approx(other, abs=1e-4)
        assert greedy == also
    assert len({round(log_p, 3) for log_p, _ in one}) == 5


def test_other_seeds_and_more_draws_are_other_numbers(model: Model) -> None:
    (first, _), (second, _) = (asked(model, seed=seed).loglikelihood(PAIRS[:1])[0] for seed in (0, 1))
    assert first != second


def test_a_token_by_itself_is_the_same_by_bound_and_by_order(model: Model) -> None:
    """One token has one order: the count form, and every fixed order, are its exact likelihood."""
    assert isinstance(model.objective, MDLM)
    bound, order = (asked(model, order=order).loglikelihood([("the ca", "t")])[0] for order in (None, "confidence"))
    assert bound[0] == pytest.approx(order[0], abs=1e-5)


def test_a_bound_says_that_it_is_one(model: Model) -> None:
    ask = asked(model)
    assert ask.kind == "upper bound"
    assert "lower bounds of log p" in ask.sentence()
    assert ask.protocol()["num_samples"] == 4


@pytest.mark.parametrize("which", ["model", "ar_model"])
def test_greedy_is_what_the_greedy_sampler_writes(which: str, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(which)
    ask = asked(model, sampler="confidence" if which == "model" else "left_to_right")
    ids = model.tokenizer.encode("the cat sat")
    canvas = model.canvas([[*ids, *[model.tokenizer.mask_id] * 4]], may_end=True)
    [row] = model.run(canvas, model.make_sampler(ask.sampler, temperature=0.0))
    written = model.tokenizer.decode(row[len(ids) :])
    assert model.tokenizer.encode(written) == row[len(ids) :], "the text must be one that can be asked for"
    assert ask.loglikelihood([("the cat sat", written)])[0][1]
    assert not ask.loglikelihood([("the cat sat", written[:-1] + "\x01")])[0][1]


def test_nothing_before_and_nothing_after(model: Model, ar_model: Model) -> None:
    for ask in (asked(model), asked(ar_model)):
        (log_p, _), nothing = ask.loglikelihood([("", "the"), ("the", "")])
        assert math.isfinite(log_p)
        assert log_p < 0
        assert nothing == (0.0, True)
        assert ask.loglikelihood_rolling([""]) == [0.0]
        assert ask.loglikelihood_rolling(["the"])[0] == pytest.approx(log_p, abs=1e-4)


@pytest.mark.parametrize("num", [30, 31, 32, 33, 63, 64, 100])
def test_every_token_of_a_long_text_is_scored_once(ar_model: Model, num: int) -> None:
    ask = asked(ar_model)
    ids = [i % 256 for i in range(num)]
    for before, again in (([256], False), (list(range(50)), True), ([], True)):
        rows = list(ask._rows(before, ids, again=again))
        assert [id for row in rows for id in row.ids[row.first :]] == ids
        assert max(len(row.ids) for row in rows) <= ar_model.length


def test_a_long_context_is_cut_from_the_left_and_counted(model: Model) -> None:
    ask = asked(model)
    assert ask.loglikelihood([PAIRS[5]])[0] == ask.loglikelihood([("x" * 50 + PAIRS[5][0], " the")])[0]
    assert ask.counts.contexts_cut == 2
    assert "2 contexts cut" in ask.sentence()
    assert ask.protocol()["contexts_cut"] == 2


def test_a_generation_stops_where_it_is_told(ar_model: Model, model: Model) -> None:
    for ask in (asked(ar_model), asked(model)):
        wishes = {"max_gen_toks": 12, "do_sample": False}
        [whole] = ask.generate_until([("the cat", wishes)])
        assert 0 < len(whole.encode()) <= 36
        [cut] = ask.generate_until([("the cat", wishes | {"until": ["\x00", whole[3]]})])
        assert cut == whole[: whole.index(whole[3])]
        assert len(ask.generate_until([("", wishes), ("the " * 30, wishes | {"max_gen_toks": 500})])) == 2
        assert ask.counts.generations_shortened == 1


def test_generations_do_not_depend_on_their_neighbours(model: Model) -> None:
    wishes = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    requests = [("the cat", wishes), ("a dog ran", wishes), ("the cat", wishes)]
    one = asked(model, batch=1).generate_until(requests)
    back = asked(model, batch=3).generate_until(requests[:2][::-1])
    assert one[:2] == back[::-1]
    assert one[2] != one[0]  # asked for again: drawn anew


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"order": "ancestral"}, "none of the orders"),
        ({"order": "confidence", "estimator": "time"}, "leave out estimator"),
        ({"num_samples": 0}, "at least 1"),
        ({"options": {"tokns": 2}, "sampler": "confidence"}, "did you mean"),
    ],
)
def test_what_cannot_be_is_refused_at_once(model: Model, how: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked(model, **how)


def test_an_autoregressive_model_has_one_order(ar_model: Model) -> None:
    assert asked(ar_model, order="left_to_right").kind == "exact"
    with pytest.raises(UsageError, match="leave out order"):
        asked(ar_model, order="confidence")


def test_model_arguments(trained: Trained) -> None:
    folder = str(trained.folder)
    ask = harness_model(folder, batch_size="auto", device="cpu", sampler="confidence", steps=math.inf)
    assert ask.batch == 32
    for wrong in ({"batch_size": "many"}, {"pretrained": None}):
        with pytest.raises(UsageError):
            harness_model(**({"pretrained": folder, "device": "cpu"} | wrong))


# --- the harness itself -----------------------------------------------------------------------------------------------

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    def call(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        env = os.environ | offline | more
        line = [sys.executable, "-m", "unmask", "lm-eval", *words]
        return subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return call


def test_without_the_package_it_is_one_sentence(command: Command, tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text("raise ImportError('none here', name='lm_eval')\n")
    done = command("run", "--tasks", "x", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "unmask: unmask lm-eval needs the package lm_eval; install it with: pip install 'unmask[eval]'\n"
    )


def write_tasks(folder: Path) -> None:
    """A task of each kind, on data of its own."""
    rows = [
        {"question": "the cat sat on the", "choices": ["mat", "moon"], "answer": 0, "text": "the cat sat " * 9},
        {"question": "a dog ran to the red", "choices": ["oat", "hut"], "answer": 1, "text": "no rat ate the oat cake"},
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
"""
    choice = 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
    choice += 'doc_to_target: "{{answer}}"\nmetric_list:\n  - metric: acc\n'
    rolling = 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    rolling += "metric_list:\n  - metric: bits_per_byte\n"
    written = 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "mat"\n'
    written += 'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 6\nmetric_list:\n  - metric: exact_match\n'
    for name, lines in (("choice", choice), ("rolling", rolling), ("written", written)):
        (folder / f"tiny_{name}.yaml").write_text(f"task: tiny_{name}\n{common}{lines}")


needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install 'unmask[eval]'"
)


def test_the_device_is_one_that_is_there() -> None:
    """The harness would ask for cuda:0 on any machine."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    words = harness_words("run", ["--tasks", "a"])
    assert words == ["run", "--tasks", "a", "--model", "unmask", "--device", here]
    assert harness_words("run", ["--device=cpu"]) == ["run", "--device=cpu", "--model", "unmask"]
    for options in (["--model", "hf"], ["--config=a.yaml"], ["--help"], []):
        assert harness_words("run", options) == ["run", *options]
    assert harness_words("ls", ["tasks"]) == ["ls", "tasks"]


@needs_harness
def test_the_harness_runs_tasks_of_every_kind(command: Command, trained: Trained, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    arguments = f"pretrained={trained.folder},num_samples=4,sampler=confidence,steps=4"
    tasks = ["tiny_choice", "tiny_rolling", "tiny_written"]
    how = ["--include_path", str(tmp_path), "--output_path", "out", "--batch_size", "2", "--device", "cpu"]
    done = command("run", "--model", "unmask", "--model_args", arguments, "--tasks", *tasks, *how)
    assert done.returncode == 0, done.stderr
    assert "unmask: log-likelihoods are lower bounds of log p" in done.stdout
    [file] = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert set(results["results"]) == set(tasks)
    assert results["config"]["unmask"]["loglikelihood"] == "upper bound"
    ask = harness_model(str(trained.folder), num_samples=4, device="cpu")
    texts = [json.loads(line)["text"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    bits = -sum(ask.loglikelihood_rolling(texts)) / sum(len(text.encode()) for text in texts) / math.log(2)
    assert results["results"]["tiny_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)


@needs_harness
def test_what_the_harness_refuses_is_one_sentence(command: Command, tmp_path: Path) -> None:
    done = command("run", "--tasks", "no_such_task", "--model_args", "pretrained=stories")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "unmask: lm-eval: Tasks not found: no_such_task"
