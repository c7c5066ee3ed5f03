"""What may be asked, field by field. Everything else is refused before any work begins."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from unmask.samplers import room
from unmask.server.limits import MAX_CONSTRAINTS, MAX_OPTIONS, MAX_PATTERN, MAX_STOPS, MAX_TEXTS, MAX_VALUES

MAX_TEXT = 200_000  # characters
T = TypeVar("T")
Text = Annotated[str, Field(max_length=MAX_TEXT)]
# What the schema says more than is checked here: the library's own refusals tell more than a pattern's.
Gaps = Annotated[
    str, Field(max_length=200_000), WithJsonSchema({"type": "string", "pattern": r"\[MASK(:[0-9]+(\.\.[0-9]+)?)?\]"})
]
SamplerName = Annotated[
    str, Field(max_length=40), WithJsonSchema({"type": "string", "enum": [*room.names()], "title": "Sampler"})
]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN)]
Choice = Annotated[str, Field(min_length=1, max_length=1000)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Scalar = Annotated[str, Field(max_length=200)] | bool | int | float
# Of a list with many faults the first is reported: a list of all of them would keep the event loop busy.
Span = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_VALUES, fail_fast=True)]
Several = Annotated[list[T], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
Lengths = Annotated[list[Annotated[int, Field(ge=1, le=1_000_000)]], Field(fail_fast=True)]


def _few(value: Any) -> Any:
    """Options are counted before they are looked at, for the same reason."""
    if isinstance(value, dict) and len(value) > MAX_OPTIONS:
        raise PydanticCustomError("too_long", f"there may be {MAX_OPTIONS} of them")
    return value


def _not_offered(value: Any) -> Any:
    """OpenAI's fields that mean nothing here are taken at their defaults."""
    if value:
        raise PydanticCustomError("not_offered", "is not offered: leave it out")
    return value


Penalty = Annotated[
    float | None,
    AfterValidator(_not_offered),
    WithJsonSchema({"anyOf": [{"type": "number", "enum": [0]}, {"type": "null"}]}),
]
NoBias = Annotated[
    dict[str, Any] | None,
    AfterValidator(_not_offered),
    WithJsonSchema({"anyOf": [{"type": "object", "maxProperties": 0}, {"type": "null"}]}),
]


def _a_prompt(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """The message names all that a prompt may be, rather than why it is not the first."""
    try:
        return read(value)
    except ValidationError:
        message = f"a text of at most {MAX_TEXT} characters, its token ids, or a list of at most {MAX_TEXTS} of either"
        raise PydanticCustomError("no_prompt", message) from None


Prompt = Annotated[Text | Several[Text] | Ids | Several[Ids], WrapValidator(_a_prompt)]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _example(**fields: Any) -> ConfigDict:
    """What /docs shows, and a test sends."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class Constrained(Request):
    """What the text, or each of its gaps, must be. Several must all hold."""

    regex: Pattern | None = Field(None, description="all of it matches this regular expression")
    json_schema: dict[str, Any] | None = Field(None, description="it is JSON that this schema allows")
    choices: Annotated[list[Choice], Field(min_length=1, max_length=100, fail_fast=True)] | Choice | None = Field(
        None, description="it is one of these; a text alone is the only one"
    )
    constraints: list[dict[str, Any]] | None = Field(
        None,
        max_length=MAX_CONSTRAINTS,
        fail_fast=True,
        description="any constraints by name with their options",
        examples=[[{"name": "words", "forbid": ["never"]}]],
    )
    over: Literal["gap", "text"] = Field("gap", description="asked of each gap, or of the whole text")


class Sampling(Constrained):
    """How it is written."""

    sampler: SamplerName | None = Field(None, description="its name; the model's own if none")
    steps: Annotated[int, Field(ge=1, le=4096)] | Literal["inf"] | None = Field(
        None, description="network calls at most; inf: one token a call"
    )
    temperature: float | None = Field(
        None, ge=0, le=100, description="of each token's draw; 0 takes the likeliest, the model's own if none"
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="draw among the likeliest tokens that hold this share; 1: among all"
    )
    top_k: int | None = Field(None, ge=0, le=1_000_000, description="draw among so many likeliest tokens; 0: among all")
    guidance: float | None = Field(None, ge=-10, le=100, description="follow what is given more closely")
    options: Annotated[dict[Annotated[str, Field(max_length=40)], Scalar], BeforeValidator(_few)] = Field(
        default_factory=dict,
        max_length=MAX_OPTIONS,
        description="any further option of the sampler",
        examples=[{"tokens": 2}],
    )


class Writing(Sampling):
    n: int = Field(1, ge=1, le=MAX_TEXTS, description="how many texts, each with draws of its own")
    seed: Seed = Field(0, description="same seed, same text")
    runners_up: int = Field(0, ge=0, le=10, description="so many other likely tokens beside each one written")
    score: bool = Field(False, description="tell each text's bound as well")


class Fill(Writing):
    """A text with gaps, or its tokens with null for a mask. [MASK] is one token, [MASK:5] five, [MASK:3..8] any."""

    model_config = _example(text="The [MASK:3] sat on the [MASK].", n=2, seed=1, steps="inf")

    text: Gaps | None = Field(
        None, description="with [MASK], [MASK:5] or [MASK:3..8] for each gap", examples=["The [MASK:3] sat."]
    )
    tokens: list[Annotated[int, Field(ge=0)] | None] | None = Field(
        None, max_length=MAX_VALUES, fail_fast=True, description="instead of a text: ids, with null for a mask"
    )


class Trace(Fill):
    """As fill; or, with neither text nor tokens, a text from its prompt and suffix."""

    model_config = _example(prompt="Once", length=12, seed=1, runners_up=3)

    prompt: Text = Field("", description="what the text begins with")
    suffix: Text = Field("", description="what it ends with")
    length: int | None = Field(None, ge=1, le=1_000_000, description="tokens, prompt and suffix included")


class EditSpan(Sampling):
    """A text and which words of it are written anew."""

    model_config = _example(text="The cat sat on the mat.", replace="cat", with_length=[1, 3], seed=1)

    text: Text = Field(description="the whole text", examples=["The cat sat on the mat."])
    replace: Annotated[str, Field(min_length=1, max_length=200_000)] = Field(
        description="the words of it that are written anew", examples=["cat"]
    )
    occurrence: int | None = Field(None, ge=1, le=200_000, description="which of them, where they stand several times")
    with_length: Annotated[int, Field(ge=1, le=1_000_000)] | Lengths | None = Field(
        None, description="tokens of the replacement: a number, or [least, most]"
    )
    n: int = Field(1, ge=1, le=MAX_TEXTS, description="how many texts come back, the best first")
    rank: Literal["text", "token"] = Field("text", description="by the bound of the whole text, or of a token")
    seed: Seed = Field(0, description="same seed, same texts")


class Score(Request):
    model_config = _example(texts=["The cat sat.", "Cat the sat."], num_samples=8)

    texts: list[Text] = Field(
        min_length=1,
        max_length=MAX_TEXTS,
        fail_fast=True,
        description="each is scored by itself",
        examples=[["The cat sat on the mat."]],
    )
    prompt: Text | None = Field(None, description="stands before each text and is given: neither noised nor scored")
    num_samples: int = Field(16, ge=1, le=256, description="draws of masks for each bound")
    seed: Seed = Field(0, description="of these draws")


class Fit(Constrained):
    """Can the constraint hold here? A text with gaps, or the length of a text from nothing."""

    model_config = _example(text="She is [MASK:2] years old.", regex="[0-9]+")

    text: Gaps | None = Field(None, description="with gaps", examples=["She is [MASK:2] years old."])
    length: int | None = Field(None, ge=1, le=1_000_000, description="tokens of a text from nothing")


class Tokenize(Request):
    model_config = _example(text="The cat sat.", spans=[[4, 7]])

    text: Text = Field(description="any text")
    spans: list[Span] = Field(
        default_factory=list,
        max_length=1000,
        fail_fast=True,
        description="[start, end] in characters, to be turned into gaps",
    )


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(strict=True, populate_by_name=True)

    schema_: dict[str, Any] = Field(alias="schema", description="the JSON schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_schema", "json_object"] = Field(description="json_object alone is refused")
    json_schema: JsonSchemaFormat | None = Field(None, description="which JSON")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = Field(False, description="tell the usage in a last piece")


class Completion(Sampling):
    """OpenAI's fields, and those of unmask's samplers and constraints."""

    model_config = _example(prompt="Once upon a time", max_tokens=12, seed=1, sampler="left_to_right", logprobs=2)

    model: Annotated[str, Field(max_length=200)] | None = Field(None, description="the served model's name, or none")
    prompt: Prompt = Field(
        "", description="a text or several, or their token ids; of ids none may be the mask's or another special one's"
    )
    suffix: Text | None = Field(None, description="what stands after the gap: then the gap between is filled")
    max_tokens: int | None = Field(
        16, ge=0, le=1_000_000, description="tokens of the gap; 0, with echo, writes nothing and scores the prompt"
    )
    n: int | None = Field(1, ge=1, le=MAX_TEXTS, description="texts for each prompt")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        None, description="the text ends before the first of these"
    )
    stream: bool | None = Field(
        False,
        description="send the text while it is written, from its beginning as far as no mask stands before it: the "
        "samplers block and left_to_right write from the left and so stream evenly, a random order settles late",
    )
    stream_options: StreamOptions | None = Field(None, description="of a stream")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=10,
        description="tell each token's log-probability and those of so many likeliest, all under the network's own "
        "law when it was written: before temperature, cuts and constraints; with echo also the prompt's, left to right",
    )
    echo: bool | None = Field(False, description="repeat the prompt before the text; not with stream")
    seed: Seed | None = Field(None, description="same seed, same text; drawn if none")
    best_of: int | None = Field(None, ge=1, le=MAX_TEXTS, description="not offered: the same as n, or none")
    user: Annotated[str, Field(max_length=1000)] | None = Field(None, description="not looked at")
    presence_penalty: Penalty = Field(None, description="not offered: 0 or none")
    frequency_penalty: Penalty = Field(None, description="not offered: 0 or none")
    logit_bias: NoBias = Field(None, description="not offered: empty or none")
    response_format: ResponseFormat | None = Field(None, description="a JSON schema that the text obeys, or text")


class Chat(BaseModel):
    model_config = ConfigDict(strict=True)

    messages: list[dict[str, Any]] = Field(max_length=1000, fail_fast=True, description="not looked at")
    model: Annotated[str, Field(max_length=200)] | None = Field(None, description="the served model's name, or none")


@cache
def field_names() -> frozenset[str]:
    """The names of our own fields, which a message may say."""
    names: set[str] = set()
    for model in globals().values():
        if isinstance(model, type) and issubclass(model, BaseModel):
            names |= {field.alias or name for name, field in model.model_fields.items()}
    return frozenset(names)
