"""Same options, same seed, same text: through Python, the command line and the server, for a model with a noise and a
way of drawing of its own."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_server import random_model
from starlette.testclient import TestClient

import unmask.server
from unmask import samplers
from unmask.cli import run
from unmask.errors import UsageError
from unmask.model import Model, load
from unmask.noise import Cosine, LogLinear
from unmask.objectives.mdlm import MDLM
from unmask.samplers.drawing import Drawing
from unmask.server.app import make_app
from unmask.server.limits import Limits

TEXT = "a[MASK:9]b[MASK:6]c"
CASES: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    (None, {"steps": 3, "temperature": 0.7}),
    ("ancestral", {"steps": None}),
    ("posterior", {"steps": 5}),
    ("confidence", {"steps": 4, "random": 0.5}),
    ("remdm", {"steps": 6, "eta": 0.3, "variant": "rescale"}),
    ("predictor_corrector", {"steps": 4, "noise": "log_linear"}),
    ("block", {"size": 4, "tokens": 2}),
    ("block", {"size": 8, "inner": "ancestral", "steps": 3, "top_k": 5}),
    ("semi_ar", {"window": 16, "stride": 8, "steps": 4}),
    ("semi_ar", {"steps": 4, "inner": "remdm"}),
    ("refine", {"rounds": 1, "share": 0.3, "steps": 4}),
]


@pytest.fixture(scope="module")
def cosine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Path, TestClient]]:
    folder = tmp_path_factory.mktemp("models") / "cosine"
    small = random_model()
    parts = {"denoiser": small.denoiser, "tokenizer": small.tokenizer, "length": small.length}
    Model(**parts, objective=MDLM(noise=Cosine()), drawing=Drawing(top_p=0.7, temperature=1.2)).save(folder)
    model = load(folder, device="cpu")
    limits = Limits(budget=1 << 14, length=128, requests=16)
    with TestClient(make_app(model, name="cosine", limits=limits), base_url="http://localhost") as client:
        yield model, folder, client


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_three_ways_to_one_text(
    name: str | None,
    options: dict[str, Any],
    cosine: tuple[Model, Path, TestClient],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, folder, client = cosine
    plain = model.fill(TEXT, sampler=model.make_sampler(name, **options), seed=4)
    words = [f"--{key.replace('_', '-')}={'inf' if value is None else value}" for key, value in options.items()]
    words += [f"--sampler={name}"] if name else []
    assert run(["fill", str(folder), TEXT, *words, "--seed=4", "--json", "--device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == plain
    own = {key: options[key] for key in ("steps", "temperature", "top_k", "top_p") if key in options}
    body = {"text": TEXT, "seed": 4, "options": {k: v for k, v in options.items() if k not in own}}
    body |= {key: "inf" if value is None else value for key, value in own.items()}
    answer = client.post("/fill", json=body | ({"sampler": name} if name else {}))
    assert answer.status_code == 200, answer.text
    assert [one["text"] for one in answer.json()["texts"]] == plain


def test_what_is_left_out_is_the_models(cosine: tuple[Model, Path, TestClient]) -> None:
    model, _, _ = cosine
    how = {"top_p": 0.7, "temperature": 1.2, "noise": Cosine()}
    assert model.make_sampler() == model.sampler == samplers.Ancestral(**how)
    assert model.make_sampler("remdm", steps="7") == samplers.ReMDM(**how, steps=7)
    assert model.make_sampler("ancestral", noise="log_linear") == samplers.Ancestral(**how | {"noise": LogLinear()})
    windows = model.make_sampler("semi_ar", stride=4, steps=2)
    assert windows == samplers.SemiAR(window=model.length, stride=4, inner=samplers.Ancestral(**how, steps=2))
    assert model.fit_sampler(None, 99) == samplers.SemiAR(window=model.length, inner=model.sampler)
    assert model.make_sampler("block") == samplers.Block(inner=samplers.Confidence(top_p=0.7, temperature=1.2))
    given = samplers.Confidence()
    assert model.make_sampler("semi_ar", inner=given).inner == given


def test_a_sampler_made_without_the_model_gets_its_noise(cosine: tuple[Model, Path, TestClient]) -> None:
    model, _, _ = cosine
    fitted = model.fit_sampler(samplers.Refine(inner=samplers.Ancestral(steps=3)), 9)
    assert fitted == samplers.Refine(inner=samplers.Ancestral(steps=3, noise=Cosine()))
    own, named = samplers.Ancestral(steps=3), samplers.Ancestral(steps=3, noise=Cosine())
    assert model.fill(TEXT, sampler=own, seed=1) == model.fill(TEXT, sampler=named, seed=1)
    canvas = model.canvas([[model.tokenizer.mask_id] * 24], may_end=False)
    plain, cosine_, other = (
        unmask.sample(model.denoiser, canvas, sampler, objective=model.objective).tokens
        for sampler in (own, named, samplers.Ancestral(steps=3, noise=LogLinear()))
    )
    assert plain.equal(cosine_)
    assert not plain.equal(other)


@pytest.mark.parametrize(
    ("name", "options"),
    [("confidence", {"tokns": 2}), ("semi_ar", {"strid": 2}), ("block", {"inner": samplers.Entropy(), "steps": 3})],
)
def test_an_option_that_there_is_not_is_refused(
    name: str, options: dict[str, Any], cosine: tuple[Model, Path, TestClient]
) -> None:
    with pytest.raises(UsageError, match="has no option"):
        cosine[0].make_sampler(name, **options)


def test_the_server_does_not_import_the_command_line() -> None:
    for path in Path(unmask.server.__file__).parent.glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("unmask.cli") for name in names), path.name
