"""What is answered, field by field, for openapi.json and /docs. The routes make plain data; tests hold it to this."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Interval = list[float] | None


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    message: str = Field(description="one sentence; it repeats nothing of the request")
    type: Literal["invalid_request_error", "server_error"]
    param: None = Field(description="not told")
    code: str = Field(description="the kind of error, for programs", examples=["bad_request"])


class Error(Answer):
    """Every answer with a status from 400 on."""

    error: ErrorDetail


# --- OpenAI's ---------------------------------------------------------------------------------------------------------


class ModelCard(Answer):
    id: str = Field(description="its name in requests")
    object: Literal["model"]
    created: int = Field(description="always 0")
    owned_by: str
    window: int = Field(description="tokens that the network sees at once")


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Logprobs(Answer):
    """Lists side by side, one entry a token; all under the network's own law when the token was written."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null: nothing stood before the token, or it is not known")
    top_logprobs: list[dict[str, float] | None] = Field(description="the likeliest tokens' and the token's own")
    text_offset: list[int] = Field(description="where the token begins in prompt and text, in characters")


class Choice(Answer):
    index: int = Field(description="prompt by prompt, n of each")
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None = Field(
        description="stop: the text ended or met a stop; length: the gap is full; null: more follows (stream)"
    )


class Usage(Answer):
    prompt_tokens: int = Field(description="the suffix's included")
    completion_tokens: int
    total_tokens: int


class CompletionAnswer(Answer):
    """Also a piece of a stream, whose choices are what is new; its usage comes last, where it is asked for."""

    id: str
    object: Literal["text_completion"]
    created: int = Field(description="seconds since 1970")
    model: str
    choices: list[Choice]
    usage: Usage | None = None


# --- our own ----------------------------------------------------------------------------------------------------------


class Other(Answer):
    token: int
    text: str
    model_prob: float


class Token(Answer):
    token: int
    text: str | None = Field(description="null: a mask")
    log_prob: float | None = Field(None, description="under the law that it was drawn from; absent: it was given")
    model_prob: float | None = Field(None, description="under the network's own law; with runners_up")
    others: list[Other] | None = Field(None, description="the runners-up, likeliest first; with runners_up")


class BoundAnswer(Answer):
    """An upper bound of -log p, exact for an autoregressive model. ci95: 95% intervals over draws of masks."""

    ppl: float | None = Field(None, description="exp(nats_per_token); absent where that is no perplexity")
    ppl_ci95: Interval = None
    pseudo_ppl: float | None = Field(None, description="the same of a model whose number is no bound of -log p")
    pseudo_ppl_ci95: Interval = None
    nats_per_token: float | None
    nats_per_token_ci95: Interval
    nats_per_token_ci95_given_texts: Interval = Field(description="over times and masks alone, the text as it is")
    bits_per_byte: float | None
    bits_per_byte_ci95: Interval
    nats: float | None = Field(description="of the whole text, its end-of-text included")
    tokens: int
    bytes: int | None
    sequences: int


class WayAnswer(Answer):
    """A text in one of the lengths that were tried."""

    text: str
    nats: float | None = Field(description="the bound of the whole text: the smallest is the best")
    tokens: int
    row: int


class FilledText(Answer):
    text: str
    row: int = Field(description="which of the rows that were written side by side")
    tokens: list[Token] | None = Field(None, description="absent where a text was written window by window")
    ranked: list[WayAnswer] | None = Field(
        None, description="of gaps of unknown length: all that were tried, best first"
    )
    bound: BoundAnswer | None = Field(None, description="with score")


class FillAnswer(Answer):
    texts: list[FilledText]
    seed: int
    calls: int = Field(description="engine steps that the request took part in")
    seconds: float


class EditAnswer(Answer):
    text: str
    replacement: str
    length: int = Field(description="tokens of the replacement")
    nats: float | None = Field(description="the bound of the whole text")
    tokens: int = Field(description="of the whole text")
    row: int
    nats_per_token: float | None


class EditsAnswer(Answer):
    edits: list[EditAnswer] = Field(description="the best first")
    calls: int
    seconds: float


class TokenSpan(Answer):
    token: int
    text: str
    start: int = Field(description="in characters")
    end: int


class TokenShare(TokenSpan):
    nats: float | None = Field(None, description="its share of the bound; absent for a text beyond the window")


class TextScore(BoundAnswer):
    by_token: list[TokenShare]


class ScoreAnswer(Answer):
    texts: list[TextScore]
    calls: int


class FitAnswer(Answer):
    fits: bool
    reason: str | None = Field(description="why not")
    samplers: list[str] = Field(description="those that can hold a constraint")


class TokenizeAnswer(Answer):
    tokens: list[TokenSpan]
    gaps: list[int] = Field(description="tokens of each span")
    masked: str = Field(description="the text with its spans as gaps")


class TraceStart(Answer):
    """The first event, `start`: the canvas."""

    mask: int = Field(description="the mask's id")
    rows: list[list[Token]]


class TraceStep(Answer):
    """An event `step`: what one network call wrote. The lists stand side by side, one entry a token."""

    step: int
    row: list[int]
    position: list[int] = Field(description="from the row's first token, begin token included")
    token: list[int]
    text: list[str]
    log_prob: list[float | None] = Field(description="under the law that it was drawn from")
    model_prob: list[float] | None = Field(None, description="under the network's own law; with runners_up")
    others: list[list[Other]] | None = Field(None, description="the runners-up; with runners_up")
    remasked: list[list[int]] = Field(description="[row, position] of what was masked again")
    calls: int
    seconds: float


class Health(Answer):
    status: Literal["ok"]


class InfoLimits(Answer):
    budget: int = Field(description="rows x tokens x network calls of a request")
    length: int = Field(description="tokens of a text")
    texts: int = Field(description="texts of a request")


class Info(Answer):
    model: str
    parameters: int
    window: int = Field(description="tokens that the network sees at once")
    vocabulary: int
    mask: int = Field(description="the mask's id")
    end: int = Field(description="the id of end-of-text")
    begin: int = Field(description="tokens before every row's own")
    autoregressive: bool
    samplers: list[str]
    limits: InfoLimits
    version: str
