"""What can be asked of a model, process by process: it works, or is refused with the reason; in Python and served."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import unmask
from unmask import constraints, objectives, samplers
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.errors import UsageError
from unmask.model import Model
from unmask.objectives import Objective
from unmask.samplers import Sampler
from unmask.server.app import make_app


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFewSteps(objectives.SSDLM):
    def sampler(self) -> Sampler:
        return samplers.Simplex(steps=4)


OBJECTIVES: dict[str, Objective] = {
    "mdlm": objectives.MDLM(),
    "udlm": objectives.UDLM(),
    "sedd": objectives.SEDD(),
    "sedd uniform": objectives.SEDD(state="uniform"),
    "token rates": objectives.TokenRates(rates="power", k=2.0),
    "plaid": objectives.Plaid(dim=4),
    "diffusion-lm": objectives.DiffusionLM(dim=4),
    "ssd-lm": InFewSteps(block=6, steps=20),
}
DIGITS = constraints.Regex(pattern="[0-9]+")


# What is asked → by objective the noun of its refusal, for those that refuse.
ASKED: dict[str, tuple[Callable[[Model], Any], dict[str, str]]] = {
    "a prompt": (lambda m: m.generate(1, 10, "ab", seed=1), {}),
    "a text beyond the window": (lambda m: m.generate(1, 30, "ab", seed=1), {}),
    "gaps": (lambda m: m.fill("ab[MASK:3]cd[MASK:2]"), {}),
    "gaps of unknown length": (lambda m: m.fill("ab[MASK:1..3]cd"), {}),
    "an edit": (lambda m: m.edit("hello world", "world"), {}),
    "a score": (lambda m: m.score("hello", num_samples=4).explain(), {}),
    "a score given a prompt": (lambda m: m.score("lo", prompts="hel", num_samples=4), {}),
    "logits": (lambda m: m.logits("hello"), {"plaid": "vectors", "diffusion-lm": "vectors", "ssd-lm": "vectors"}),
    "steps to watch": (lambda m: m.generate(1, 8, watch=lambda step: None, runners_up=2), {}),
    "guidance by a label": (
        lambda m: m.generate(1, 8, label=1, guidance=1.0),
        {"sedd": "guidance", "sedd uniform": "guidance"},
    ),
    "guidance by a label, with a prompt": (
        lambda m: m.generate(1, 8, "ab", label=1, guidance=1.0),
        {"sedd": "guidance", "sedd uniform": "guidance"},
    ),
    "guidance by a prompt": (
        lambda m: m.generate(1, 8, "ab", guidance=1.0),
        {
            "udlm": "uniform",
            "sedd": "guidance",
            "sedd uniform": "guidance",
            "plaid": "gaussian",
            "diffusion-lm": "gaussian",
            "ssd-lm": "simplex",
        },
    ),
    "a constraint": (
        lambda m: m.fill("ab[MASK:3]", constraint=DIGITS),
        {
            "udlm": "constraint",
            "sedd uniform": "constraint",
            "token rates": "constraint",
            "plaid": "constraint",
            "diffusion-lm": "constraint",
            "ssd-lm": "constraint",
        },
    ),
    "what masks hide": (
        lambda m: m.predict("he[MASK]lo"),
        {
            "udlm": "uniform",
            "sedd uniform": "uniform",
            "plaid": "gaussian",
            "diffusion-lm": "gaussian",
            "ssd-lm": "simplex",
        },
    ),
    "refining": (
        lambda m: m.refine("hello"),
        {
            "udlm": "refining",
            "sedd": "refining",
            "sedd uniform": "refining",
            "token rates": "refining",
            "plaid": "refining",
            "diffusion-lm": "refining",
            "ssd-lm": "refining",
        },
    ),
    "particles": (
        lambda m: m.particles(lambda z: torch.zeros(len(z)), 1, 8, crowd=2),
        {
            "udlm": "particles",
            "sedd": "particles",
            "sedd uniform": "particles",
            "token rates": "particles",
            "plaid": "particles",
            "diffusion-lm": "particles",
            "ssd-lm": "particles",
        },
    ),
}
ROUTES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "a completion": ("/v1/completions", {"prompt": "ab", "max_tokens": 6}, {}),
    "a stream": ("/v1/completions", {"prompt": "ab", "max_tokens": 6, "stream": True}, {}),
    "log-probabilities of a prompt": (
        "/v1/completions",
        {"prompt": "ab", "max_tokens": 4, "logprobs": 1, "echo": True},
        {
            "udlm": "uniform",
            "sedd": "ratios",
            "sedd uniform": "uniform",
            "token rates": "rates",
            "plaid": "gaussian",
            "diffusion-lm": "gaussian",
            "ssd-lm": "simplex",
        },
    ),
    "gaps": ("/fill", {"text": "ab[MASK:3]"}, {}),
    "a constraint": (
        "/fill",
        {"text": "ab[MASK:3]", "regex": "[0-9]+"},
        {
            "udlm": "constraint",
            "sedd uniform": "constraint",
            "token rates": "constraint",
            "plaid": "constraint",
            "diffusion-lm": "constraint",
            "ssd-lm": "constraint",
        },
    ),
    "an edit": ("/edit", {"text": "hello world", "replace": "world"}, {}),
    "a score": ("/score", {"texts": ["hello"], "num_samples": 4}, {}),
    "steps to watch": ("/trace", {"text": "ab[MASK:3]"}, {}),
    "a sampler of another process": (
        "/fill",
        {"text": "ab[MASK:3]", "sampler": "ancestral"},
        {
            "udlm": "uniform_posterior",
            "sedd": "tweedie",
            "sedd uniform": "tweedie",
            "token rates": "token_posterior",
            "plaid": "gaussian",
            "diffusion-lm": "gaussian",
            "ssd-lm": "simplex",
        },
    ),
}


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    tokenizer = load_tokenizer("bytes")
    made = {}
    for name, objective in OBJECTIVES.items():
        torch.manual_seed(0)
        network = DiT(hidden=16, blocks=1, heads=2, conditioning="level", classes=2).build(
            num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id
        )
        for p in network.parameters():
            torch.nn.init.normal_(p, std=0.05)
        made[name] = Model(denoiser=network, tokenizer=tokenizer, objective=objective, length=24)
    return made


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("what", ASKED)
def test_it_works_or_is_refused_with_the_reason(models: dict[str, Model], objective: str, what: str) -> None:
    ask, refused = ASKED[what]
    if objective in refused:
        with pytest.raises(UsageError, match=refused[objective]):
            ask(models[objective])
    else:
        assert ask(models[objective]) is not None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_is_given_stays(models: dict[str, Model], objective: str) -> None:
    model = models[objective]
    assert re.fullmatch(r"ab.*cd.*", model.fill("ab[MASK:3]cd[MASK:2]", seed=3)[0], re.S)
    assert model.generate(1, 12, "ab", seed=5) == model.generate(1, 12, "ab", seed=5)
    alone = model.generate(1, 12, ["b"], seed=7, only=[0])
    assert model.generate(2, 12, ["b"], seed=7)[0] == alone[0]  # whatever is written beside it


@pytest.fixture(scope="module")
def clients(models: dict[str, Model]) -> Iterator[dict[str, TestClient]]:
    opened = {name: TestClient(make_app(model), base_url="http://localhost") for name, model in models.items()}
    for client in opened.values():
        client.__enter__()
    yield opened
    for client in opened.values():
        client.__exit__(None, None, None)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("what", ROUTES)
def test_routes_answer_or_say_why_not(clients: dict[str, TestClient], objective: str, what: str) -> None:
    route, body, refused = ROUTES[what]
    answer = clients[objective].post(route, json=body)
    if objective in refused:
        assert answer.status_code == 400
        assert refused[objective] in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_server_writes_what_the_library_writes(
    models: dict[str, Model], clients: dict[str, TestClient], objective: str
) -> None:
    [text] = clients[objective].post("/fill", json={"text": "ab[MASK:4]cd", "seed": 9}).json()["texts"]
    assert text["text"] == models[objective].fill("ab[MASK:4]cd", seed=9)[0]
    bound = models[objective].score("hello", num_samples=8)
    [scored] = clients[objective].post("/score", json={"texts": ["hello"], "num_samples": 8}).json()["texts"]
    assert scored["nats"] == pytest.approx(bound.nats, rel=1e-4)
    assert 0 < sum(token["nats"] for token in scored["by_token"]) < bound.nats  # all but end-of-text


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_page_is_offered_what_fits(
    models: dict[str, Model], clients: dict[str, TestClient], objective: str
) -> None:
    names = clients[objective].get("/info").json()["samplers"]
    assert names == models[objective].sampler_names()
    assert unmask.samplers.room.name_of(models[objective].sampler) in names
    for name in names:
        models[objective].generate(1, 8, sampler=models[objective].make_sampler(name))
