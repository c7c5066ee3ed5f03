"""The Llama-like network in whole runs: trained for each kind of objective, killed and resumed, used and saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resuming import whole_and_resumed
from unmask.cli import run
from unmask.denoisers.llama import Llama
from unmask.denoisers.llama.rope import RopeScaling
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.objectives.mdlm_opening import MDLMOpening
from unmask.objectives.mdlm_warm import MDLMWarm

SMALL: dict[str, Any] = {"hidden": 32, "blocks": 2, "heads": 4, "groups": 2}
RUNS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "mdlm": (MDLM(), {"qk_norm": True}, {"data": {"packing": "sentence"}, "optim": {"muon": True}}),
    "mdlm_warm": (MDLMWarm(share=0.5, until=0.9, form="count"), {"shifted": True, "tied": True}, {}),
    "mdlm_opening": (MDLMOpening(opened=0.9, share=0.5, form="count"), {"shifted": True, "begin": 3}, {}),
    "ar": (AR(), {"causal": True, "qkv_bias": True, "scaling": RopeScaling(length=16)}, {"optim": {"muon": True}}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_bit_for_bit_and_its_model_writes(name: str, tmp_path: Path, make_config: Any) -> None:
    objective, network, more = RUNS[name]
    make = partial(make_config, denoiser=Llama(**SMALL, **network), **more)
    models = whole_and_resumed(tmp_path, make, objective)
    assert models[0].objective == objective
    assert models[0].denoiser.config == Llama(**SMALL, **network)
    assert models[0].generate(2, length=8, seed=0) == models[1].generate(2, length=8, seed=0)
    assert models[0].score("the cat").nats > 0


def test_by_the_command_line(corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "demo", "--denoiser", "llama", "--denoiser.size", "nano", "--denoiser.hidden", "32"]
    words += ["--denoiser.blocks", "1", "--denoiser.groups", "2", "--denoiser.scaling.kind", "linear"]
    words += ["--data.train", "text", "--data.train.path", str(corpus_file), "--steps", "2", "--data.length", "16"]
    assert (
        run([*words, "--tokenizer", "bytes", "--valid_rows", "4", "--out", str(tmp_path / "run"), "--device", "cpu"])
        == 0
    )
    assert run(["fill", str(tmp_path / "run"), "the [MASK:2] sat", "--device", "cpu"]) == 0
    capsys.readouterr()
    for wrong, said in ((["--denoiser.groups", "3"], "multiple of groups"), (["--denoiser.head", "3"], "heads")):
        assert run([*words, *wrong, "--out", str(tmp_path / "no")]) == 2
        assert said in capsys.readouterr().err
