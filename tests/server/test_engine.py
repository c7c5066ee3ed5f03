"""The engine: a row's text is its own affair, everybody gets a turn, and one row's error is nobody else's."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

import unmask
from unmask.constraints.regex import Regex
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.model import Model
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.samplers import Sampler, Step
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.confidence import Confidence
from unmask.samplers.left_to_right import LeftToRight
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Query
from unmask.server.compiling import Compiler
from unmask.server.engine import Call, Cancelled, Closed, Engine
from unmask.server.limits import Limits
from unmask.server.routes_native import fill
from unmask.server.routes_openai import complete
from unmask.server.rows import Work, Writing, row_of
from unmask.server.schemas import Completion, Fill
from unmask.server.served_model import Served

ONE_A_CALL = Ancestral(steps=None)


@pytest.fixture
def engine(small: Model) -> Iterator[Engine]:
    made = Engine(small, max_batch=6)
    yield made
    made.close()


@pytest.fixture
def serve(engine: Engine, compiler: Compiler) -> Callable[[], Served]:
    return lambda: Served(engine, compiler, Limits(), Call())


# --- a row's text -----------------------------------------------------------------------------------------------------

TASKS: list[dict[str, Any]] = [
    {"length": 5, "seed": 1},
    {"length": 32, "seed": 2, "sampler": ONE_A_CALL},
    {"length": 17, "seed": 3, "prompt": "hello ", "sampler": Ancestral(steps=5, temperature=0.7, top_p=0.9)},
    {"length": 30, "seed": 4, "sampler": Confidence(tokens=3)},
    {"length": 20, "seed": 5, "sampler": unmask.samplers.EntropyBounded(gamma=3.0, top_k=20)},
    {"length": 24, "seed": 6, "sampler": unmask.samplers.ReMDM(steps=9)},
    {"length": 12, "seed": 7, "constraint": Regex(pattern="[a-f]+x[0-9]+")},
    {"length": 21, "seed": 8, "prompt": "ab", "guidance": 1.5},
    {"length": 70, "seed": 9, "sampler": Ancestral(steps=6)},
    {"length": 16, "seed": 10, "suffix": "the end", "num": 3},
    {"length": 28, "seed": 11, "sampler": unmask.samplers.Block(size=7)},
    {"length": 19, "seed": 12, "sampler": unmask.samplers.Refine(inner=Ancestral(steps=4))},
    {"length": 9, "seed": 13, "sampler": unmask.samplers.Posterior(steps=7)},
    {"length": 26, "seed": 14, "sampler": unmask.samplers.Margin(tokens=2, random=0.3)},
    {"length": 15, "seed": 15, "sampler": unmask.samplers.Entropy(steps=4), "num": 2},
    {"length": 31, "seed": 16, "sampler": unmask.samplers.LeftToRight(steps=6)},
    {"length": 18, "seed": 17, "sampler": unmask.samplers.PredictorCorrector(steps=5)},
    {"length": 22, "seed": 18, "sampler": unmask.samplers.Threshold(threshold=0.05)},
    {"length": 60, "seed": 19, "sampler": unmask.samplers.SemiAR(window=24, inner=Ancestral(steps=3))},
    {"length": 14, "seed": 20, "sampler": Confidence(tokens=2), "constraint": Regex(pattern="[0-9 ]+")},
    {
        "length": 25,
        "seed": 21,
        "sampler": unmask.samplers.Block(size=6),
        "constraint": unmask.constraints.JsonSchema.of({"type": "integer"}),
    },
    {
        "length": 20,
        "seed": 22,
        "prompt": "it is ",
        "sampler": Ancestral(steps=3, temperature=0.6),
        "constraint": [unmask.constraints.Words(forbid=("I",)), Regex(pattern="it is [a-z I]*", over="text")],
    },
    {"length": 13, "seed": 23, "sampler": unmask.samplers.Gibbs(sweeps=1)},
]

JOBS: list[tuple[str, dict[str, Any]]] = [
    *(("generate", task) for task in TASKS),
    ("fill", {"text": ["a[MASK:2..5]b", "the [MASK:3] sat on [MASK:4]"], "seed": 3}),
    ("fill", {"text": "n = [MASK:1..4]", "constraint": unmask.constraints.Choices(options=("1", "22", "yes"))}),
    ("edit", {"text": "the cat sat", "replace": "cat", "with_length": (2, 4), "num": 2, "seed": 5}),
    ("score", {"texts": ["the cat sat", "x" * 50], "num_samples": 12}),
]


def done_by(served: Served, job: tuple[str, dict[str, Any]]) -> Any:
    found = getattr(served, job[0])(**job[1])
    return found.draws_BS.tolist() if job[0] == "score" else found


def test_every_sampler_is_among_the_tasks(small: Model) -> None:
    there = {type(task["sampler"]) for task in TASKS if "sampler" in task}
    fitting = {unmask.samplers.room.get(name) for name in small.sampler_names()}
    assert fitting == there


def test_alone_and_under_load_the_same_text(serve: Callable[[], Served]) -> None:
    """Samplers, lengths, constraints and step counts together, with edits and scores among them: to the last bit."""
    alone = [done_by(serve(), job) for job in JOBS]
    with ThreadPoolExecutor(len(JOBS) * 2) as pool:
        for order in (JOBS * 2, JOBS[::-1] * 2):
            for job, found in zip(order, pool.map(lambda job: done_by(serve(), job), order), strict=True):
                assert found == alone[JOBS.index(job)], job


def test_as_the_library_writes_it(serve: Callable[[], Served], small: Model) -> None:
    """With a network this small no rounding is near a border: the library's text is the engine's."""
    for task in TASKS:
        # On an empty canvas all positions are alike: there rounding alone would decide which is the surest.
        task = {"prompt": "one two", **task} if "sampler" in task else task
        assert serve().generate(**task) == small.generate(**task), task
    assert serve().fill("a[MASK:2..3]b", seed=3) == small.fill("a[MASK:2..3]b", seed=3)
    mine, theirs = (m.edit("the cat sat", "cat", with_length=(2, 3)) for m in (serve(), small))
    assert [e.text for e in mine] == [e.text for e in theirs]


def test_scores_are_the_librarys(serve: Callable[[], Served], small: Model) -> None:
    texts = ["hello", "a", "x" * 50]
    for num_samples in (1, 6, 16):
        served = serve()
        mine, theirs = (m.score(texts, seed=5, num_samples=num_samples) for m in (served, small))
        assert mine.draws_BS.shape == theirs.draws_BS.shape
        torch.testing.assert_close(mine.draws_BS, theirs.draws_BS.double(), rtol=1e-4, atol=1e-4)
        assert mine.tokens_B.tolist() == theirs.tokens_B.tolist() == [6, 2, 51]
        split = sum(float(s.nats_L.sum()) for s in served.scorings)
        assert split == pytest.approx(mine.nats, rel=1e-6)


@pytest.mark.parametrize("objective", [MDLM(form="count"), MDLM(), MDLM(steps=5, carry_over=False), AR()], ids=repr)
def test_scores_given_prompts_are_the_librarys(objective: Any, compiler: Compiler) -> None:
    """In each of the ways in which the engine scores; the long text's prompt stands before each of its windows."""
    torch.manual_seed(1)
    causal = isinstance(objective, AR)
    network = DiT(hidden=16, blocks=1, heads=2, dropout=0, causal=causal).build(num_ids=258, mask_id=257)
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model = Model(denoiser=network, tokenizer=compiler.tokenizer, objective=objective, length=32, separator="=")
    engine = Engine(model, max_batch=6)
    try:
        served = Served(engine, compiler, Limits(), Call())
        how: dict[str, Any] = {"prompts": ["q", "two?", "a"], "seed": 5, "num_samples": 8}
        mine, theirs = (m.score(["hello", "a", "x" * 50], **how) for m in (served, model))
        torch.testing.assert_close(mine.draws_BS.double(), theirs.draws_BS.double(), rtol=1e-4, atol=1e-4)
        assert mine.tokens_B.tolist() == theirs.tokens_B.tolist() == [6, 2, 51]
        other = served.score(["hello", "a", "x" * 50], **how | {"prompts": "q"})
        assert other.nats != mine.nats  # what was scored before is known by its prompts, too
    finally:
        engine.close()


def test_a_prompt_ends_as_the_model_was_trained(small: Model, compiler: Compiler) -> None:
    """The separator of its rows stands between prompt and text here, too."""
    model = copy.copy(small)
    model.separator = "="
    engine = Engine(model, max_batch=6)
    try:
        asked = Completion(prompt="ab", max_tokens=5, seed=1, echo=True)
        found = complete(Served(engine, compiler, Limits(), Call()), asked)
        assert found["choices"][0]["text"] == model.generate(1, 8, "ab", seed=1)[0]
        assert found["choices"][0]["text"].startswith("ab=")
        assert found["usage"]["prompt_tokens"] == 3
    finally:
        engine.close()


def test_filled_texts_keep_what_was_given(compiler: Compiler, tmp_path: Path) -> None:
    """A vocabulary that lowers and does not know snowmen: the text stays, and its tokens are told beside it."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "naive", "the", "cat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    network = DiT(hidden=16, blocks=1, heads=2).build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    model = Model(denoiser=network, tokenizer=tokenizer, objective=MDLM(), length=16)
    engine = Engine(model, max_batch=6)
    try:
        found = fill(Served(engine, compiler, Limits(), Call()), Fill(text="Naïve ☃ [MASK:2]", seed=2))["texts"][0]
        assert found["text"].startswith("Naïve ☃ ")
        assert found["text"] == model.fill("Naïve ☃ [MASK:2]", seed=2)[0]
        assert [token["text"] for token in found["tokens"]][:2] == ["naive", "[UNK]"]
        assert len(found["tokens"]) == 4
    finally:
        engine.close()


# --- the law ----------------------------------------------------------------------------------------------------------


def test_texts_of_a_busy_engine_follow_the_models_law(compiler: Compiler) -> None:
    """A table of 3 tokens at 2 positions, whose second token depends on the first: chi-square over 600 rows, written
    beside rows of other lengths and samplers by an engine that has room for 5 at a time."""
    first, second = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
    joint = first[:, None] * second

    def logits(z_BL: Tensor, level_B: Tensor | None) -> Tensor:
        found = torch.full((*z_BL.shape, 4), -1e9)
        for b, row in enumerate(z_BL.tolist()):
            for at in range(len(row)):
                if len(row) != 2:
                    p = first
                else:
                    other = row[1 - at]
                    table = joint if at == 0 else joint.T
                    p = table.sum(dim=1) if other == 3 else table[:, other] / table[:, other].sum()
                found[b, at, :3] = p.log()
        return found

    table = unmask.as_denoiser(logits, vocab_size=3, mask_id=3)

    class Toy:
        """Just what the engine looks at of a model."""

        denoiser, device = table, torch.device("cpu")
        objective = unmask.objectives.MDLM()

    engine = Engine(Toy(), max_batch=5)  # type: ignore[arg-type]
    counts: Counter[tuple[int, ...]] = Counter()

    def write(seed: int) -> list[tuple[int, ...]]:
        canvas = Canvas.blank(num=4, length=2, mask_id=3, seed=seed)
        sampler: Sampler = ONE_A_CALL if seed % 2 else Confidence(random=1.0)
        works = [Writing(row_of(canvas, i), sampler, engine.predictor) for i in range(4)]
        noise = Canvas.blank(num=1, length=3 + seed % 3, mask_id=3, seed=seed)
        works.append(Writing(noise, Ancestral(steps=2), engine.predictor))
        for _ in engine.run(works, Call()):
            pass
        return [tuple(work.tokens_1L[0].tolist()) for work in works[:4]]

    try:
        with ThreadPoolExecutor(6) as pool:
            for rows in pool.map(write, range(150)):
                counts.update(rows)
    finally:
        engine.close()
    assert sum(counts.values()) == 600
    seen = [counts[(a, b)] for a in range(3) for b in range(3)]
    assert scipy.stats.chisquare(seen, (joint.double() / joint.double().sum()).flatten() * 600).pvalue > 1e-3


# --- turns ------------------------------------------------------------------------------------------------------------


class Steps(Work):
    """Work of `num` steps that notes when each happens; what it asks is nothing to it."""

    def __init__(self, name: str, num: int, log: list[str], fails_at: int | None = None) -> None:
        self.name, self.left, self.log, self.fails_at = name, num, log, fails_at
        here = torch.zeros(1, 1, dtype=torch.long)
        self.questions = [Query(torch.full((1, 4), 257), torch.ones(1), here, here == 0, 1)]

    def take(self, predictions: list[Tensor]) -> Step | None:
        self.log.append(self.name)
        self.left -= 1
        self.done = self.left == 0
        if self.fails_at == self.left:
            raise RuntimeError("a sampler's own error")
        return None


class Alone(Steps):
    """The same, alone with the network."""

    def __init__(self, name: str, num: int, log: list[str]) -> None:
        super().__init__(name, num, log)
        self.questions = []

    def alone(self) -> Step | None:
        return self.take([])


def together(engine: Engine, jobs: list[list[Work]]) -> list[BaseException | None]:
    """Run the jobs as requests that are all there before the first step."""
    found: list[BaseException | None] = [None] * len(jobs)

    def one(i: int) -> None:
        try:
            for _ in engine.run(jobs[i], Call()):
                pass
        except Exception as e:
            found[i] = e

    block = Block()
    holder = threading.Thread(target=lambda: list(engine.run([block], Call())))
    holder.start()
    block.began.wait(10)
    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        waiting = engine.waiting
        thread.start()
        while engine.waiting == waiting:
            time.sleep(0.001)
    block.go.set()
    for thread in [holder, *threads]:
        thread.join(20)
        assert not thread.is_alive()
    return found


class Block(Work):
    """Holds the engine until it is let go."""

    def __init__(self) -> None:
        self.questions = []
        self.began, self.go = threading.Event(), threading.Event()

    def take(self, predictions: list[Tensor]) -> Step | None:
        raise NotImplementedError

    def alone(self) -> Step | None:
        self.began.set()
        self.go.wait(20)
        self.done = True
        return None


def test_requests_take_turns_however_many_rows_they_bring(small: Model) -> None:
    engine = Engine(small, max_batch=2)
    log: list[str] = []
    try:
        many: list[Work] = [Steps("many", 4, log) for _ in range(10)]
        together(engine, [many, [Steps("one", 4, log)], [Steps("two", 4, log)]])
    finally:
        engine.close()
    assert Counter(log) == {"many": 40, "one": 4, "two": 4}
    # With three requests and two places each gets two turns in three steps: the small ones are done after 12 turns.
    assert max(i for i, name in enumerate(log) if name != "many") < 14


def test_everybody_goes_on_in_every_step_while_there_is_room(small: Model) -> None:
    engine = Engine(small, max_batch=8)
    log: list[str] = []
    try:
        together(engine, [[Steps(str(i), 3, log)] for i in range(8)])
        steps = engine.metrics.value("unmask_steps_total")
    finally:
        engine.close()
    assert steps == 1 + 3
    assert all(Counter(log[i : i + 8]) == Counter(map(str, range(8))) for i in (0, 8, 16))


def test_rows_that_need_the_network_for_themselves_let_others_go_on_between(small: Model) -> None:
    engine = Engine(small, max_batch=8)
    log: list[str] = []
    try:
        scored: list[list[Work]] = [[Alone(name, 1, log) for _ in range(4)] for name in ("first", "second")]
        together(engine, [*scored, [Steps("written", 8, log)]])
    finally:
        engine.close()
    assert Counter(log) == {"first": 4, "second": 4, "written": 8}
    turns = [name for name in log if name != "written"]
    assert turns == ["first", "second"] * 4
    # All cost alike, so none is ever more than a turn ahead of another that has turns left.
    for i in range(12):
        count = Counter(log[:i])
        assert count["written"] >= min(count["first"], count["second"])
        assert count["written"] <= max(count["first"], count["second"]) + 1


def test_whoever_listens_late_is_told_of_each_step_as_it_was(serve: Callable[[], Served]) -> None:
    served = serve()
    seen: list[tuple[int, int]] = []

    def slow(_: Any) -> None:
        time.sleep(0.3 if not seen else 0)  # the engine goes on meanwhile
        seen.append((served.call.steps_reported, served.call.steps))

    served.generate(1, 8, seed=5, sampler=ONE_A_CALL, watch=slow)
    assert [told for told, _ in seen] == list(range(1, 9))
    assert seen[0][1] > 1


def test_rows_join_and_leave_at_any_step(small: Model, compiler: Compiler) -> None:
    engine = Engine(small, max_batch=8)
    served = Served(engine, compiler, Limits(), Call())
    sizes: list[int] = []
    texts: list[str] = []

    def late() -> None:
        texts.extend(Served(engine, compiler, Limits(), Call()).generate(1, 8, seed=5, sampler=ONE_A_CALL))

    joined = threading.Thread(target=late)

    def watch(step: Step) -> None:
        sizes.append(engine.waiting)
        if len(sizes) == 3:
            joined.start()
        if len(sizes) > 3 and joined.is_alive():
            time.sleep(0.002)

    try:
        served.generate(1, 32, seed=1, sampler=ONE_A_CALL, watch=watch)
        joined.join(10)
        assert texts == small.generate(1, 8, seed=5, sampler=ONE_A_CALL)
        assert max(sizes) == 2
        assert sizes[0] == 1
    finally:
        engine.close()


# --- ends -------------------------------------------------------------------------------------------------------------


def test_an_error_in_a_row_ends_its_request_alone(small: Model) -> None:
    engine = Engine(small, max_batch=8)
    log: list[str] = []
    try:
        bad: list[Work] = [Steps("bad", 5, log, fails_at=2), Steps("beside", 50, log)]
        errors = together(engine, [bad, [Steps("good", 6, log)]])
        assert isinstance(errors[0], RuntimeError)
        assert errors[1] is None
        assert Counter(log)["good"] == 6
        assert Counter(log)["beside"] <= 4  # its request has ended
        assert together(engine, [[Steps("after", 2, log)]]) == [None]
    finally:
        engine.close()


@dataclass(frozen=True, kw_only=True)
class Touchy(LeftToRight):
    """Draws for everybody but one."""

    def draw_tokens(self, log_p_NI: Tensor, key_N: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        if (key_N == 13).any():
            raise RuntimeError("no memory for this one")
        return super().draw_tokens(log_p_NI, key_N, *rest, **more)


def test_an_error_in_a_shared_draw_ends_the_request_that_causes_it(small: Model) -> None:
    engine = Engine(small, max_batch=8)
    try:
        rows = [Canvas(torch.full((1, 6), 257), 257, torch.tensor([key])) for key in (12, 13, 14)]
        works = [Writing(row, Touchy(), engine.predictor) for row in rows]
        errors = together(engine, [[work] for work in works])
    finally:
        engine.close()
    assert [type(error) for error in errors] == [type(None), RuntimeError, type(None)]
    assert works[0].done
    assert works[2].done


def test_a_network_error_ends_the_request_that_causes_it(small: Model, serve: Callable[[], Served]) -> None:
    engine = serve().engine
    wanted = small.generate(1, 12, seed=4)
    bad = Canvas(torch.full((1, 12), 257), 257, torch.zeros(1, dtype=torch.long))
    work = Writing(bad, ONE_A_CALL, engine.predictor)
    work.questions[0].tokens_BL[0, 0] = 5000  # no such id: the embedding fails
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(lambda: [serve().generate(1, 12, seed=4) for _ in range(5)])
        with pytest.raises(IndexError):
            for _ in engine.run([work], Call()):
                pass
        assert good.result() == [wanted] * 5


@pytest.mark.parametrize("after", [0, 1, 4])
def test_cancelling_stops_before_the_next_step(serve: Callable[[], Served], after: int) -> None:
    served = serve()
    seen: list[int] = []

    def watch(step: Step) -> None:
        seen.append(served.call.steps)
        if len(seen) == after + 1:
            served.call.cancel()

    with pytest.raises(Cancelled):
        served.generate(2, 32, sampler=ONE_A_CALL, watch=watch)
    at = served.call.steps_at_end
    assert at is not None
    for _ in range(3):  # whoever comes later finds the engine free
        serve().generate(1, 4)
    assert served.call.steps - at <= 1
    assert served.engine.waiting == 0
    assert served.engine.metrics.late_most <= 1
    with pytest.raises(Cancelled):
        served.generate(1, 4)


def test_closing_tells_whoever_waits(small: Model) -> None:
    engine = Engine(small)
    log: list[str] = []
    errors: list[Exception] = []
    endless = Steps("endless", -1, log)

    def wait() -> None:
        try:
            for _ in engine.run([endless], Call()):
                time.sleep(0.001)
        except Closed as e:
            errors.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    while not log:
        time.sleep(0.001)
    engine.close()
    thread.join(10)
    assert len(errors) == 1
    with pytest.raises(Closed):
        list(engine.run([Steps("late", 1, log)], Call()))


def test_the_budget_is_checked_before_any_work(engine: Engine, compiler: Compiler) -> None:
    served = Served(engine, compiler, Limits(budget=100, length=64), Call())
    with pytest.raises(unmask.UsageError, match="ask for less"):
        served.generate(2, 20, sampler=ONE_A_CALL)
    with pytest.raises(unmask.UsageError, match="64 tokens"):
        served.generate(1, 65)
    with pytest.raises(unmask.UsageError, match="ask for less"):
        served.score("x" * 20, num_samples=64)
    assert engine.metrics.value("unmask_steps_total") == 0
