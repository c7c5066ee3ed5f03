"""The routes for gaps, bounds and steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from unmask.data.tokenizers import Tokenizer
from unmask.errors import Public, UsageError
from unmask.model import Model
from unmask.samplers import Step
from unmask.sampling.canvas import Canvas
from unmask.sampling.constrained import constrained
from unmask.sampling.observe import step_as_dict
from unmask.server import schemas
from unmask.server.errors import public_message
from unmask.server.limits import ConstraintTooCostly
from unmask.server.requests import check_gaps, constraints_of, sampler_of
from unmask.server.served_model import Served
from unmask.text.editing import MAX_CANDIDATES, NUM_SAMPLES, Filled, bounds, check_fit
from unmask.text.editing import fill as fill_gaps

Emit = Callable[[str, dict[str, Any]], None]


class _Observer:
    """Observes the sampling: records the probability of each token, and emits the steps."""

    def __init__(self, served: Served, emit: Emit | None) -> None:
        self.served, self.emit, self.began = served, emit, time.perf_counter()
        self.tokenizer = served.tokenizer
        self.number = 0
        self.by_place: dict[tuple[int, int], dict[str, Any]] = {}  # (row, position) → information on its token
        served.on_canvas = self.canvas

    def canvas(self, canvas: Canvas) -> None:
        if self.emit is not None:
            ends = canvas.length_B.tolist()
            closing = len(self.served.end)
            rows = [row[: end - closing] for row, end in zip(canvas.tokens.tolist(), ends, strict=True)]
            self.emit("start", {"mask": self.tokenizer.mask_id, "rows": [self.as_tokens(row) for row in rows]})

    def as_tokens(self, row: list[int]) -> list[dict[str, Any]]:
        """Tokens for display; a mask has no text."""
        mask = self.tokenizer.mask_id
        return [{"token": i, "text": None if i == mask else self.tokenizer.token_text(i)} for i in row]

    def step(self, step: Step) -> None:
        self.number += 1
        line = step_as_dict(step, self.number, self.tokenizer)
        for k, place in enumerate(zip(line["row"], line["position"], strict=True)):
            about = {"log_prob": line["log_prob"][k]}
            if "others" in line:
                about |= {"model_prob": line["model_prob"][k], "others": line["others"][k]}
            self.by_place[place] = about
        if self.emit is not None:
            self.emit("step", line | self.cost(self.served.call.steps_reported))  # the engine may be ahead by now

    def cost(self, calls: int) -> dict[str, Any]:
        return {"calls": calls, "seconds": round(time.perf_counter() - self.began, 4)}


def fill(served: Served, asked: schemas.Fill, emit: Emit | None = None) -> dict[str, Any]:
    """Fill every gap of a text, n times.

    >>> fill(served, schemas.Fill(text="The [MASK:3] sat."))["texts"][0]["text"]  # doctest: +SKIP
    """
    if (asked.text is None) == (asked.tokens is None):
        raise UsageError("give either text or tokens")
    observer, how = _Observer(served, emit), _how(served, asked)
    if asked.text is not None:
        several, length = check_gaps(asked.text, served, served.limits, exact=how["constraint"] is not None)
        _check_cost(served, asked, how, several * asked.n, length, scored=asked.score or several > 1)
        filled = fill_gaps(served, [asked.text] * asked.n, watch=observer.step, **how)
    else:
        assert asked.tokens is not None
        masked = _token_rows(served, asked)
        _check_cost(served, asked, how, len(masked), len(masked[0]), scored=asked.score)
        canvas = served.canvas(masked, how.pop("constraint"), may_end=False, seed=how.pop("seed"))
        rows = served.run(canvas, how.pop("sampler"), watch=observer.step, **how)
        filled = [Filled(served.tokenizer.decode(served.unframed(row)), i) for i, row in enumerate(rows)]
    return _written(served, asked, observer, filled)


def trace(served: Served, asked: schemas.Trace, emit: Emit) -> dict[str, Any]:
    """Like fill, or from a prompt; every step is sent as it happens."""
    if asked.text is not None or asked.tokens is not None:
        if asked.prompt or asked.suffix or asked.length is not None:
            raise UsageError("prompt, suffix and length are for a text from nothing: leave out text and tokens")
        return fill(served, asked, emit)
    served.limits.check_length(asked.length or 1)
    observer, how = _Observer(served, emit), _how(served, asked)
    length = served.typical_length or served.length if asked.length is None else asked.length
    _check_cost(served, asked, how, asked.n, length, scored=asked.score)
    texts = served.generate(asked.n, asked.length, asked.prompt, asked.suffix, watch=observer.step, **how)
    return _written(served, asked, observer, [Filled(text, i) for i, text in enumerate(texts)])


def edit(served: Served, asked: schemas.EditSpan) -> dict[str, Any]:
    """Rewrite a span in several lengths, best candidate first."""
    asked_length = asked.with_length
    if isinstance(asked_length, list) and len(asked_length) != 2:
        raise UsageError("with_length is a number, or [least, most]")
    lengths = (asked_length[0], asked_length[1]) if isinstance(asked_length, list) else asked_length
    served.limits.check_length(max(lengths) if isinstance(lengths, tuple) else lengths or 1)
    began = time.perf_counter()
    sampler = sampler_of(asked, served)
    ids = len(served.tokenizer.encode(asked.text))
    least, most = lengths if isinstance(lengths, tuple) else (lengths or ids,) * 2
    rows, length = min(MAX_CANDIDATES, asked.n * (most + 1 - least)), min(ids + most, served.length)
    _check_cost(served, asked, {"sampler": sampler}, rows, length, scored=True)
    constraint = constraints_of(asked)
    try:
        written = served.edit(
            asked.text,
            asked.replace,
            with_length=lengths,
            num=asked.n,
            occurrence=asked.occurrence,
            rank=asked.rank,
            sampler=sampler,
            seed=asked.seed,
            constraint=constraint,
            guidance=asked.guidance,
        )
    except ConstraintTooCostly:
        if constraint is not None:
            raise
        # The library's own constraint that a replacement begins with its space, which the client did not ask for.
        raise UsageError(
            "these replacements take more than the {budget} that the server allows: ask for fewer or shorter ones",
            budget=Public(served.limits.budget),
        ) from None
    edits = [_finite(vars(e) | {"nats_per_token": e.nats_per_token}) for e in written]
    return {"edits": edits, "calls": served.call.steps, "seconds": round(time.perf_counter() - began, 4)}


def score(served: Served, asked: schemas.Score) -> dict[str, Any]:
    """The bound of each text, and the contribution of each token."""
    scores = []
    rows = [served.tokenizer.encode(text) for text in asked.texts]
    prompt_tokens = 0 if asked.prompt is None else len(served.tokenizer.encode(asked.prompt + served.separator))
    for ids in rows:
        served.limits.check_length(prompt_tokens + len(ids))
    served.limits.check(rows=len(rows), length=prompt_tokens + max(map(len, rows)), calls=asked.num_samples)
    how: dict[str, Any] = {"prompts": asked.prompt, "seed": asked.seed, "num_samples": asked.num_samples}
    for text, ids in zip(asked.texts, rows, strict=True):
        bound = served.score(text, **how)
        nats = [float(x) for scoring in served.scorings for x in scoring.nats_L]
        tokens = spans(text, served.tokenizer)
        head = len(served.begin) + prompt_tokens
        # Positions not masked in a single draw are unknown.
        shares = nats[head:] if len(nats) == head + len(ids) + 1 + len(served.end) else []
        for token, share in zip(tokens, shares, strict=False):
            token["nats"] = round(share, 6) if math.isfinite(share) else None
        scores.append(_finite(bound.summary()) | {"by_token": tokens})
    return {"texts": scores, "calls": served.call.steps}


def fit(served: Served, asked: schemas.Fit) -> dict[str, Any]:
    """Whether the constraint can hold in these gaps, and which samplers support constraints.

    The network is not called.
    """
    if (asked.text is None) == (asked.length is None):
        raise UsageError("give either a text with gaps or the length of a gap")
    constraint = constraints_of(asked)
    if constraint is None:
        raise UsageError("give a constraint: regex, json_schema, choices or constraints")
    if asked.text is not None:
        several, length = check_gaps(asked.text, served, served.limits, exact=True)
        served.limits.check(rows=several, length=length, calls=1)
    served.limits.check_length(asked.length or 1)
    samplers = _samplers_for_constraints(served.engine.model)
    try:
        if asked.text is not None:
            check_fit(served, asked.text, constraint)
        else:
            row = served.begin + [served.tokenizer.mask_id] * (asked.length or 1) + served.end
            canvas = served.canvas([row], constraint, may_end=True).to("cpu")  # the text may end before its length
            served.check_possible(canvas)
    except (UsageError, ConstraintTooCostly) as e:
        return {"fits": False, "reason": public_message(e), "samplers": samplers}
    return {"fits": True, "reason": None, "samplers": samplers}


_constrainable: WeakKeyDictionary[Model, list[str]] = WeakKeyDictionary()  # inspecting every sampler is slow


def _samplers_for_constraints(model: Model) -> list[str]:
    """The names of the samplers that support constraints."""
    if model not in _constrainable:
        names = []
        for name in model.sampler_names():
            with suppress(UsageError):
                constrained(sampler_of(schemas.Sampling.model_validate({"sampler": name}), model))
                names.append(name)
        _constrainable[model] = names
    return _constrainable[model]


def tokenize(served: Served, asked: schemas.Tokenize) -> dict[str, Any]:
    """The tokens with their positions in the text; with spans, the text may contain gaps."""
    tokenizer = served.tokenizer
    served.limits.check_length(len(tokenizer.encode(asked.text)))
    answer: dict[str, Any] = {"tokens": spans(asked.text, tokenizer)}
    text, end, parts, gaps = asked.text, 0, [], []
    # A vocabulary may join a leading space to a word; texts that cannot contain a space, as in DNA, need no check.
    leads = bool(asked.spans) and " " in text and len(tokenizer.encode(" a")) == 1
    for span in sorted(asked.spans):
        if len(span) != 2 or not end <= span[0] < span[1] <= len(text):
            raise UsageError("a span is [start, end] inside the text, and spans do not overlap")
        words = text[span[0] : span[1]]
        with_space = leads and span[0] > 0 and text[span[0] - 1] == " "
        num = len(tokenizer.encode(f" {words}" if with_space else words))
        gaps.append(num)
        parts += [text[end : span[0]], f"[MASK:{num}]"]
        end = span[1]
    return answer | {"gaps": gaps, "masked": "".join([*parts, text[end:]])}


def spans(text: str, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Each token with its start and end in the text, in characters.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> spans("é", load_tokenizer("bytes"))[1]
    {'token': 169, 'text': '<0xA9>', 'start': 0, 'end': 1}
    """
    ids, ends = tokenizer.encode_spans([text])[0]
    data = text.encode("utf-8")
    # The number of complete and of started characters at each byte.
    begun, complete = [0], [0]
    for k, byte in enumerate(data):
        begun.append(begun[-1] + ((byte & 0xC0) != 0x80))
        whole = k + 1 == len(data) or (data[k + 1] & 0xC0) != 0x80
        complete.append(begun[-1] if whole else begun[-1] - 1)
    tokens, start = [], 0
    for id, end in zip(ids.tolist(), ends.tolist(), strict=True):
        tokens.append({"token": id, "text": tokenizer.token_text(id), "start": complete[start], "end": begun[end]})
        start = end
    return tokens


def _how(served: Served, asked: schemas.Writing) -> dict[str, Any]:
    return {
        "sampler": sampler_of(asked, served),
        "seed": asked.seed,
        "constraint": constraints_of(asked),
        "guidance": asked.guidance,
        "runners_up": asked.runners_up,
    }


def _check_cost(
    served: Served, asked: schemas.Sampling, how: dict[str, Any], rows: int, length: int, *, scored: bool
) -> None:
    """Refuse what exceeds the budget before a row is created, including the cost of scoring the output."""
    calls = served.calls(how["sampler"], length, asked.guidance) + (NUM_SAMPLES if scored else 0)
    served.limits.check(rows=rows, length=length, calls=calls)


def _token_rows(served: Served, asked: schemas.Fill) -> list[list[int]]:
    tokenizer, tokens = served.tokenizer, asked.tokens or []
    served.limits.check_length(len(tokens))
    if any(token is not None and (token >= tokenizer.num_ids or token == tokenizer.mask_id) for token in tokens):
        raise UsageError("tokens are ids below {num_ids}, with null for a mask", num_ids=Public(tokenizer.num_ids))
    if None not in tokens:
        raise UsageError("nothing to fill: give null for each masked token")
    row = [tokenizer.mask_id if token is None else token for token in tokens]
    return [served.begin + row + served.end] * asked.n


def _written(served: Served, asked: schemas.Fill, observer: _Observer, filled: list[Filled]) -> dict[str, Any]:
    """The finished texts, token by token, with their bounds if requested.

    With gaps of unknown length there are more rows than texts: each text names its own row, and the ranking of all
    lengths.
    """
    begin, texts = len(served.begin), []
    for done in filled:
        row = served.unframed(served.rows[done.row])
        known = [observer.by_place.get((done.row, begin + k), {}) for k in range(len(row))]
        one: dict[str, Any] = {"text": done.text, "row": done.row}
        # If a constrained text exceeds the window, the network read only a part, which is not a row of the text.
        if asked.text is None or row == done.ids:
            one["tokens"] = [token | more for token, more in zip(observer.as_tokens(row), known, strict=True)]
        if done.ways:
            one["ranked"] = [_finite(vars(way)) for way in done.ways]
        texts.append(one)
    result = {"texts": texts, "seed": asked.seed} | observer.cost(served.call.steps)
    if asked.score:
        bound = bounds(served, (one["text"] for one in texts))
        for one in texts:
            one["bound"] = _finite(bound[one["text"]].summary())
    return result


def _finite(data: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN or infinity."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}
