"""`unmask compare`: one budget and one protocol for all, what fails is told, what is finished is kept, refusals."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from matrix import environment
from older_plan import write_as_older_version
from unmask import cli
from unmask.comparison import work
from unmask.comparison.at_once import run_at_once
from unmask.comparison.compare import Comparison, Watcher, compare
from unmask.comparison.cost import Counting, training_cost
from unmask.comparison.picture import BAR, WIDTH, draw
from unmask.comparison.plan import Plan, Planned
from unmask.comparison.quoted import figures_for
from unmask.comparison.report import as_csv, as_markdown
from unmask.comparison.table import Table, make_table
from unmask.comparison.trial import Trial, read_trial, write_trial
from unmask.config import load_config
from unmask.data.batch import Batch
from unmask.data.loader import Loader
from unmask.data.packing import pack_texts
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.network import Network
from unmask.errors import ModelFolderError, Stopped, UsageError
from unmask.evaluation.bound import Bound
from unmask.objectives.ar import AR
from unmask.objectives.chunked_loss import LossSum
from unmask.objectives.d3pm import D3PM
from unmask.objectives.mdlm import MDLM
from unmask.objectives.udlm import UDLM

TOKENS = 2 * 4 * 16  # two steps of four rows
BASE = """
batch = 4
tokenizer = "bytes"
valid_rows = 8
[data]
train = {{ name = "text", path = "{corpus}" }}
length = 16
held_out = 0.1
[denoiser]
size = "nano"
hidden = 16
blocks = 1
heads = 2
[optim]
muon = false
"""
SYSTEMS = {
    "ar": 'base = "base.toml"\nobjective = "ar"\n[denoiser]\ncausal = true\n',
    "mdlm": 'base = "base.toml"\n[objective]\nname = "mdlm"\nform = "count"\n',
    "d3pm": 'base = "base.toml"\n[objective]\nname = "d3pm"\nsteps = 8\n',
    "udlm": 'base = "base.toml"\nobjective = "udlm"\n',
    "mamba": 'base = "base.toml"\nobjective = "ar"\n[denoiser]\nname = "mamba"\nhidden = 16\nblocks = 1\n',
}
Make = Callable[..., list[str]]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Make:
    """Paths of tiny recipes of these names."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "base.toml").write_text(BASE.format(corpus=corpus_file))
    for name, text in SYSTEMS.items():
        (folder / f"{name}.toml").write_text(text)
    return lambda *names: [str(folder / f"{name}.toml") for name in names]


def run(names: list[str], out: Path, **options: Any) -> Comparison:
    options = {"tokens": TOKENS, "draws": 2, "valid_rows": 8, "device": "cpu", "apart": False} | options
    return compare(names, out=out, **options)


@pytest.fixture(scope="module")
def both(recipes: Make, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two systems with two seeds. Shared: do not change it."""
    return run(recipes("ar", "mdlm"), tmp_path_factory.mktemp("compared") / "out", seeds=2, also=["T=4", "T=16"])


# --- what is compared -------------------------------------------------------------------------------------------------


def test_all_trials_have_the_same_tokens_rows_and_texts(both: Comparison) -> None:
    trials = both.table.trials
    assert [trial.name for trial in trials] == ["ar-s0", "mdlm-s0", "ar-s1", "mdlm-s1"]
    assert {trial.steps for trial in trials} == {2}
    assert {trial.tokens for trial in trials} == {TOKENS}
    assert len({trial.texts for trial in trials}) == 1
    assert {tuple(trial.counts) for trial in trials} == {tuple(trials[0].counts)}
    assert len(trials[0].nats) == 8
    assert [trial.kind for trial in trials[:2]] == ["exact", "upper bound"]
    assert [trial.draws for trial in trials[:2]] == [1, 2]
    for trial in trials:
        assert 1 <= trial.best_step <= 2
        assert trial.best_tokens == trial.best_step * 64
        assert trial.epochs == pytest.approx(trial.tokens / both.shared["epoch_tokens"])
        assert not (both.out / "runs" / trial.name / "checkpoints").exists()  # a finished trial goes on no more
    assert both.ok


def test_the_keys_are_those_of_all(recipes: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every objective gets the same rows, keys and times when it is measured."""
    seen: dict[str, list[tuple[Any, ...]]] = {}
    measuring: list[str] = []

    def listening(cls: type) -> None:
        real = cls.position_nats  # type: ignore[attr-defined]

        def position_nats(self: Any, network: Network, batch: Batch) -> Any:
            if measuring:
                seen.setdefault(measuring[0], []).append((batch.x_BL, batch.key_B, batch.time_B))
            return real(self, network, batch)

        monkeypatch.setattr(cls, "position_nats", position_nats)

    for cls in (MDLM, UDLM, AR):
        listening(cls)
    real_bound = work._bound

    def bound(job: work.Job, *args: Any) -> Bound:
        measuring[:] = [job.system]
        try:
            return real_bound(job, *args)
        finally:
            measuring.clear()

    monkeypatch.setattr(work, "_bound", bound)
    run(recipes("mdlm", "d3pm", "udlm", "ar"), tmp_path / "out")
    assert seen.keys() == {"mdlm", "d3pm", "udlm", "ar"}
    assert len(seen["mdlm"]) == 2
    for system in ("d3pm", "udlm"):
        for mine, theirs in zip(seen["mdlm"], seen[system], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not torch.equal(seen["mdlm"][0][1], seen["mdlm"][1][1])  # draws differ
    assert torch.equal(seen["ar"][0][0], seen["mdlm"][0][0])


def test_what_is_measured_is_the_bound_of_the_best_model(both: Comparison) -> None:
    from unmask.data.packing import rows_of
    from unmask.evaluation.evaluate import evaluate_rows
    from unmask.model import load

    trial = both.table.trials[1]
    run_folder = both.out / "runs" / trial.name
    config, model = load_config(run_folder), load(run_folder, device="cpu")
    rows = rows_of(config.data, model.tokenizer, "valid")
    bound = evaluate_rows(model.denoiser, model.objective, rows, seed=0, num_samples=2, max_rows=8)
    assert trial.nats == pytest.approx(bound.nats_B.tolist())
    assert trial.also.keys() == {"T=4", "T=16"}
    assert both.table.trials[0].also == {}  # an exact value has no steps
    entry = both.table.entries[1]
    assert entry.slope is not None
    assert entry.nats is not None
    assert entry.gap is not None
    per_seed = {t.name: t.nats_per_token for t in both.table.trials}
    gaps = [per_seed[f"mdlm-s{seed}"] - per_seed[f"ar-s{seed}"] for seed in (0, 1)]
    assert entry.gap.value == pytest.approx(sum(gaps) / 2)
    assert entry.gap.seeds_from == "paired seeds"
    assert entry.gap_sign == "≤"  # an upper bound minus an exact value


def test_passes_of_the_network_are_counted_where_they_happen(recipes: Make) -> None:
    """D3PM without carry-over reads the clean rows as well: twice the passes, and the FLOP of both."""
    tokenizer = load_tokenizer("bytes")
    rows = pack_texts(["the cat sat on "] * 9, tokenizer, "wrap", 16)  # 15 bytes and the end of text: full rows
    found = {}
    for path in recipes("mdlm", "d3pm", "udlm", "ar"):
        config = replace(load_config(path), steps=10)
        network = config.denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
        found[Path(path).stem] = training_cost(network, config, Loader(rows, 4, 0))
        assert "trunk" not in vars(network)  # left as it was
    assert {name: passes for name, (passes, _) in found.items()} == {"mdlm": 1, "d3pm": 2, "udlm": 1, "ar": 1}
    weights, vocab, trained = 12 * 16**2, tokenizer.num_ids, 10 * 4 * 16
    read = 6.0 * weights * trained + 12.0 * 16 * 16 * trained
    assert found["ar"][1] == found["udlm"][1] == read + 6.0 * 16 * vocab * trained
    assert 2 * read + 6.0 * 16 * vocab * trained * 1.3 < found["d3pm"][1] < 2 * read + 6.0 * 16 * vocab * trained * 1.7
    assert read + 6.0 * 16 * vocab * trained * 0.3 < found["mdlm"][1] < read + 6.0 * 16 * vocab * trained * 0.7


def test_rows_of_different_lengths_are_counted_without_their_padding(recipes: Make) -> None:
    tokenizer = load_tokenizer("bytes")
    rows = pack_texts(["the cat", "sat on the", "mat, ever"] * 4, tokenizer, "pad", 16)
    config = replace(load_config(recipes("mdlm")[0]), steps=3)
    network = config.denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    passes, flops = training_cost(network, config, Loader(rows, 4, 0))
    assert passes == 1
    text = rows.report.tokens / rows.report.rows * 4 * 3
    assert (
        flops < 6.0 * 12 * 16**2 * text * 1.3 + 12.0 * 16 * 16 * text * 1.3 + 6.0 * 16 * tokenizer.num_ids * text * 0.9
    )


def test_a_pass_without_a_gradient_counts_a_third() -> None:
    network = load_config("demo").denoiser.build(num_ids=9, mask_id=8)
    with Counting(network) as counted, torch.no_grad():
        network.trunk(level=torch.zeros(2), z=torch.zeros(2, 3, dtype=torch.long))
    assert (counted.rows, counted.tokens, counted.positions) == pytest.approx((2 / 3, 2, 2))


# --- the files --------------------------------------------------------------------------------------------------------


def test_four_files_tell_the_same(both: Comparison) -> None:
    data = json.loads((both.out / "results.json").read_text())
    assert data == json.loads(json.dumps({"shared": both.shared} | both.table.plain()))
    rows = list(csv.DictReader(io.StringIO((both.out / "results.csv").read_text())))
    assert [(row["system"], row["seed"]) for row in rows] == [
        ("ar", "0"), ("ar", "1"), ("ar", "mean"), ("mdlm", "0"), ("mdlm", "1"), ("mdlm", "mean"),
    ]  # fmt: skip
    mean = rows[-1]
    entry = both.table.entries[1]
    assert entry.ppl is not None
    assert float(mean["ppl"]) == pytest.approx(entry.ppl)
    assert float(mean["gap_low"]) < float(mean["gap"]) < float(mean["gap_high"])
    assert mean["quoted_ppl"] == "27.04"
    page = (both.out / "results.md").read_text()
    assert f"| mdlm | 2 | ≤ {entry.ppl:.4g} |" in page
    assert "≤ 27.04 (LM1B)" in page
    for words in ("OmniNet_T", "Transformer-XL Base", "other data", "Quoted", "noise of seeds", "/ T nats"):
        assert words in page
    picture = ET.fromstring((both.out / "results.svg").read_text())
    kinds = [bar.get("class") for bar in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert kinds.count("exact") == 2  # one bar, one in the legend
    assert kinds.count("bound") == 2
    words = " ".join("".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text"))
    assert "perplexity per token" in words
    assert f"≤ {entry.ppl:.4g}" in words
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}path"))) == 4  # error bars, each with a halo


def made(system: str, seed: int = 0, nats: float = 2.0, **options: Any) -> Trial:
    known: dict[str, Any] = {"nats": [2 * nats, 2 * nats + 0.001], "counts": [2, 2], "num_bytes": 9, "device": "cpu"}
    return Trial(
        name=f"{system}-s{seed}", system=system, seed=seed, fingerprint="", state="finished", **known | options
    )


def test_a_pseudo_likelihood_never_stands_among_perplexities() -> None:
    table = make_table(["a", "mouth"], [made("a"), made("mouth", kind="pseudo")], "a")
    entry = table.entries[1]
    assert entry.ppl is None
    assert entry.gap is None
    assert entry.pseudo_ppl == pytest.approx(math.exp(2.00025))
    assert "not compared" in entry.verdict
    assert "| mouth | 1 | – | – |" in as_markdown(table, {})
    rows = list(csv.DictReader(io.StringIO(as_csv(table))))
    assert [row["ppl"] for row in rows if row["system"] == "mouth"] == ["", ""]


def test_one_seed_is_judged_by_the_noise_of_those_with_several() -> None:
    noisy = [made("a", seed, nats=2 + 0.1 * seed) for seed in range(3)]
    near, far = made("near", nats=2.2), made("far", nats=3.2)
    table = make_table(["a", "near", "far"], [*noisy, near, far], "a")
    assert [entry.verdict for entry in table.entries] == ["reference", "not visible", "visible"]
    alone = make_table(["a", "near"], [noisy[0], near], "a")
    assert alone.entries[1].verdict == "one seed"
    assert "not known" in as_markdown(alone, {})


def test_networks_of_other_kinds_are_not_said_to_have_one_size(recipes: Make, tmp_path: Path) -> None:
    found = run(recipes("ar", "mamba"), tmp_path / "out")
    assert found.ok
    page = (tmp_path / "out" / "results.md").read_text()
    assert "network: as each recipe says" in page
    assert len({trial.parameters for trial in found.table.trials}) == 2


def test_a_trial_tells_which_rows_are_of_one_text(recipes: Make, tmp_path: Path) -> None:
    (tmp_path / "valid.jsonl").write_text("".join(json.dumps({"text": c * 31}) + "\n" for c in "abc"))
    valid = {"data.valid": "jsonl", "data.valid.path": str(tmp_path / "valid.jsonl")}
    found = run(recipes("ar"), tmp_path / "out", overrides=valid, valid_rows=None)
    assert found.table.trials[0].text_of == [0, 0, 1, 1, 2, 2]
    assert read_trial(tmp_path / "out", "ar-s0") == found.table.trials[0]


def test_intervals_are_over_texts_of_which_rows_are_parts() -> None:
    """A trial of an older version does not tell its texts, but another of the same rows does."""

    def table(of_ours: list[float], of_theirs: list[float], counts: list[int], text_of: list[int]) -> Table:
        told = {"counts": counts, "texts": "x"}
        ours = replace(made("a", **told), nats=of_ours, text_of=text_of)
        return make_table(["a", "b"], [ours, replace(made("b", **told), nats=of_theirs)], "a")

    rows = table([4.0, 4.2, 5.0, 5.4], [5.0, 5.0, 7.0, 7.0], [2, 2, 2, 2], [0, 0, 1, 1])
    texts = table([8.2, 10.4], [10.0, 14.0], [4, 4], [])
    for entry, expected in zip(rows.entries, texts.entries, strict=True):
        assert entry.nats is not None
        assert entry.nats.ci95 == pytest.approx(expected.nats and expected.nats.ci95)
    assert rows.entries[1].gap is not None
    assert rows.entries[1].gap.ci95 == pytest.approx(texts.entries[1].gap and texts.entries[1].gap.ci95)


def test_other_texts_are_not_compared() -> None:
    table = make_table(["a", "b"], [made("a", texts="x"), made("b", texts="y")], "a")
    assert table.entries[1].verdict == "not compared: other texts"


def test_a_system_far_off_does_not_hide_the_others() -> None:
    levels = {"a": 3.0, "b": 3.2, "far": 90.0}
    table = make_table(list(levels), [made(name, nats=nats) for name, nats in levels.items()], "a")
    picture = ET.fromstring(draw(table, {"tokens": 10}))
    bars = [bar for bar in picture.iter("{http://www.w3.org/2000/svg}rect") if bar.get("height") == str(BAR)]
    a, b, far = (float(bar.get("width", "")) for bar in bars)
    assert a < b < far == WIDTH
    assert a > WIDTH / 2
    assert sum(path.get("class") == "halo" for path in picture.iter("{http://www.w3.org/2000/svg}path")) == 3
    words = " ".join("".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text"))
    assert "1.221e+39" in words  # e^90


def test_figures_of_text_are_not_quoted_beside_dna() -> None:
    """And the reverse: the perplexity of a language of four letters beside that of words would say nothing."""
    trials = [made(name) for name in ("mdlm", "plaid")]
    text, dna = (make_table(["mdlm", "plaid"], trials, "mdlm", (), figures_for(one)) for one in ("bytes", "dna"))
    assert [entry.quoted and entry.quoted.ppl for entry in text.entries] == [27.04, None]
    assert [entry.quoted and entry.quoted.ppl for entry in dna.entries] == [3.199, 3.240]
    assert "OmniNet_T" in as_markdown(text, {})
    page = as_markdown(dna, {})
    assert "LM1B" not in page
    assert "whole human genome" in page


# --- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "state", "words"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate"), "failed", "out of memory: use a smaller"),
        (ValueError("a bug"), "failed", "ValueError: a bug"),
        (None, "diverged", "loss nan at step 1"),
    ],
    ids=["memory", "bug", "nan"],
)
def test_a_trial_that_fails_is_told_and_the_others_go_on(
    act: Exception | None, state: str, words: str, recipes: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = D3PM.loss

    def loss(self: D3PM, network: Network, batch: Batch) -> LossSum:
        if act is not None:
            raise act
        good = real(self, network, batch)
        return LossSum(good.nats * math.nan, good.tokens)

    monkeypatch.setattr(D3PM, "loss", loss)
    found = run(recipes("d3pm", "mdlm"), tmp_path / "out")
    assert not found.ok
    assert [trial.state for trial in found.table.trials] == [state, "finished"]
    assert words in found.table.trials[0].reason
    page = (tmp_path / "out" / "results.md").read_text()
    assert f"**d3pm-s0** {state}: " in page
    assert words in page
    assert words[:20] in (tmp_path / "out" / "results.svg").read_text()
    assert found.table.entries[1].verdict == "no reference"
    monkeypatch.undo()
    again = run(recipes("d3pm", "mdlm"), tmp_path / "out")  # a later call tries it again, and nothing else
    assert again.ok
    assert again.table.trials[1] == found.table.trials[1]


CRASH = """
import os, signal
from dataclasses import dataclass
from unmask.objectives.mdlm import MDLM

@dataclass(frozen=True, kw_only=True)
class Crash(MDLM):
    '''Ends its process.'''
    def loss(self, denoiser, batch):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_takes_no_other_with_it(recipes: Make, tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text(CRASH)
    (tmp_path / "crash.toml").write_text(f'base = "{recipes("base")[0]}"\nobjective = "crash"\n')
    words = ["compare", str(tmp_path / "crash.toml"), *recipes("mdlm"), "--tokens", "128", "--out", "out", "--json"]
    words += ["--valid-rows", "8", "--draws", "2", "--device", "cpu", "--plugin", str(tmp_path / "crash.py")]
    done = subprocess.run(
        [sys.executable, "-m", "unmask", *words],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    states = {trial["name"]: (trial["state"], trial["reason"]) for trial in json.loads(done.stdout)["trials"]}
    assert states["mdlm-s0"] == ("finished", "")
    assert states["crash-s0"] == ("failed", "its process was killed by SIGKILL: memory ran out, most likely")


# --- going on ---------------------------------------------------------------------------------------------------------


class Begun(Watcher):
    def __init__(self) -> None:
        self.begun: list[str] = []

    def on_begin(self, trial: Planned) -> None:
        self.begun.append(trial.name)

    def on_plan(self, plan: Plan, finished: list[Trial]) -> None:
        self.finished = [trial.name for trial in finished]


def test_more_seeds_and_recipes_are_added_and_nothing_is_done_again(recipes: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run(recipes("mdlm"), out)
    watch = Begun()
    second = run(recipes("mdlm"), out, seeds=2, watch=watch)
    assert (watch.finished, watch.begun) == (["mdlm-s0"], ["mdlm-s1"])
    assert second.table.trials[0] == first.table.trials[0]
    third = run(recipes("ar"), out, watch=watch)
    assert watch.begun == ["mdlm-s1", "ar-s0"]
    assert [entry.system for entry in third.table.entries] == ["ar", "mdlm"]  # what was there stays in the table
    assert [len(entry.seeds) for entry in third.table.entries] == [1, 2]
    assert run(recipes("ar"), out, reference="mdlm").table.reference == "mdlm"


def test_a_row_that_was_measured_elsewhere_is_put_in_place(recipes: Make, both: Comparison, tmp_path: Path) -> None:
    """A small file is all that travels: the run need not be there."""
    out = tmp_path / "elsewhere"
    for trial in both.table.trials[:3]:
        write_trial(out, trial)
    watch = Begun()
    found = run(recipes("ar", "mdlm"), out, seeds=2, also=["T=4", "T=16"], watch=watch)
    assert watch.begun == ["mdlm-s1"]
    assert found.table.trials[:3] == both.table.trials[:3]
    assert found.table.trials[3].nats == both.table.trials[3].nats
    other = replace(both.table.trials[0], fingerprint="of another")
    write_trial(out, other)
    with pytest.raises(UsageError, match="holds another ar-s0"):
        run(recipes("ar", "mdlm"), out, seeds=2, also=["T=4", "T=16"])


def test_a_killed_command_goes_on(recipes: Make, tmp_path: Path) -> None:
    """SIGKILL while its first trial trains: the trial's process ends with it, and the same command goes on."""
    words = ["compare", *recipes("mdlm", "ar"), "--tokens", str(40 * 64), "--out", str(tmp_path / "out")]
    words += ["--valid-rows", "8", "--draws", "2", "--device", "cpu"]
    command = [sys.executable, "-m", "unmask", *words]
    begun = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints, waited = tmp_path / "out" / "runs" / "mdlm-s0" / "checkpoints", time.monotonic() + 60
    while not any(checkpoints.glob("step-*")) and time.monotonic() < waited:
        time.sleep(0.005)
    begun.kill()
    begun.wait()
    assert not (tmp_path / "out" / "trials" / "ar-s0.json").exists()
    run_options: dict[str, Any] = {"tokens": 40 * 64, "watch": (watch := Begun())}
    deadline = time.monotonic() + 10
    while (tmp_path / "out" / "runs" / "mdlm-s0" / ".lock").exists() and _locked(tmp_path / "out"):
        assert time.monotonic() < deadline  # nobody goes on without its parent
        time.sleep(0.01)
    found = run(recipes("mdlm", "ar"), tmp_path / "out", **run_options)
    assert found.ok
    assert "ar-s0" in watch.begun
    whole = run(recipes("mdlm", "ar"), tmp_path / "whole", tokens=40 * 64)
    for ours, theirs in zip(found.table.trials, whole.table.trials, strict=True):
        assert replace(ours, seconds=0.0, tokens_per_second=0.0) == replace(theirs, seconds=0.0, tokens_per_second=0.0)


def _locked(out: Path) -> bool:
    import fcntl

    with (out / "runs" / "mdlm-s0" / ".lock").open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_a_request_to_stop_saves_and_says_so(recipes: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    class Stop(Begun):
        def on_news(self, trial: Planned, news: Any) -> None:
            if news.get("step") == 4:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_close(self) -> None:
            closed.append(True)

    with pytest.raises(Exception, match="stopped in mdlm-s0; the same command goes on there") as error:
        run(recipes("mdlm", "ar"), tmp_path / "out", tokens=8 * 64, watch=Stop())
    assert error.value.exit_code == 75  # type: ignore[attr-defined]
    assert closed == [True]
    page = (tmp_path / "out" / "results.md").read_text()
    assert "**mdlm-s0** is not run yet" in page
    assert run(recipes("mdlm", "ar"), tmp_path / "out", tokens=8 * 64).ok


# --- several at once --------------------------------------------------------------------------------------------------


class AtOnce(Begun):
    """How many trials are at work at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = set[str](), 0

    def on_begin(self, trial: Planned) -> None:
        super().on_begin(trial)
        self.now.add(trial.name)
        self.most = max(self.most, len(self.now))

    def on_end(self, trial: Planned, result: Trial) -> None:
        self.now.remove(trial.name)


def test_trials_at_once_have_the_numbers_of_trials_one_by_one(recipes: Make, both: Comparison, tmp_path: Path) -> None:
    watch = AtOnce()
    also = {"also": ["T=4", "T=16"], "apart": True, "watch": watch}
    found = run(recipes("ar", "mdlm"), tmp_path / "out", seeds=2, jobs=2, **also)
    assert found.ok
    assert watch.most == 2
    assert watch.begun[:2] == ["ar-s0", "mdlm-s0"]
    same = {"seconds": 0.0, "tokens_per_second": 0.0, "at_once": 1, "unmask": ""}
    for ours, theirs in zip(found.table.trials, both.table.trials, strict=True):
        assert ours.at_once == 2
        assert replace(ours, **same) == replace(theirs, **same)
    page = (tmp_path / "out" / "results.md").read_text()
    assert "Seconds: in training steps alone, with up to 2 trials at once on the device." in page


def test_a_request_to_stop_ends_all_that_are_at_work(recipes: Make, tmp_path: Path) -> None:
    trained = set[str]()

    class Stop(AtOnce):
        def on_news(self, trial: Planned, news: Any) -> None:
            if "loss" in news:
                trained.add(trial.name)
            if len(trained) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    watch = Stop()
    options: dict[str, Any] = {"tokens": 4000 * 64, "apart": True, "jobs": 2}
    with pytest.raises(Stopped, match=r"stopped in ar-s0, mdlm-s0; the same command goes on there") as error:
        run(recipes("ar", "mdlm", "d3pm"), tmp_path / "out", watch=watch, **options)
    assert error.value.exit_code == 75
    assert sorted(watch.begun) == ["ar-s0", "mdlm-s0"]
    for name in watch.begun:
        assert list((tmp_path / "out" / "runs" / name / "checkpoints").glob("step-*"))


def test_an_error_of_ours_ends_the_others_too() -> None:
    halted, begun = threading.Event(), threading.Event()

    def run(item: str) -> None:
        if item == "wrong":
            assert begun.wait(10)
            raise ValueError("wrong")
        begun.set()
        if item == "never" or not halted.wait(10):
            raise AssertionError("it went on")
        raise Stopped(item)

    with pytest.raises(ValueError, match="wrong"):
        run_at_once(["long", "wrong"], run, 2, halted)
    assert halted.is_set()


def test_a_trial_that_is_not_admitted_waits_for_a_later_call(recipes: Make, tmp_path: Path) -> None:
    class OnlyAr(Begun):
        def admits(self, trial: Planned) -> bool:
            return trial.system == "ar"

    found = run(recipes("mdlm", "ar"), tmp_path / "out", watch=OnlyAr())
    assert found.table.waiting == ["mdlm-s0"]
    assert run(recipes("mdlm", "ar"), tmp_path / "out").ok


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nonsense", "--tokens", "128"], "no recipe file or built-in recipe 'nonsense'"),
        (["{d3pm}", "--tokens", "128", "--objective.steps", "0"], "steps must be at least 1"),
        (["{mdlm}", "--tokens", "20"], "--tokens 20 is less than one batch, which has 64 tokens"),
        (["{mdlm}", "--tokens", "many"], "--tokens must be a number such as 500000, 50M or 1.5G, got 'many'"),
        (["{mdlm}", "--tokens", "1e400"], "--tokens 1e400 is more than 1e+18: give fewer"),
        (["{mdlm}", "--tokens", "128", "--device", "gpu"], "unknown device 'gpu'"),
        (["{mdlm}", "--tokens", "128", "--device", "cuda:99"], "cuda:99 was asked for"),
        (["{mdlm}", "--tokens", "128", "--seeds", "0"], "at least 1 seed"),
        (["{mdlm}", "--tokens", "128", "--jobs", "0"], "jobs must be at least 1"),
        (["{mdlm}", "--tokens", "128", "--draws", "0"], "draws must be at least 1, got 0"),
        (["{mdlm}", "--tokens", "128", "--also", "T=0"], "--also T=0: no such estimator; did you mean 'T=1000'?"),
        (["{mdlm}", "--tokens", "128", "--steps", "9"], "leave out --steps, and give --tokens"),
        (["{mdlm}", "{mdlm}", "--tokens", "128"], "two recipes are called mdlm"),
        (["{mdlm}", "--tokens", "128", "--reference", "mdml"], "did you mean 'mdlm'?"),
        (["{mdlm}", "--tokens", "128", "--data.train.path", "{empty}"], "the corpus is empty"),
        (["{mdlm}", "--tokens", "128", "--data.train.path", "nowhere.txt"], "nowhere.txt"),
        (["{mdlm}", "demo", "--tokens", "128"], "mdlm has batch = 4 and demo has 32: give --batch for all"),
        (["{mdlm}", "--tokens", "128", "--denoiser.causal", "true"], "mdlm.toml: masked diffusion needs a denoiser"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence_and_nothing_is_written(
    words: list[str], sentence: str, recipes: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    names = {"mdlm": recipes("mdlm")[0], "d3pm": recipes("d3pm")[0], "empty": str(tmp_path / "empty.txt")}
    out = tmp_path / "out"
    assert cli.run(["compare", *(word.format(**names) for word in words), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_a_sampler_that_does_not_fit_is_refused(recipes: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unmask.samplers.left_to_right import LeftToRight

    monkeypatch.setattr(UDLM, "sampler", lambda self: LeftToRight())
    with pytest.raises(UsageError, match=r"^udlm: the sampler LeftToRight cannot follow this model"):
        run(recipes("udlm"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_is_refused(recipes: Make, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        run(recipes("mdlm"), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 2 * TOKENS}, "holds a comparison with tokens = 128, now 256"),
        ({"draws": 3}, "protocol.draws = 2, now 3"),
        ({"overrides": {"data.length": 32}}, "data.length"),
        ({"overrides": {"optim.lr": "0.25"}}, "holds ar-s0 with optim.lr = 0.005, now 0.25"),
    ],
    ids=["tokens", "draws", "length", "lr"],
)
def test_another_comparison_in_the_same_folder_is_refused(
    change: dict[str, Any], words: str, both: Comparison, recipes: Make
) -> None:
    before = {path: path.read_bytes() for path in both.out.rglob("*") if path.is_file()}
    with pytest.raises(UsageError) as error:
        run(recipes("ar", "mdlm"), both.out, **{"seeds": 2, "also": ["T=4", "T=16"]} | change)
    assert words in str(error.value)
    assert {path: path.read_bytes() for path in both.out.rglob("*") if path.is_file()} == before


def test_a_folder_of_a_version_with_fewer_keys_goes_on(recipes: Make, tmp_path: Path) -> None:
    """An absent key has the value that a run of that time has by it; so do the fingerprints of what is finished."""
    out = tmp_path / "out"
    first = run(recipes("mdlm"), out)
    # of an old run without the key, muon is off
    write_as_older_version(out, "data.packing", "data.split_tokens", "optim.muon", "also")
    plan = (out / "compare.json").read_text()
    watch = Begun()
    assert run(recipes("mdlm"), out, watch=watch).table.trials[0].nats == first.table.trials[0].nats
    assert (watch.begun, watch.finished) == ([], ["mdlm-s0"])
    assert (out / "compare.json").read_text() == plan
    changes: list[tuple[dict[str, Any], str]] = [
        ({"overrides": {"data.split_tokens": "0.25"}}, "holds mdlm-s0 with data.split_tokens = 0.0, now 0.25"),
        ({"overrides": {"optim.muon": "true"}}, "holds mdlm-s0 with optim.muon = False, now True"),
        ({"also": ["T=4"]}, "holds a comparison with protocol.also = [], now ['T=4']"),
        ({"overrides": {"objective": "sedd"}}, "holds mdlm-s0 with objective = mdlm, now sedd"),
    ]
    for change, words in changes:
        with pytest.raises(UsageError) as error:
            run(recipes("mdlm"), out, **change)
        assert words in str(error.value)
    again = run(recipes("ar", "mdlm"), out, seeds=2, reference="mdlm", watch=watch)
    assert watch.begun == ["ar-s0", "ar-s1", "mdlm-s1"]
    assert len({trial.shared for trial in again.table.trials}) == 1
    run(recipes("mdlm", "ar"), out, seeds=2, watch=watch)
    assert len(watch.begun) == 3
    other = json.loads(plan)
    del other["shared"]["common"]["batch"]
    (out / "compare.json").write_text(json.dumps(other))
    with pytest.raises(UsageError, match=r"holds a comparison with common\.batch = 64, now 4"):
        run(recipes("mdlm"), out)


def test_a_damaged_plan_is_refused_in_one_line(both: Comparison, recipes: Make, tmp_path: Path) -> None:
    plan = json.loads((both.out / "compare.json").read_text())
    for *path, last in (("trials",), ("trials", "ar-s0"), ("shared", "common"), ("shared", "protocol")):
        damaged = copy.deepcopy(plan)
        table = damaged
        for part in path:
            table = table[part]
        for table[last] in (3, None, [], "x"):
            (tmp_path / "compare.json").write_text(json.dumps(damaged))
            with pytest.raises(ModelFolderError, match=r"compare\.json is not what a comparison writes there"):
                run(recipes("ar", "mdlm"), tmp_path)


def test_what_does_not_decide_the_result_may_change(both: Comparison, recipes: Make) -> None:
    watch = Begun()
    how: dict[str, Any] = {"seeds": 2, "also": ["T=4", "T=16"], "overrides": {"log_every": 3, "compile": "true"}}
    assert run(recipes("ar", "mdlm"), both.out, watch=watch, **how).ok
    assert watch.begun == []


def test_a_damaged_trial_is_named(both: Comparison, tmp_path: Path) -> None:
    write_trial(tmp_path, both.table.trials[0])
    path = tmp_path / "trials" / "ar-s0.json"
    path.write_text(path.read_text().replace('"kind"', '"kin"'))
    with pytest.raises(Exception, match="remove it, and the trial is run again"):
        read_trial(tmp_path, "ar-s0")


def test_the_command_prints_the_table(
    recipes: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unmask.comparison.compare.run_apart", lambda job, tell, asked: work.run_trial(job, tell))
    monkeypatch.setenv("COLUMNS", "80")
    words = ["compare", *recipes("ar", "d3pm"), "--tokens", "0.128k", "--out", str(tmp_path / "out"), "--draws", "2"]
    assert cli.run([*words, "--valid-rows", "8", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert "gap to ar" in out
    assert "one seed" in out
    assert "passes" in out
    assert "d3pm-s0" in err
    assert "(2/2)" in err
