"""The real `openai` client against a running server."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from small_server import Running

from unmask.model import Model
from unmask.samplers.ancestral import Ancestral


@pytest.fixture(scope="module")
def ai(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none needed here", max_retries=0) as client:
        yield client


def test_the_model_is_listed(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["small"]


def test_a_model_is_found_by_its_name(ai: openai.OpenAI) -> None:
    found = ai.models.retrieve("small")
    assert (found.id, found.object) == ("small", "model")
    for name in ("another", "small/../small", "a/b", "small "):
        with pytest.raises(openai.NotFoundError) as refused:
            ai.models.retrieve(name)
        assert refused.value.code == "model_not_found"
        assert refused.value.type == "invalid_request_error"


def test_a_completion(ai: openai.OpenAI, small: Model) -> None:
    found = ai.completions.create(model="small", prompt="abc", max_tokens=10, seed=3)
    [whole] = small.generate(1, 13, "abc", seed=3)
    assert found.object == "text_completion"
    assert found.choices[0].text == whole[3:]
    assert found.choices[0].finish_reason in ("stop", "length")
    assert found.usage is not None
    assert found.usage.prompt_tokens == 3
    assert found.usage.total_tokens == 3 + found.usage.completion_tokens


def test_a_seed_decides_and_none_is_drawn(ai: openai.OpenAI) -> None:
    def text(seed: int | None) -> str:
        return ai.completions.create(model="small", prompt="a", max_tokens=12, seed=seed).choices[0].text

    assert text(1) == text(1)
    assert len({text(None) for _ in range(4)}) > 1


def test_several_prompts_and_texts(ai: openai.OpenAI) -> None:
    found = ai.completions.create(model="small", prompt=["a", "bcd"], n=3, max_tokens=6, seed=5)
    assert [choice.index for choice in found.choices] == list(range(6))
    assert len({choice.text for choice in found.choices}) > 1


def test_a_suffix_is_kept(ai: openai.OpenAI, small: Model) -> None:
    found = ai.completions.create(model="small", prompt="begin ", suffix=" end", max_tokens=5, seed=1)
    [whole] = small.generate(1, 15, "begin ", " end", seed=1)
    assert f"begin {found.choices[0].text} end" == whole
    assert found.choices[0].finish_reason == "length"


def test_temperature_and_top_p(ai: openai.OpenAI, small: Model) -> None:
    how: dict[str, Any] = {"model": "small", "prompt": "ab", "max_tokens": 8, "seed": 2}
    cold = ai.completions.create(**how, temperature=0).choices[0].text
    assert cold == small.generate(1, 10, "ab", sampler=Ancestral(temperature=0.0), seed=2)[0][2:]
    assert cold != ai.completions.create(**how, temperature=1).choices[0].text
    narrow = ai.completions.create(**how, top_p=1e-6).choices[0].text
    assert narrow == cold


def test_stops(ai: openai.OpenAI) -> None:
    how: dict[str, Any] = {"model": "small", "prompt": "a", "max_tokens": 20, "seed": 4}
    whole = ai.completions.create(**how).choices[0].text
    stop = whole[7:9]
    cut = ai.completions.create(**how, stop=[stop, "nowhere to be found"]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"stop": ["e", "zq"]}, {"extra_body": {"steps": 4}}])
@pytest.mark.parametrize("sampler", ["ancestral", "left_to_right", "confidence", "remdm"])
def test_a_stream_adds_up(ai: openai.OpenAI, extra: dict[str, Any], sampler: str) -> None:
    extra = {**extra, "extra_body": {**extra.get("extra_body", {}), "sampler": sampler}}
    if sampler == "left_to_right":
        extra["extra_body"].pop("steps", None)
    how: dict[str, Any] = {"model": "small", "prompt": "ab", "max_tokens": 16, "seed": 6, **extra}
    whole = ai.completions.create(**how)
    texts = {choice.index: "" for choice in whole.choices}
    ends: dict[int, str] = {}
    usage, pieces = None, 0
    for chunk in ai.completions.create(**how, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in ends  # nothing behind the end
            texts[choice.index] += choice.text
            pieces += 1
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage is not None
    assert whole.usage is not None
    assert usage.model_dump() == whole.usage.model_dump()
    if sampler == "left_to_right" and "stop" not in extra:
        assert pieces > 8  # it comes in pieces


def test_logprobs(ai: openai.OpenAI) -> None:
    how: dict[str, Any] = {"model": "small", "prompt": "ab", "max_tokens": 6, "seed": 3, "logprobs": 2}
    choice = ai.completions.create(**how, extra_body={"sampler": "left_to_right"}).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert "".join(found.tokens) == choice.text
    assert all(value <= 0 for value in found.token_logprobs)
    assert all(2 <= len(top) <= 3 for top in found.top_logprobs)
    assert found.text_offset == list(range(2, 2 + len(found.tokens)))
    streamed: list[str] = []
    for chunk in ai.completions.create(**how, extra_body={"sampler": "left_to_right"}, stream=True):
        for piece in chunk.choices:
            streamed += piece.logprobs.tokens if piece.logprobs and piece.logprobs.tokens else []
    assert streamed == found.tokens


@pytest.mark.parametrize("how", [{"temperature": 0.3}, {"temperature": 0}, {"top_p": 0.5}, {"regex": "[xyz]+"}])
def test_logprobs_are_of_one_law(ai: openai.OpenAI, how: dict[str, Any]) -> None:
    """What is told of a token and what is told of those beside it can be compared, however it was drawn."""
    plain: dict[str, Any] = {"model": "small", "prompt": "ab", "max_tokens": 8, "seed": 3}
    found = (
        ai.completions.create(**plain, logprobs=10, extra_body={**how, "sampler": "left_to_right"}).choices[0].logprobs
    )
    assert found is not None
    for token, log_prob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):  # type: ignore[arg-type]
        assert top[token] == log_prob
        assert sum(map(math.exp, top.values())) < 1.0001
        assert len(top) in (10, 11)
        if len(top) == 11:  # it is not among the ten
            assert log_prob == min(top.values())


def test_the_ids_of_a_prompt(ai: openai.OpenAI) -> None:
    how: dict[str, Any] = {"model": "small", "max_tokens": 8, "seed": 3}
    text = ai.completions.create(**how, prompt="abc")
    ids = ai.completions.create(**how, prompt=[97, 98, 99], echo=True)
    assert ids.choices[0].text == f"abc{text.choices[0].text}"
    assert ids.usage == text.usage
    both = [choice.text for choice in ai.completions.create(**how, prompt=["abc", "d"]).choices]
    assert both == [choice.text for choice in ai.completions.create(**how, prompt=[[97, 98, 99], [100]]).choices]
    for bad in ([256], [97, 257], [258], [10**30], [[97], [257]]):  # the end, the mask, none
        with pytest.raises(openai.BadRequestError, match="below 258"):
            ai.completions.create(**how, prompt=bad)
    for bad in ([-1], [True], [1.5], [], [[]], [97, "a"], [[97], "a"], [[97], 97], [[[97]]]):  # type: ignore[list-item]
        with pytest.raises(openai.BadRequestError, match="prompt: a text of at most"):
            ai.completions.create(**how, prompt=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [2, 3])
@pytest.mark.parametrize("sampler", ["ancestral", "left_to_right"])
def test_logprobs_and_usage_end_where_a_stop_does(ai: openai.OpenAI, stop: int, sampler: str) -> None:
    how: dict[str, Any] = {"model": "small", "prompt": "ab", "max_tokens": 12, "seed": 3, "logprobs": 1}
    how["extra_body"] = {"sampler": sampler}
    whole = ai.completions.create(**how).choices[0].text
    how["stop"] = whole[5 : 5 + stop]
    kept = whole[: whole.index(how["stop"])]
    found = ai.completions.create(**how)
    assert found.choices[0].text == kept
    assert found.choices[0].logprobs is not None
    assert "".join(found.choices[0].logprobs.tokens or []) == kept
    assert found.usage is not None
    assert found.usage.completion_tokens == len(kept)  # a byte, a token
    text, tokens, usage = "", "", None
    with ai.completions.create(**how, stream=True, stream_options={"include_usage": True}) as stream:
        for piece in stream:
            usage = piece.usage or usage
            for choice in piece.choices:
                text += choice.text
                tokens += "".join(choice.logprobs.tokens or []) if choice.logprobs else ""
    assert (text, tokens) == (kept, kept)
    assert usage is not None
    assert usage.completion_tokens == len(kept)


def test_a_pattern_holds(ai: openai.OpenAI) -> None:
    found = ai.completions.create(
        model="small", prompt="n = ", max_tokens=9, n=4, seed=1, extra_body={"regex": "[0-9]{2,6}(\\.[0-9]+)?"}
    )
    for choice in found.choices:
        assert re.fullmatch(r"[0-9]{2,6}(\.[0-9]+)?", choice.text)


def test_a_schema_holds(ai: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["s", "m", "l"]}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    found = ai.completions.create(
        model="small",
        prompt="",
        max_tokens=28,
        n=3,
        seed=1,
        extra_body={"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
    )
    for choice in found.choices:
        jsonschema.validate(json.loads(choice.text), schema)


def test_echo(ai: openai.OpenAI) -> None:
    how: dict[str, Any] = {"model": "small", "prompt": "ab", "max_tokens": 4, "seed": 1}
    assert (
        ai.completions.create(**how, echo=True).choices[0].text == f"ab{ai.completions.create(**how).choices[0].text}"
    )


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompts_own_log_probabilities_are_those_with_which_left_to_right_writes_it(
    ai: openai.OpenAI, n: int
) -> None:
    how: dict[str, Any] = {"model": "small", "logprobs": 4, "n": n}
    written = ai.completions.create(
        **how, prompt="ab", max_tokens=9, seed=3, extra_body={"sampler": "left_to_right"}
    ).choices[0]
    assert written.finish_reason == "length"
    given = ai.completions.create(**how, prompt=f"ab{written.text}", max_tokens=0, echo=True)
    for choice in given.choices:
        assert (choice.text, choice.finish_reason) == (f"ab{written.text}", "length")
        assert choice.logprobs is not None
        assert written.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text
        assert choice.logprobs.text_offset == [*range(11)]
        assert choice.logprobs.token_logprobs[2:] == pytest.approx(written.logprobs.token_logprobs, rel=1e-4)  # type: ignore[index]
        for mine, theirs in zip(choice.logprobs.top_logprobs[2:], written.logprobs.top_logprobs or [], strict=True):  # type: ignore[index]
            assert mine == pytest.approx(theirs, rel=1e-4)
        assert all(value is not None for value in choice.logprobs.token_logprobs or [])
    assert len(given.choices) == n
    assert given.usage is not None
    assert given.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 11,
        "completion_tokens": 0,
        "total_tokens": 11,
    }


def test_a_prompts_log_probabilities_come_before_the_texts(ai: openai.OpenAI) -> None:
    how: dict[str, Any] = {"model": "small", "prompt": ["é!", "z"], "max_tokens": 3, "seed": 3, "logprobs": 0}
    plain, echoed = (ai.completions.create(**how, echo=echo).choices for echo in (False, True))
    for one, both, num in zip(plain, echoed, (3, 1), strict=True):
        assert one.logprobs is not None
        assert both.logprobs is not None
        assert (both.logprobs.tokens or [])[num:] == one.logprobs.tokens
        assert (both.logprobs.text_offset or [])[num:] == one.logprobs.text_offset
        assert (both.logprobs.token_logprobs or [])[num:] == one.logprobs.token_logprobs
        assert both.logprobs.top_logprobs == [None] * (num + 3)
    assert echoed[0].logprobs is not None
    assert (echoed[0].logprobs.text_offset or [])[:3] == [0, 0, 1]  # two tokens of one letter


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("presence_penalty", 0, 0.5),
        ("frequency_penalty", 0.0, -1),
        ("logit_bias", {}, {"50256": -100}),
        ("best_of", 1, 2),
    ],
)
def test_what_is_not_offered_is_refused_by_its_name(ai: openai.OpenAI, name: str, default: Any, other: Any) -> None:
    how: dict[str, Any] = {"model": "small", "prompt": "a", "max_tokens": 2}
    for value in (default, None):
        ai.completions.create(**how, **{name: value})
    with pytest.raises(openai.BadRequestError, match=f"{name} is not offered: leave it out"):
        ai.completions.create(**how, **{name: other})


def test_what_is_refused_says_why(ai: openai.OpenAI) -> None:
    def refused(**how: Any) -> str:
        with pytest.raises(openai.BadRequestError) as found:
            ai.completions.create(**{"model": "small", "prompt": "a", **how})
        return str(found.value)

    assert "less than or equal to 8" in refused(n=9)
    assert "n" in refused(stop=["a", "b", "c", "d", "e"])
    assert "ask for less" in refused(max_tokens=5000)
    assert "best_of" in refused(best_of=3)
    assert "it is for echo" in refused(max_tokens=0)
    assert "leave it out" in refused(max_tokens=0, echo=True, extra_body={"regex": "a+"})
    assert "window of 32 tokens" in refused(prompt="x" * 33, max_tokens=0, echo=True, logprobs=1)
    assert "json_schema" in refused(extra_body={"response_format": {"type": "json_object"}})
    with pytest.raises(openai.NotFoundError):
        ai.completions.create(model="another", prompt="a")


def test_no_chat_without_a_template(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        ai.chat.completions.create(model="small", messages=[{"role": "user", "content": "hi"}])
