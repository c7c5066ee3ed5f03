"""Generation: texts from prompts, texts tilted by a score, refinement of finished texts.

These are methods of `Model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unmask.constraints import Constraint
from unmask.errors import Public, UsageError
from unmask.rng import row_keys
from unmask.samplers import Sampler, Step
from unmask.samplers.refine import Refine
from unmask.sampling.canvas import Canvas
from unmask.sampling.particles import Score
from unmask.sampling.particles import particles as run_particles
from unmask.text.arguments import check_constraint, check_sampler, check_texts, check_whole
from unmask.text.prompts import Part, check_spelling, encode_fixed, filled_text, row_of_parts, until_end

if TYPE_CHECKING:
    from unmask.model import Model

Watch = Callable[[Step], None]


def generate(
    model: Model,
    num: int = 1,
    length: int | None = None,
    prompt: str | Sequence[str] = "",
    suffix: str = "",
    *,
    sampler: Sampler | None = None,
    seed: int = 0,
    constraint: Constraint | Sequence[Constraint] | None = None,
    label: int | str | None = None,
    guidance: float | None = None,
    only: Sequence[int] | None = None,
    separator: str | None = None,
    continuation_only: bool = False,
    watch: Watch | None = None,
    runners_up: int = 0,
) -> list[str]:
    """Texts of at most `length` tokens, prompt and suffix included; `num` for each prompt. This is `Model.generate`.

    length: None: the typical length of the texts that the model was trained on, otherwise its window. End-of-text ends
    a text. A length beyond the model's window is written window by window. constraint: always holds, for what is
    written after the prompt or, with over="text", for the whole text. label: the class of the texts, as a number or a
    word (`Model.labels`), for a model trained with classes. guidance: values > 0 make the text follow prompt, suffix
    and label more closely than the model does by itself, at two calls per step. only: write only the texts with these
    numbers; each is the same as among all the others. separator: ends every prompt; None: the model's own, from the
    rows that it was trained on. Prompt and suffix stay unchanged, character for character; continuation_only omits them
    and the separator from the result.

    >>> model.generate(2, 128, ["def ", "class "], seed=1)  # doctest: +SKIP
    """
    how: dict[str, Any] = {"seed": seed, "label": label, "only": only, "separator": separator}
    canvas, parts = model.prompted(num, length, prompt, suffix, constraint, **how)
    finished = model.run(canvas, sampler, guidance=guidance, watch=watch, runners_up=runners_up)
    return _texts(model, finished, parts, constraint, continuation_only=continuation_only)


def particles(
    model: Model,
    score: Score,
    num: int = 1,
    length: int | None = None,
    prompt: str | Sequence[str] = "",
    suffix: str = "",
    *,
    crowd: int = 16,
    threshold: float = 0.5,
    greedy: bool = False,
    sampler: Sampler | None = None,
    seed: int = 0,
    label: int | str | None = None,
) -> list[str]:
    """Samples from the model's distribution tilted by a score of partly masked rows of ids, p(x) exp(score(x)) / Z.

    Each text is drawn among `crowd` particles; see `unmask.particles`. Constraints and guidance are not supported, and
    the text is limited to one window.

    >>> model.particles(lambda z: (z == 101).sum(dim=1), num=4, prompt="th", crowd=32)  # doctest: +SKIP
    """
    canvas, parts = model.prompted(num, length, prompt, suffix, seed=seed, label=label)
    if canvas.tokens.shape[1] > model.length:
        raise UsageError(
            "particles work within one window: ask for at most {length} tokens", length=Public(model.length)
        )
    check_sampler(sampler)
    check_whole(crowd=crowd)
    sampler = sampler or model.sampler
    options: dict[str, Any] = {"num": crowd, "threshold": threshold, "greedy": greedy, "objective": model.objective}
    tokens_BL = run_particles(model.denoiser, canvas, sampler, score, **options).tokens
    return _texts(model, canvas.rows_of(tokens_BL), parts)


def refine(
    model: Model,
    text: str | Sequence[str],
    *,
    share: float = 0.1,
    rounds: int = 2,
    sampler: Sampler | None = None,
    seed: int = 0,
    watch: Watch | None = None,
    runners_up: int = 0,
) -> list[str]:
    """Rewrite the least confident `share` of a finished text's tokens, in each of `rounds` rounds.

    sampler: by default the model's own. The number of tokens does not change; the result follows no known distribution.

    >>> model.refine("the cat sta on the mat", share=0.2)  # doctest: +SKIP
    """
    process = model.process
    if process is not None and (process.name != "absorbing" or model.objective.predictor(model.denoiser).gives != "x0"):
        raise UsageError("refining hides tokens by masks and asks for them anew, which this model was not trained for")
    check_sampler(sampler)
    texts = check_texts(text, "text")
    rows = [model.begin + encode_fixed(one, model.tokenizer, "text") + model.end for one in texts]
    for one, row in zip(texts, rows, strict=True):
        if not model.unframed(row):
            raise UsageError("nothing to refine: give a text of at least one token")
        if len(row) > model.length:
            raise UsageError(
                "{text!r} has {tokens} tokens, more than the model's window of {length}",
                text=one[:40],
                tokens=Public(len(row)),
                length=Public(model.length),
            )
    if not rows:
        raise UsageError("nothing to refine: give at least one text")
    canvas = model.canvas(rows, may_end=False, seed=seed)
    refiner = Refine(inner=sampler or model.sampler, share=share, rounds=rounds)
    fixed = torch.tensor(model.tokenizer.fixed_ids, device=canvas.tokens.device, dtype=torch.long)
    canvas = dataclasses.replace(canvas, draft_BL=canvas.given_BL & ~torch.isin(canvas.tokens, fixed))
    finished = model.run(canvas, refiner, watch=watch, runners_up=runners_up)
    return [model.tokenizer.decode(model.unframed(row)) for row in finished]


def prompted(
    model: Model,
    num: int,
    length: int | None,
    prompt: str | Sequence[str],
    suffix: str,
    constraint: Constraint | Sequence[Constraint] | None = None,
    *,
    seed: int = 0,
    label: int | str | None = None,
    only: Sequence[int] | None = None,
    separator: str | None = None,
) -> tuple[Canvas, list[list[Part]]]:
    """`num` rows for each prompt, or `only` some of them, and the parts of each: the prompt with its gap, and the
    suffix.

    >>> canvas, parts = model.prompted(4, 64, ["def ", "class "])  # doctest: +SKIP
    """
    check_whole(num=num, length=length, seed=seed)
    check_constraint(constraint)
    prompts = check_texts(prompt, "prompt")
    if num < 1 or not prompts:
        raise UsageError(
            "num must be at least 1 and there must be a prompt list of at least one, got num={num}", num=Public(num)
        )
    numbers = range(num * len(prompts)) if only is None else only
    if not numbers or min(numbers) < 0 or max(numbers) >= num * len(prompts):
        raise UsageError(
            "only: at least one number from 0 to {most} must be given", most=Public(num * len(prompts) - 1)
        )
    length = (model.typical_length or model.length) if length is None else length
    ending = Part(suffix, encode_fixed(suffix, model.tokenizer, "suffix"), 0)
    begun: dict[int, list[Part]] = {}
    for which in dict.fromkeys(number // num for number in numbers):
        head = prompts[which] + (model.separator if separator is None else separator)
        ids = encode_fixed(head, model.tokenizer, "prompt")
        gap = length - len(model.begin) - len(ids) - len(ending.ids) - len(model.end)
        if gap < 1:
            raise UsageError(
                "the prompt takes {prompt} tokens and the suffix {suffix}, which leaves nothing of length {length}"
                ": give a larger length or a shorter prompt",
                prompt=Public(len(model.begin) + len(ids)),
                suffix=Public(len(ending.ids)),
                length=Public(length),
            )
        begun[which] = [Part(head, ids, gap), ending]
    parts = [begun[number // num] for number in numbers]
    for each in begun.values():
        check_spelling(each, row_of_parts(each, model.tokenizer), model.tokenizer, constraint)
    rows = [model.begin + row_of_parts(each, model.tokenizer) + model.end for each in parts]
    key_B = row_keys(seed, torch.tensor(numbers))
    # A suffix must stay part of the text, so nothing before it may end the text.
    canvas = model.canvas(rows, constraint, may_end=not ending.ids, key_B=key_B, label=label)
    return canvas, parts


def _texts(
    model: Model,
    rows: list[list[int]],
    parts: list[list[Part]],
    constraint: Constraint | Sequence[Constraint] | None = None,
    *,
    continuation_only: bool = False,
) -> list[str]:
    """The text of each row: the prompt, what was written up to its end-of-text, and the suffix."""
    texts = []
    for row, (head, ending) in zip(rows, parts, strict=True):
        start, ids = len(head.ids), model.unframed(row)
        gap = until_end(ids[start : start + head.gap], model.tokenizer)
        ids, written = [*ids[:start], *gap, *ending.ids], [head._replace(gap=len(gap)), ending]
        check_spelling(written, ids, model.tokenizer, constraint)
        text = filled_text(written, ids, model.tokenizer)
        texts.append(text[len(head.text) : len(text) - len(ending.text)] if continuation_only else text)
    return texts
