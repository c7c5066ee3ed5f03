"""Completions as OpenAI's clients know them: a gap behind the prompt, or between prompt and suffix."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unmask.editing import _spelled as spelled
from unmask.errors import UsageError
from unmask.prompts import encode_fixed
from unmask.samplers import Sampler, Step
from unmask.samplers._adaptive import AdaptiveSampler
from unmask.samplers._planned import PlannedSampler
from unmask.samplers._windowed import WindowedSampler
from unmask.server.asking import constraints_of, sampler_of, schema_of
from unmask.server.limits import MAX_TEXTS
from unmask.server.schemas import Completion
from unmask.server.served import Served
from unmask.tokens import Tokenizer

Emit = Callable[[dict[str, Any]], None]


@dataclass
class _Choice:
    """One text on its way: what of it is settled, what was sent."""

    index: int
    prompt: str
    head: list[int]
    num: int  # tokens of the gap
    stops: list[str]
    tokenizer: Tokenizer
    sent: int = 0  # characters
    told: int = 0  # tokens whose log-probabilities were sent
    spelled: int = 0  # characters of those tokens
    finish: str | None = None
    cut: bool = False  # by one of the stops
    about: dict[int, dict[str, Any]] = field(default_factory=dict)  # position → log-probabilities

    def settled(self, row: list[int]) -> list[int]:
        """The gap's tokens up to the first mask or the end of the text."""
        gap = row[len(self.head) : len(self.head) + self.num]
        for i, id in enumerate(gap):
            if id in (self.tokenizer.mask_id, self.tokenizer.eot_id):
                return gap[:i]
        return gap

    def advance(self, row: list[int], *, last: bool) -> str:
        """What can be shown now and was not shown before."""
        ids = self.settled(row)
        text = spelled(self.tokenizer, self.head, ids, self.prompt)
        ended = len(ids) < self.num and row[len(self.head) + len(ids)] == self.tokenizer.eot_id
        if not last and not ended:
            text = text.rstrip("\ufffd")  # half a character waits
        cut = first_stop(text, self.stops, last=last or ended)
        if cut >= 0:
            text, self.finish, self.cut = text[:cut], "stop", True
        elif last or ended:
            self.finish = "stop" if ended else "length"
        else:  # what may become the beginning of a stop waits
            held = max((len(stop) - 1 for stop in self.stops), default=0)
            text = text[: max(0, len(text) - held)]
        new = text[self.sent :]
        self.sent = max(self.sent, len(text))
        return new

    def has_stop(self, row: list[int]) -> bool:
        """Whether what is settled holds the stop that will cut it: nothing that follows is shown."""
        text = spelled(self.tokenizer, self.head, self.settled(row), self.prompt)
        return first_stop(text.rstrip("\ufffd"), self.stops, last=False) >= 0

    def shown(self, row: list[int]) -> list[int]:
        """The tokens of what was sent; of what a stop cut, the last may reach beyond it."""
        ids = self.settled(row)
        if not self.stops or (self.finish is not None and not self.cut):  # nothing is held back
            return ids

        def sent(num: int) -> int:
            return len(spelled(self.tokenizer, self.head, ids[:num], self.prompt))

        num = self.told
        while num < len(ids) and (sent(num) < self.sent if self.cut else sent(num + 1) <= self.sent):
            num += 1
        return ids[:num]

    def logprobs(self, row: list[int]) -> dict[str, Any]:
        """Of the tokens sent since the last look. What is told of a token is its chance when it was written."""
        ids = self.shown(row)[self.told :]
        names = [self.tokenizer.token_text(id) for id in ids]
        *offsets, self.spelled = itertools.accumulate(map(len, names), initial=self.spelled)
        first = len(self.head) + self.told
        about = [self.about.get(first + i, {}) for i in range(len(ids))]
        self.told += len(ids)
        return {
            "tokens": names,
            "token_logprobs": [one.get("log_prob") for one in about],
            "top_logprobs": [one.get("top") for one in about],
            "text_offset": [len(self.prompt) + offset for offset in offsets],
        }


def complete(served: Served, asked: Completion, emit: Emit | None = None) -> dict[str, Any]:
    """The completion; with emit its pieces, as far as they are settled, while it is written.

    >>> complete(served, Completion(prompt="Once", max_tokens=8))["choices"][0]["text"]  # doctest: +SKIP
    """
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    num, each = asked.max_tokens or 16, asked.n or 1
    _check(asked, len(prompts) * each)
    served.limits.check_length(num)
    constraint = constraints_of(asked) or []
    if asked.response_format is not None and asked.response_format.type != "text":
        if asked.response_format.json_schema is None:
            raise UsageError("response_format needs a json_schema with its schema: a model must be told which JSON")
        constraint.append(schema_of(asked.response_format.json_schema.schema_, over=asked.over))
    tokenizer = served.tokenizer
    tail = encode_fixed(asked.suffix or "", tokenizer, "suffix")
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    choices: list[_Choice] = []
    rows: list[list[int]] = []
    for prompt in prompts:
        head = served.begin + encode_fixed(prompt, tokenizer, "prompt")
        served.limits.check_length(len(head) + num + len(tail))
        for _ in range(each):
            choices.append(_Choice(len(choices), prompt, head, num, stops, tokenizer))
            rows.append([*head, *[tokenizer.mask_id] * num, *tail])
    seed = secrets.randbits(62) if asked.seed is None else asked.seed
    sampler = sampler_of(asked, served)
    canvas = served.canvas(rows, constraint or None, may_end=not tail, seed=seed)
    envelope = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
    envelope["model"] = asked.model or "unmask"
    stays = settles(sampler)
    streams = emit is not None and stays

    def watch(step: Step) -> None:
        _note(choices, step, asked.logprobs, tokenizer)
        if not streams or emit is None:
            return
        tokens = step.tokens_BL.tolist()
        pieces = [_piece(choices[i], tokens[i], asked) for i in dict.fromkeys(step.row_N.tolist())]
        if found := [piece for piece in pieces if piece is not None]:
            emit(envelope | {"choices": found})

    enough = (lambda i, row: choices[i].has_stop(row)) if stops and stays else None
    watched = watch if emit is not None or asked.logprobs is not None else None
    how: dict[str, Any] = {"guidance": asked.guidance, "runners_up": asked.logprobs or 0}
    finished = served.run(canvas, sampler, watch=watched, enough=enough, **how)
    last = []
    for choice, row in zip(choices, finished, strict=True):
        if choice.finish is None or emit is None:
            last.append(_whole(choice, row, asked, tokenizer, first=emit is None))
    given = sum(len(tokenizer.encode(prompt)) for prompt in prompts) + len(tail) * len(prompts)
    written = sum(len(choice.shown(row)) for choice, row in zip(choices, finished, strict=True))
    usage = {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}
    if emit is None:
        return envelope | {"choices": last, "usage": usage}
    if last:
        emit(envelope | {"choices": last})
    wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
    return envelope | {"choices": [], "usage": usage} if wants_usage else {}


def first_stop(text: str, stops: list[str], *, last: bool) -> int:
    """Where the first of the stops begins; -1: nowhere, or, as more is to come, one may begin before it.

    >>> [first_stop(text, ["bcd", "c"], last=False) for text in ("abc", "abcd", "abce")]
    [-1, 1, 2]
    """
    first = min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
    begun = range(max(0, len(text) + 1 - max(map(len, stops), default=0)), first)
    return -1 if not last and any(stop.startswith(text[at:]) for at in begun for stop in stops) else first


def settles(sampler: Sampler) -> bool:
    """Whether a token once written stays, so that the beginning of a text can be sent before its end is there."""
    if isinstance(sampler, WindowedSampler):
        return settles(sampler.inner)
    return isinstance(sampler, PlannedSampler | AdaptiveSampler)


def _check(asked: Completion, texts: int) -> None:
    if texts > MAX_TEXTS:
        raise UsageError(f"{MAX_TEXTS} texts at most: fewer prompts or a smaller n")
    if asked.best_of not in (None, asked.n or 1):
        raise UsageError("best_of is not offered: leave it out and take n texts")
    if asked.echo and asked.stream:
        raise UsageError("echo is not offered with stream")


def _note(choices: list[_Choice], step: Step, wanted: int | None, tokenizer: Tokenizer) -> None:
    if wanted is None:
        return
    others = step.others
    triples = zip(step.row_N.tolist(), step.position_N.tolist(), step.token_N.tolist(), strict=True)
    for k, ((row, position, token), log_prob) in enumerate(zip(triples, step.log_prob_N.tolist(), strict=True)):
        top = {tokenizer.token_text(token): max(log_prob, -1e4)}
        if others is not None:
            pairs = zip(others.token_NK[k].tolist(), others.prob_NK[k].clamp(min=1e-38).log().tolist(), strict=True)
            top |= {tokenizer.token_text(id): log_p for id, log_p in pairs}
        choices[row].about[position] = {"log_prob": max(log_prob, -1e4), "top": top if wanted else None}


def _piece(choice: _Choice, row: list[int], asked: Completion) -> dict[str, Any] | None:
    """What of a choice is new in a step; None: nothing, or it has been finished before."""
    if choice.finish is not None:
        return None
    text = choice.advance(row, last=False)
    if not text and choice.finish is None:
        return None
    logprobs = None if asked.logprobs is None else choice.logprobs(row)
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}


def _whole(choice: _Choice, row: list[int], asked: Completion, tokenizer: Tokenizer, *, first: bool) -> dict[str, Any]:
    text = choice.advance(row, last=True)
    if first and asked.echo:
        text = choice.prompt + text
    logprobs = None if asked.logprobs is None else choice.logprobs(row)
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}
