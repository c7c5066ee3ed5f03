"""The pages of documentation: commands parse, options are all there, links lead somewhere, Python blocks run."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from unmask import cli, objectives
from unmask.config import RunConfig, load_config, option_paths
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.model import Model
from unmask.objectives import Objective
from unmask.objectives._gaussian import GaussianObjective
from unmask.plugin_modules import split_plugins
from unmask.samplers import Sampler

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
SHARED = {"sampling": "Sampling options", "constraints": "Constraint options"}
VIEWS = {"--watch", "--trace", "--html", "--svg"}
COMMANDS = {path.stem.strip("_").replace("_", "-"): path.stem for path in Path(cli.__file__).parent.glob("[!_]*.py")}


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    lines = [
        line for page in PAGES for block in blocks(str(page), "sh") for line in block.replace("\\\n", " ").splitlines()
    ]
    return sorted({line.strip() for line in lines if line.strip().startswith("unmask ")})


def sections(page: str) -> dict[str, str]:
    """The text below each heading, up to the next one of any level."""
    parts = re.split(r"^#+ (.*)\n", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("line", command_lines())
def test_a_command_that_is_quoted_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, _ = split_plugins(shlex.split(re.split(r" [<>|&] ", line)[0], comments=True)[1:])  # files of the reader's
    if not words or words[0].startswith("-") or words[0].isupper():
        return
    parsed: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int:
        parsed.append(args)
        return 0

    monkeypatch.setattr(importlib.import_module(f"unmask.cli.{COMMANDS[words[0]]}"), "run", run)
    assert cli.run(words) == 0
    if words[:2] == ["train", "demo"]:
        load_config("demo", parsed[0].overrides)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_reference_has_every_option(command: str) -> None:
    module: Any = importlib.import_module(f"unmask.cli.{COMMANDS[command]}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    text = sections("docs/reference.md")
    for group in parser._action_groups:
        for action in group._group_actions:
            for option in set(action.option_strings) - {"-h", "--help"}:
                title = "Views" if option in VIEWS else SHARED.get(group.title or "", command)
                assert re.search(rf"^\| `[^|]*{option}\b", text[title], flags=re.MULTILINE), (title, option)


def test_the_reference_has_every_recipe_key() -> None:
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    table = " ".join(line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `"))
    assert [key for key in option_paths(RunConfig()) if f"`{key}`" not in table] == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", ["docs/tutorial.md", "docs/reference.md"])
def test_python_blocks_run_from_top_to_bottom(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {"__name__": "page"}
    written = blocks(page, "python")
    assert len(written) > 5
    for number, block in enumerate(written):
        exec(compile(block, f"{page}, block {number}", "exec"), names)


FITTING: dict[str, Objective] = {
    "`mdlm`, with or without `carry_over`": objectives.MDLM(steps=8, carry_over=False),
    "`d3pm`, `mdlm` without `zero_masking`": objectives.D3PM(),
    "`sedd`": objectives.SEDD(),
    '`sedd` with `state = "uniform"`': objectives.SEDD(state="uniform"),
    "`udlm`": objectives.UDLM(),
    "`token_rates`": objectives.TokenRates(rates="power"),
    "`plaid`": objectives.Plaid(),
    "`diffusion_lm`": objectives.DiffusionLM(),
    "`ssd_lm`": objectives.SSDLM(),
    "`mlm`": objectives.MLM(),
    "`ar`": objectives.AR(),
}


def test_the_reference_tells_which_samplers_fit() -> None:
    text = sections("docs/reference.md")["Which samplers fit which model"].split("\n\n")[1]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    assert {row[0] for row in rows} == FITTING.keys()
    tokenizer = load_tokenizer("bytes")
    for name, _, own, *others in rows:
        objective = FITTING[name]
        ids = {"num_ids": tokenizer.num_ids, "mask_id": tokenizer.mask_id}
        told: Any = "level" if isinstance(objective, GaussianObjective) else "none"
        denoiser = DiT(hidden=8, blocks=1, heads=2, causal=name == "`ar`", conditioning=told).build(**ids)
        model = Model(denoiser=denoiser, tokenizer=tokenizer, objective=objective, length=8)
        assert [own.strip("` ")] == [Sampler.room.name_of(model.sampler)]
        assert sorted(re.findall(r"`(\w+)`", " ".join([own, *others]))) == model.sampler_names()


def test_every_equation_stands_in_the_file_that_is_linked() -> None:
    table = sections("docs/architecture.md")["Where each equation is"]
    names = 0
    for line in table.splitlines():
        cell = line.strip("| ").split(" | ")[-1]
        links = re.findall(r"\]\(\.\./([^)]+\.py)\)", cell)
        code = "".join((ROOT / link).read_text(encoding="utf-8") for link in links)
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", re.sub(r"\[[^]]*\]\([^)]*\)", "", cell)):
            if links and name not in {"label_B", "cond"}:  # arguments
                names += 1
                assert all(re.search(rf"(def|class) {part}\b", code) for part in name.split(".")), (name, cell)
    assert names > 25
