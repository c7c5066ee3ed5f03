"""A sampler from scratch, that knows nothing of ours but the base: constraints, views, streams, the server, windows."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import unmask
from unmask import constraints, samplers
from unmask.cli import run
from unmask.constraints.automaton import Automaton
from unmask.errors import UsageError
from unmask.model import Model

SOURCE = '''"""From both ends inwards, two tokens a call."""

from dataclasses import dataclass

from unmask.samplers import Sampler, State
from unmask.sampling.query import ask_about, masked_share


@dataclass(frozen=True, kw_only=True)
class Inwards(Sampler):
    law = "the product of its conditionals, two at a time"
    cost = "ceil(L / 2)"

    def max_calls(self, length: int) -> int:
        return (length + 1) // 2

    def ask(self, state: State):
        masked_BL = state.tokens_BL == state.canvas.mask_id
        first_BL = masked_BL & (masked_BL.cumsum(dim=1) == 1)
        last_BL = masked_BL & (masked_BL.flip(1).cumsum(dim=1).flip(1) == 1)
        level_B = masked_share(state.canvas, state.tokens_BL)
        state.query = ask_about(state.canvas, state.tokens_BL, first_BL | last_BL, level_B)
        return state.query
'''


@pytest.fixture(autouse=True)
def inwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "inwards.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(samplers, "__path__", [*samplers.__path__, str(tmp_path)])
    yield samplers.room.get("inwards")()
    sys.modules.pop("unmask.samplers.inwards", None)
    vars(samplers).pop("inwards", None)


def test_it_opens_from_both_ends(small: Model, inwards: Any) -> None:
    opened: list[list[int]] = []
    (text,) = small.generate(1, 7, sampler=inwards, watch=lambda step: opened.append(step.position_N.tolist()))
    assert opened == [[0, 6], [1, 5], [2, 4], [3]]
    assert small.generate(1, 7, sampler=inwards) == [text]
    beyond = small.length + 9  # windows are put around it
    assert small.generate(2, beyond, sampler=inwards, seed=1) == small.generate(2, beyond, sampler=inwards, seed=1)


def test_it_holds_a_constraint_with_the_conditioned_law(inwards: Any) -> None:
    """Of ab, ba, aab, ... only words with just one b are accepted: checked by enumeration of the first call's law."""
    p = torch.tensor([[0.3, 0.7], [0.6, 0.4], [0.5, 0.5], [0.8, 0.2]], dtype=torch.float64)
    logits_LI = torch.cat([p.log(), torch.zeros(4, 1)], dim=1)
    net = unmask.as_denoiser(lambda z, level: logits_LI.expand(len(z), -1, -1), vocab_size=2, mask_id=2)
    one = Automaton.of(np.array([[0, 1, -1], [1, -1, -1]], dtype=np.int32), np.array([False, True]))
    canvas = dataclasses.replace(unmask.Canvas.blank(num=20_000, length=4, mask_id=2, seed=3), constraint=one)
    tokens = unmask.sample(net, canvas, inwards).tokens
    assert (tokens.sum(dim=1) == 1).all()
    odds_L = p[:, 1] / p[:, 0]
    law_L = odds_L / odds_L.sum()  # the table does not depend on what is written: each call keeps this law
    found_L = tokens.double().mean(dim=0)
    assert ((found_L - law_L).abs() < 4 * (law_L * (1 - law_L) / len(tokens)).sqrt()).all()


def test_constraint_watch_trace_and_page_from_the_command_line(
    small: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    small.save(folder)
    words = ["generate", str(folder), "--sampler=inwards", "--length=9", "--regex=[0-9]{9}", "--device=cpu"]
    assert run([*words, "--watch", f"--trace={tmp_path / 'steps'}", f"--html={tmp_path / 'page.html'}"]) == 0
    assert re.search(r"[0-9]{9}", capsys.readouterr().out)
    steps = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert [step["position"] for step in steps] == [[0, 8], [1, 7], [2, 6], [3, 5], [4]]
    assert all(len(others) for step in steps for others in step["others"])


def test_the_server_writes_streams_and_traces_with_it(client: TestClient, small: Model, inwards: Any) -> None:
    body = {"prompt": "ab", "length": 12, "seed": 2, "sampler": "inwards", "runners_up": 1}
    answer = client.post("/trace", json=body)
    assert answer.status_code == 200, answer.text
    plain = small.generate(1, 12, "ab", sampler=inwards, seed=2)[0]
    assert json.dumps(plain)[1:-1] in answer.text
    asked = {"model": "small", "prompt": "ab", "max_tokens": 10, "seed": 2, "sampler": "inwards", "stream": True}
    parts = [line[6:] for line in client.post("/v1/completions", json=asked).text.splitlines() if line[:5] == "data:"]
    text = "".join(json.loads(part)["choices"][0]["text"] for part in parts if part != "[DONE]")
    assert "ab" + text == plain
    held = client.post("/fill", json={"text": "x[MASK:6]", "sampler": "inwards", "regex": "[a-f]{6}", "seed": 1})
    assert re.fullmatch("x[a-f]{6}", held.json()["texts"][0]["text"])


def test_what_it_cannot_do_is_refused(small: Model, inwards: Any) -> None:
    with pytest.raises(UsageError, match="cannot copy rows"):
        small.particles(lambda z: (z == 101).sum(dim=1).double() * 50, num=1, length=8, crowd=8, sampler=inwards)
    with pytest.raises(UsageError, match="has no option"):
        small.make_sampler("inwards", steps=3)
    with pytest.raises(UsageError, match="cannot hold in"):
        small.generate(1, 4, sampler=inwards, constraint=constraints.Regex(pattern="[0-9]{9}"))
