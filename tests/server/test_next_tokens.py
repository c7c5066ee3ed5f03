"""Autoregressive models in the engine: rows at different places share calls, and a row's text is its own affair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from small_server import WINDOW
from starlette.testclient import TestClient

import unmask
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.denoisers.llama import Llama
from unmask.denoisers.network import Network
from unmask.model import Model
from unmask.objectives.ar import AR
from unmask.samplers.left_to_right import LeftToRight
from unmask.sampling.predictor import NextToken
from unmask.server.app import make_app
from unmask.server.compiling import Compiler
from unmask.server.engine import Call, Engine
from unmask.server.limits import Limits
from unmask.server.next_tokens import NextQuery, RowCache, answer_next, next_groups
from unmask.server.rows import Writing, row_of
from unmask.server.served_model import Served

CPU = torch.device("cpu")


def causal_model(hidden: int = 32, blocks: int = 2, heads: int = 2, *, llama: bool = False, **more: Any) -> Model:
    torch.manual_seed(0)
    tokenizer, sizes = load_tokenizer("bytes"), {"hidden": hidden, "blocks": blocks, "heads": heads, **more}
    described = Llama(causal=True, begin=tokenizer.eot_id, **sizes) if llama else DiT(dropout=0, causal=True, **sizes)
    network = described.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    with torch.no_grad():
        for p in network.parameters():
            p.normal_(std=0.3)
    return Model(denoiser=network, tokenizer=tokenizer, objective=AR(), length=WINDOW)


@pytest.fixture(scope="module", params=[False, True], ids=["dit", "llama"])
def causal(request: pytest.FixtureRequest) -> Model:
    return causal_model(llama=True, groups=1) if request.param else causal_model()


@pytest.fixture
def engine(causal: Model) -> Iterator[Engine]:
    made = Engine(causal, max_batch=8)
    yield made
    made.close()


@pytest.fixture
def serve(engine: Engine) -> Iterator[Callable[[], Served]]:
    compiler = Compiler(engine.model.tokenizer)
    yield lambda: Served(engine, compiler, Limits(), Call())
    compiler.close()


class Row:
    """A row of random ids that is read token by token."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens_1L, self.cache = torch.randint(0, 250, (1, length), generator=generator), RowCache()

    def ask(self, reach: int) -> NextQuery:
        at = torch.tensor([[reach - 1]])
        return NextQuery(
            self.tokens_1L, torch.ones(1), at, torch.ones_like(at, dtype=torch.bool), reach, cache=self.cache
        )


@pytest.mark.parametrize(
    "more",
    [
        {"hidden": 32},
        {"hidden": 128, "heads": 4, "qk_norm": True},
        {"hidden": 192, "conditioning": "constant"},
        {"hidden": 96, "heads": 6, "groups": 2, "qk_norm": True, "llama": True},
    ],
)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_rows_answer_is_the_same_bits_in_any_company(more: dict[str, Any], threads: int) -> None:
    network = causal_model(**more).denoiser
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            mine = Row(24, 0)
            alone = [answer_next(network, [mine.ask(reach)], CPU)[0] for reach in range(5, 25)]
            plain = NextToken(network)
            for k, reach in enumerate(range(5, 25)):  # and it is the network's own answer
                torch.testing.assert_close(alone[k], plain(mine.ask(reach)), rtol=1e-4, atol=1e-4)
            for size in (1, 3, 4, 8, 20):
                again, others = Row(24, 0), [Row(30, 1 + i) for i in range(size)]
                for i, other in enumerate(others):
                    answer_next(network, [other.ask(2 + i % 7)], CPU)
                for k, reach in enumerate(range(5, 25)):
                    queries = [other.ask(other.cache.length + 1) for other in others if other.cache.length < 30]
                    place = k % (len(queries) + 1)
                    queries.insert(place, again.ask(reach))
                    for part in next_groups(queries, network):
                        found = answer_next(network, [queries[i] for i in part], CPU)
                        if place in part:
                            assert torch.equal(found[part.index(place)], alone[k]), (size, reach)
                            assert k == 0 or len(part) == len(queries)
    finally:
        torch.set_num_threads(before)


TASKS: list[dict[str, Any]] = [
    {"length": 14, "prompt": "the ", "seed": 2, "num": 3},
    {"length": 32, "seed": 3},
    {"length": 20, "prompt": "a", "seed": 4, "sampler": LeftToRight(temperature=0.5)},
    {"length": 29, "prompt": "some longer words ", "seed": 5, "sampler": LeftToRight(top_p=0.8)},
    {"length": 9, "prompt": "the ", "seed": 6, "sampler": LeftToRight(temperature=1.3, top_k=20)},
    {"length": 2, "prompt": "x", "seed": 7},
]


def test_alone_and_under_load_the_same_text_and_the_librarys(causal: Model, serve: Callable[[], Served]) -> None:
    alone = [serve().generate(**task) for task in TASKS]
    # With a network this small no rounding is near a border.
    assert alone == [causal.generate(**task) for task in TASKS]
    with ThreadPoolExecutor(len(TASKS) * 3) as pool:
        for order in (TASKS * 3, TASKS[::-1] * 3):
            texts = list(pool.map(lambda task: serve().generate(**task), order))
            assert texts == [alone[TASKS.index(task)] for task in order]


def test_rows_share_calls(causal: Model, engine: Engine) -> None:
    """Five rows whose beginnings and lengths differ: a call for each beginning, then one a step for all of them."""
    works = []
    for prompt, length in (("ab", 12), ("ab", 12), ("the ", 30), ("", 8), ("longer words ", 22)):
        canvas, _ = causal.prompted(1, length, prompt, "", seed=length)
        works.append(Writing(row_of(canvas, 0), LeftToRight(), engine.predictor))
    steps = [int(work.canvas.open_BL.sum()) for work in works]
    canvas = works[0].canvas
    assert canvas.end_id is not None
    list(engine.run(works, Call()))
    assert engine.metrics.value("unmask_steps_total") <= max(steps)
    calls = engine.metrics.value("unmask_network_calls_total")
    assert calls == len(works) + engine.metrics.value("unmask_steps_total") - 1
    assert sum(steps) > 2 * calls


class Foreign(Network):
    """Any other network that has a cache."""

    def __init__(self, inner: Network) -> None:
        super().__init__()
        self.inner, self.causal = inner, True
        self.num_ids, self.mask_id = inner.num_ids, inner.mask_id
        self.stepped: list[int] = []

    def trunk(self, *given: Any, **more: Any) -> Any:
        return self.inner.trunk(*given, **more)

    def new_cache(self, batch: int, length: int) -> Any:
        return self.inner.new_cache(batch, length)

    def head(self, h_ND: Any) -> Any:
        return self.inner.head(h_ND)


class Stepping(Foreign):
    """One that also takes rows at positions of their own."""

    def can_step_rows(self) -> bool:
        return True

    def step_rows(self, ids_M: torch.Tensor, caches: Sequence[Any], at: Sequence[int]) -> torch.Tensor:
        self.stepped.append(len(caches))
        return self.inner.step_rows(ids_M, caches, at)


@pytest.mark.parametrize("kind", [Foreign, Stepping])
def test_any_network_may_take_rows_together_and_none_must(causal: Model, kind: type[Foreign]) -> None:
    foreign = kind(causal.denoiser)
    engine = Engine(Model(denoiser=foreign, tokenizer=causal.tokenizer, objective=AR(), length=WINDOW))
    compiler = Compiler(causal.tokenizer)
    try:
        served = Served(engine, compiler, Limits(), Call())
        assert served.generate(**TASKS[0]) == causal.generate(**TASKS[0])
    finally:
        engine.close()
        compiler.close()
    assert max(foreign.stepped, default=0) == (3 if kind is Stepping else 0)


def test_what_an_autoregressive_model_cannot_do_is_said(serve: Callable[[], Served]) -> None:
    with pytest.raises(unmask.UsageError, match="guidance"):
        serve().generate(1, 12, "ab", guidance=1.5)
    with pytest.raises(unmask.UsageError, match="constraints need a diffusion model"):
        serve().generate(1, 12, "ab", constraint=unmask.constraints.Regex(pattern="[a-f]+"))


def test_scores_are_exact_and_told_token_by_token(causal: Model, serve: Callable[[], Served]) -> None:
    texts = ["the cat", "x" * 50, "a"]  # the second in two windows
    served = serve()
    mine, theirs = served.score(texts), causal.score(texts)
    assert mine.exact
    assert mine.draws_BS.flatten().tolist() == pytest.approx(theirs.draws_BS.flatten().tolist(), rel=1e-5)
    assert mine.tokens_B.tolist() == theirs.tokens_B.tolist()
    assert sum(float(s.nats_L.sum()) for s in served.scorings) == pytest.approx(mine.nats)
    with TestClient(make_app(causal), base_url="http://localhost") as client:
        cat, dog = client.post("/score", json={"texts": ["the cat", "the dog"]}).json()["texts"]
    nats = [[token["nats"] for token in one["by_token"]] for one in (cat, dog)]
    assert nats[0][:4] == pytest.approx(nats[1][:4])  # what comes later is not looked at
    assert nats[0][4:] != pytest.approx(nats[1][4:])
    assert 0 < sum(nats[0]) < cat["nats"]  # the end has its share as well


def test_a_prompts_log_probabilities_are_the_exact_ones(causal: Model) -> None:
    with TestClient(make_app(causal), base_url="http://localhost") as client:
        how = {"prompt": "the cat", "echo": True, "max_tokens": 0, "logprobs": 3}
        told = client.post("/v1/completions", json=how).json()["choices"][0]["logprobs"]
        nats = [
            token["nats"] for token in client.post("/score", json={"texts": ["the cat"]}).json()["texts"][0]["by_token"]
        ]
        first, *others = told["token_logprobs"]
        assert first is told["top_logprobs"][0] is None  # before it stands nothing
        assert others == pytest.approx([-x for x in nats[1:]], abs=2e-6)
        for token, log_prob, top in zip(told["tokens"][1:], others, told["top_logprobs"][1:], strict=True):
            assert top[token] == log_prob
            assert 3 <= len(top) <= 4
        assert told["text_offset"] == [*range(7)]
        both = client.post("/v1/completions", json=how | {"max_tokens": 4, "seed": 1}).json()["choices"][0]["logprobs"]
        assert both["token_logprobs"][1:7] == pytest.approx(others, rel=1e-5)
        assert len(both["tokens"]) > 7


@pytest.mark.parametrize("num", [0, 3])
def test_an_empty_prompt_has_no_log_probabilities(causal: Model, small: Model, num: int) -> None:
    for model in (causal, small):
        with TestClient(make_app(model), base_url="http://localhost") as client:
            how = {"prompt": ["", "ab"], "echo": True, "max_tokens": num, "logprobs": 1, "suffix": None}
            answer = client.post("/v1/completions", json=how)
            assert answer.status_code == 200, answer.text
            empty, other = (len(choice["logprobs"]["tokens"]) for choice in answer.json()["choices"])
            assert empty <= num
            assert 2 <= other <= 2 + num
