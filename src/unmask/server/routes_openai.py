"""OpenAI-compatible completions: a gap after the prompt, or between prompt and suffix."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unmask.constraints import Constraint
from unmask.data.tokenizers import Tokenizer
from unmask.errors import Public, UsageError
from unmask.samplers import Sampler, Step
from unmask.server.limits import MAX_TEXTS
from unmask.server.prompt_scores import Scored, prompt_scores
from unmask.server.requests import constraints_of, sampler_of, schema_of
from unmask.server.routes_native import spans
from unmask.server.schemas import Completion
from unmask.server.served_model import Served
from unmask.text.prompts import Part, check_spelling, encode_fixed, row_of_parts, spelled

Emit = Callable[[dict[str, Any]], None]
LEAST_LOG_PROB = -1e4  # JSON has no infinity


@dataclass
class _Choice:
    """A text in progress: which part is settled, and which was sent."""

    index: int
    prompt: str
    ids: list[int]  # ids of the prompt
    head: list[int]  # the begin token and those ids
    num: int  # tokens of the gap
    stops: list[str]
    tokenizer: Tokenizer
    sent: int = 0  # characters
    num_logprobs: int = 0  # tokens whose log-probabilities were sent
    spelled: int = 0  # characters of those tokens
    finish: str | None = None
    cut: bool = False  # whether a stop string cut it
    about: dict[int, dict[str, Any]] = field(default_factory=dict)  # position → log-probabilities

    def settled(self, row: list[int]) -> list[int]:
        """The gap's tokens up to the first mask or the end of the text."""
        gap = row[len(self.head) : len(self.head) + self.num]
        for i, id in enumerate(gap):
            if id in (self.tokenizer.mask_id, self.tokenizer.eot_id):
                return gap[:i]
        return gap

    def advance(self, row: list[int], *, last: bool) -> str:
        """The text that can be sent now and was not sent before."""
        ids = self.settled(row)
        text = spelled(self.tokenizer, self.head, ids, self.prompt)
        ended = len(ids) < self.num and row[len(self.head) + len(ids)] == self.tokenizer.eot_id
        if not last and not ended:
            text = text.rstrip("\ufffd")  # hold back an incomplete character
        cut = first_stop(text, self.stops, last=last or ended)
        if cut >= 0:
            text, self.finish, self.cut = text[:cut], "stop", True
        elif last or ended:
            self.finish = "stop" if ended else "length"
        else:  # hold back a possible beginning of a stop
            longest = max((len(stop) - 1 for stop in self.stops), default=0)
            text = text[: max(0, len(text) - longest)]
        new = text[self.sent :]
        self.sent = max(self.sent, len(text))
        return new

    def has_stop(self, row: list[int]) -> bool:
        """Whether the settled part contains the stop that will cut it: nothing after it is sent."""
        text = spelled(self.tokenizer, self.head, self.settled(row), self.prompt)
        return first_stop(text.rstrip("\ufffd"), self.stops, last=False) >= 0

    def sent_tokens(self, row: list[int]) -> list[int]:
        """The tokens of the text that was sent; if a stop cut it, the last token may extend beyond it."""
        ids = self.settled(row)
        if not self.stops or (self.finish is not None and not self.cut):  # nothing is held back
            return ids

        def sent(num: int) -> int:
            return len(spelled(self.tokenizer, self.head, ids[:num], self.prompt))

        num = self.num_logprobs
        while num < len(ids) and (sent(num) < self.sent if self.cut else sent(num + 1) <= self.sent):
            num += 1
        return ids[:num]

    def logprobs(self, row: list[int]) -> dict[str, Any]:
        """The log-probabilities of the tokens sent since the last call, each from the step that wrote it."""
        ids = self.sent_tokens(row)[self.num_logprobs :]
        names = [self.tokenizer.token_text(id) for id in ids]
        *offsets, self.spelled = itertools.accumulate(map(len, names), initial=self.spelled)
        first = len(self.head) + self.num_logprobs
        about = [self.about.get(first + i, {}) for i in range(len(ids))]
        self.num_logprobs += len(ids)
        return {
            "tokens": names,
            "token_logprobs": [one.get("log_prob") for one in about],
            "top_logprobs": [one.get("top") for one in about],
            "text_offset": [len(self.prompt) + offset for offset in offsets],
        }


def complete(served: Served, asked: Completion, emit: Emit | None = None) -> dict[str, Any]:
    """The completion; with emit, settled pieces are sent while it is written.

    >>> complete(served, Completion(prompt="Once", max_tokens=8))["choices"][0]["text"]  # doctest: +SKIP
    """
    tokenizer = served.tokenizer
    prompts = _prompts(asked, served)
    num, each = 16 if asked.max_tokens is None else asked.max_tokens, asked.n or 1
    _check(asked, len(prompts) * each)
    served.limits.check_length(num)
    constraint = _constraint(asked)
    if not num and constraint:
        raise UsageError("max_tokens 0 writes nothing that a constraint could hold: leave it out")
    tail = encode_fixed(asked.suffix or "", tokenizer, "suffix")
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    choices: list[_Choice] = []
    for prompt, ids in prompts:
        parts, head = [Part(prompt, ids, num), Part(asked.suffix or "", tail, 0)], served.begin + ids
        served.limits.check_length(len(head) + num + len(tail) + len(served.end))
        check_spelling(parts, row_of_parts(parts, tokenizer), tokenizer, constraint)
        choices += [_Choice(len(choices) + i, prompt, ids, head, num, stops, tokenizer) for i in range(each)]
    rows = [[*choice.head, *[tokenizer.mask_id] * num, *tail, *served.end] for choice in choices]
    envelope = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
    envelope["model"] = asked.model or "unmask"
    sampler = sampler_of(asked, served)
    stays = settles(sampler)
    streams = emit is not None and stays
    before = _of_prompts(served, asked, choices[::each], rows[::each]) if asked.echo else None

    def watch(step: Step) -> None:
        _note(choices, step, asked.logprobs, tokenizer)
        if not streams or emit is None:
            return
        tokens = step.tokens_BL.tolist()
        pieces = [_piece(choices[i], tokens[i], asked) for i in dict.fromkeys(step.row_N.tolist())]
        if new := [piece for piece in pieces if piece is not None]:
            emit(envelope | {"choices": new})

    finished = rows
    if num:
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        canvas = served.canvas(rows, constraint or None, may_end=not tail, seed=seed)
        enough = (lambda i, row: choices[i].has_stop(row)) if stops and stays else None
        watched = watch if emit is not None or asked.logprobs is not None else None
        runners_up = 0 if asked.logprobs is None else max(1, asked.logprobs)
        how: dict[str, Any] = {"guidance": asked.guidance, "runners_up": runners_up}
        finished = served.run(canvas, sampler, watch=watched, enough=enough, **how)
    last = []
    for choice, row in zip(choices, finished, strict=True):
        if choice.finish is None or emit is None:
            last.append(_whole(choice, row, asked, None if before is None else before[choice.index // each]))
    prompt_tokens = sum(len(ids) for _, ids in prompts) + len(tail) * len(prompts)
    written = sum(len(choice.sent_tokens(row)) for choice, row in zip(choices, finished, strict=True))
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}
    if emit is None:
        return envelope | {"choices": last, "usage": usage}
    if last:
        emit(envelope | {"choices": last})
    wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
    return envelope | {"choices": [], "usage": usage} if wants_usage else {}


def _prompts(asked: Completion, served: Served) -> list[tuple[str, list[int]]]:
    """Each prompt's text and ids, whichever was sent; the model's separator is appended to a text."""
    tokenizer = served.tokenizer
    prompts: Sequence[Any] = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
    prompts = [prompts] if isinstance(prompts[0], int) else prompts
    never = {tokenizer.mask_id, tokenizer.eot_id, *tokenizer.never_ids()}
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt += served.separator
            encoded.append((prompt, encode_fixed(prompt, tokenizer, "prompt")))
        elif any(id >= tokenizer.num_ids or id in never for id in prompt):
            raise UsageError(
                "the ids of a prompt lie below {num_ids}, without the mask and other specials",
                num_ids=Public(tokenizer.num_ids),
            )
        else:
            encoded.append((tokenizer.decode(prompt), prompt))
    return encoded


def _constraint(asked: Completion) -> list[Constraint]:
    constraints = constraints_of(asked) or []
    if asked.response_format is not None and asked.response_format.type != "text":
        if asked.response_format.json_schema is None:
            raise UsageError("response_format needs a json_schema with its schema: a model must be told which JSON")
        constraints.append(schema_of(asked.response_format.json_schema.schema_, over=asked.over))
    return constraints


def _of_prompts(
    served: Served, asked: Completion, choices: Sequence[_Choice], rows: list[list[int]]
) -> list[dict[str, Any]] | None:
    """The log-probabilities of each prompt's own tokens, if requested."""
    if asked.logprobs is None:
        return None
    scores = prompt_scores(served, rows, [len(choice.head) for choice in choices], asked.logprobs)
    return [_of_prompt(choice, score, asked.logprobs) for choice, score in zip(choices, scores, strict=True)]


def _of_prompt(choice: _Choice, scores: list[Scored | None], wanted: int) -> dict[str, Any]:
    tokenizer, ids = choice.tokenizer, choice.ids
    names = [tokenizer.token_text(id) for id in ids]
    places = spans(choice.prompt, tokenizer)
    if [place["token"] for place in places] == ids:
        offsets = [place["start"] for place in places]
    else:  # ids to which no text is encoded
        offsets = [*itertools.accumulate(map(len, names), initial=0)][:-1]
    about = [
        {} if score is None else _about_token(tokenizer, id, *score, wanted)
        for id, score in zip(ids, scores, strict=True)
    ]
    return {
        "tokens": names,
        "token_logprobs": [one.get("log_prob") for one in about],
        "top_logprobs": [one.get("top") for one in about],
        "text_offset": offsets,
    }


def first_stop(text: str, stops: list[str], *, last: bool) -> int:
    """The start of the first stop string; -1: there is none, or, if more text follows, an earlier one may still begin.

    >>> [first_stop(text, ["bcd", "c"], last=False) for text in ("abc", "abcd", "abce")]
    [-1, 1, 2]
    """
    first = min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
    begun = range(max(0, len(text) + 1 - max(map(len, stops), default=0)), first)
    return -1 if not last and any(stop.startswith(text[at:]) for at in begun for stop in stops) else first


def settles(sampler: Sampler) -> bool:
    """Whether written tokens are final, so that the beginning of a text can be sent before its end exists."""
    return sampler.final


def _check(asked: Completion, texts: int) -> None:
    if texts > MAX_TEXTS:
        raise UsageError("{most} texts at most: fewer prompts or a smaller n", most=Public(MAX_TEXTS))
    if asked.best_of not in (None, asked.n or 1):
        raise UsageError("best_of is not offered: leave it out and take n texts")
    if asked.echo and asked.stream:
        raise UsageError("echo is not offered with stream")
    if asked.max_tokens == 0 and not asked.echo:
        raise UsageError("max_tokens 0 writes nothing: it is for echo, which gives the prompt and its logprobs")


def _note(choices: list[_Choice], step: Step, wanted: int | None, tokenizer: Tokenizer) -> None:
    """Record the log-probabilities of a step's tokens: the network's own, before temperature, truncation and
    constraints."""
    if wanted is None:
        return
    others = step.others
    # Samplers that do not say which answer a token came from only report its probability in the distribution drawn
    # from.
    own_N = step.log_prob_N if others is None else others.prob_N.clamp(min=1e-38).log()
    triples = zip(step.row_N.tolist(), step.position_N.tolist(), step.token_N.tolist(), strict=True)
    for k, ((row, position, token), log_prob) in enumerate(zip(triples, own_N.tolist(), strict=True)):
        beside: Iterable[tuple[int, float]] = ()
        if others is not None:
            beside = zip(others.token_NK[k].tolist(), others.prob_NK[k].clamp(min=1e-38).log().tolist(), strict=True)
        choices[row].about[position] = _about_token(tokenizer, token, log_prob, beside, wanted)


def _about_token(
    tokenizer: Tokenizer, token: int, log_prob: float, others: Iterable[tuple[int, float]], wanted: int
) -> dict[str, Any]:
    """A token's log-probability, with those of the `wanted` most likely tokens and its own, from one distribution."""
    log_probs = {id: max(value, LEAST_LOG_PROB) for id, value in (*others, (token, log_prob))}
    best = sorted(log_probs, key=lambda id: log_probs[id], reverse=True)[:wanted]
    # Several ids may have one spelling: the likelier one is listed, but for the token itself always its own.
    top = {tokenizer.token_text(id): log_probs[id] for id in (*reversed(best), token)}
    return {"log_prob": log_probs[token], "top": top if wanted else None}


def _piece(choice: _Choice, row: list[int], asked: Completion) -> dict[str, Any] | None:
    """What is new in a choice after a step; None: nothing, or it was already finished."""
    if choice.finish is not None:
        return None
    text = choice.advance(row, last=False)
    if not text and choice.finish is None:
        return None
    logprobs = None if asked.logprobs is None else choice.logprobs(row)
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}


def _whole(choice: _Choice, row: list[int], asked: Completion, before: dict[str, Any] | None) -> dict[str, Any]:
    """Everything not sent yet. before: the log-probabilities of the prompt, which are repeated with it."""
    text = choice.advance(row, last=True)
    logprobs = None if asked.logprobs is None else choice.logprobs(row)
    if asked.echo:
        text = choice.prompt + text
    if before is not None and logprobs is not None:
        logprobs = {name: before[name] + after for name, after in logprobs.items()}
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}
