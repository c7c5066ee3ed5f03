"""Editing: a span of a text is rewritten in several lengths, and the candidates are ranked by the bound of the whole
text.

All lengths are tried side by side in one batch. The bounds share one seed, so that all candidates get the same draws of
times and masks. They are upper bounds of -log p given the number of tokens; a smaller bound is evidence of a larger
likelihood, not proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from unmask.constraints import Constraint
from unmask.constraints.automaton import compile_constraints
from unmask.constraints.leading_space import LeadingSpace
from unmask.errors import Public, UsageError, did_you_mean
from unmask.rng import fold, row_keys
from unmask.samplers import Sampler, Step
from unmask.sampling.constrained import Impossible, constrained
from unmask.text.arguments import check_constraint, check_sampler, check_texts, check_whole
from unmask.text.prompts import (
    MAX_GAP,
    Part,
    check_spelling,
    filled_text,
    known_lengths,
    row_of_parts,
    spelled,
    split_gaps,
)

if TYPE_CHECKING:
    from unmask.evaluation.bound import Bound
    from unmask.model import Model

MAX_CANDIDATES = 256  # because all are written in one batch
NUM_SAMPLES = 32  # draws of times and masks per bound
Rank = Literal["text", "token"]


@dataclass(frozen=True)
class Edit:
    """A text with its span rewritten. nats: the bound of -log p of the whole text, including its end-of-text.

    >>> Edit(text="a cat", replacement="cat", length=3, nats=12.0, tokens=6).nats_per_token
    2.0
    """

    text: str
    replacement: str
    length: int  # of the replacement, in tokens
    nats: float
    tokens: int
    row: int = 0  # index among the rows written side by side, as a watcher saw them

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens


@dataclass(frozen=True)
class Way:
    """A candidate: the text with a gap of unknown length filled in one length. nats: the bound of -log p of the whole
    text."""

    text: str
    nats: float
    tokens: int
    row: int


@dataclass(frozen=True)
class Filled:
    """A text with its gaps filled.

    ways: all candidates if lengths were unknown, best first. row: see Edit. ids: those of the text, given and
    generated.

    >>> Filled("a cat", row=0).ways
    []
    """

    text: str
    row: int
    ways: list[Way] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


def find_span(text: str, span: str, occurrence: int | None = None) -> tuple[int, int]:
    """The position of the span in the text: it must occur once, or `occurrence` selects one, counted from 1.

    >>> find_span("a cat and a cat", "cat", occurrence=2)
    (12, 15)
    """
    if not span:
        raise UsageError("nothing to replace: give the words of the text that are to be written anew")
    starts = [i for i in range(len(text) - len(span) + 1) if text.startswith(span, i)]
    if not starts:
        raise UsageError("the text does not contain {span!r}: give a span of it, letter by letter", span=span[:40])
    if occurrence is None and len(starts) > 1:
        raise UsageError(
            "{span!r} occurs {times} times in the text: say which, occurrence 1 to {times}",
            span=span[:40],
            times=Public(len(starts)),
        )
    if occurrence is not None and not 1 <= occurrence <= len(starts):
        times = "once" if len(starts) == 1 else f"{len(starts)} times"
        raise UsageError(
            "{span!r} occurs {times} in the text: there is no occurrence {occurrence}",
            span=span[:40],
            times=Public(times),
            occurrence=occurrence,
        )
    start = starts[(occurrence or 1) - 1]
    return start, start + len(span)


def length_range(with_length: int | tuple[int, int] | None, own: int) -> range:
    """The lengths to try; None is the span's own.

    >>> list(length_range((3, 5), 7)), list(length_range(None, 7))
    ([3, 4, 5], [7])
    """
    low, high = (
        (own, own) if with_length is None else (with_length,) * 2 if isinstance(with_length, int) else with_length
    )
    if not 1 <= low <= high <= MAX_GAP:
        raise UsageError(
            "a replacement has from 1 to {most} tokens, the smaller number first; got {low}..{high}",
            most=Public(MAX_GAP),
            low=low,
            high=high,
        )
    return range(low, high + 1)


def edit(
    model: Model,
    text: str,
    replace: str,
    *,
    with_length: int | tuple[int, int] | None = None,
    num: int = 1,
    occurrence: int | None = None,
    rank: Rank = "text",
    sampler: Sampler | None = None,
    seed: int = 0,
    constraint: Constraint | Sequence[Constraint] | None = None,
    label: int | str | None = None,
    guidance: float | None = None,
    watch: Callable[[Step], None] | None = None,
    runners_up: int = 0,
) -> list[Edit]:
    """The text with a span of it rewritten, best candidate first; the rest is unchanged, character for character.

    This is `Model.edit`. with_length: tokens of the replacement, a number or (least, most); None: as many as the span
    has. Each length is written `num` times, and the `num` best distinct texts are returned. occurrence: which one, if
    the span occurs several times. Candidates are ranked by the bound of the whole text, or with rank="token" by the
    bound per token: by bounds, not by likelihoods.

    >>> model.edit("the cat sat", "cat", with_length=(2, 6), num=3)[0].text  # doctest: +SKIP
    """
    check_sampler(sampler)
    check_constraint(constraint)
    check_whole(num=num, occurrence=occurrence, seed=seed)
    tokenizer = model.tokenizer
    start, stop = find_span(text, replace, occurrence)
    # A token that contains its leading space cannot follow another space, so here the gap begins with the space.
    lends = constraint is None and text[:start].endswith(" ") and _may_lend(model, sampler, f" {replace}")
    first = start - 1 if lends else start
    lengths = length_range(with_length, len(tokenizer.encode(text[first:stop])))
    before, after = tokenizer.encode(text[:first]), tokenizer.encode(text[stop:])
    _check_candidates(model, num, lengths, rank, fixed=len(before) + len(after))
    plan = [(length, i) for length in lengths for i in range(num)]
    rows = [[*model.begin, *before, *[tokenizer.mask_id] * length, *after, *model.end] for length, _ in plan]
    # A candidate's draws depend only on its length and number, so other lengths do not change it.
    key_B = torch.stack([fold(row_keys(seed, torch.tensor(i)), length) for length, i in plan])
    required = LeadingSpace() if lends else constraint
    how: dict[str, Any] = {"label": label, "guidance": guidance, "watch": watch, "runners_up": runners_up}
    finished = write(model, rows, key_B, [0] * len(rows), sampler=sampler, constraint=required, **how)
    pieces: dict[str, tuple[str, int, int]] = {}  # whole text → replacement, its length, its row
    lo, number = len(model.begin) + len(before), -1
    for (length, _), row in zip(plan, finished, strict=True):
        if row is None:
            continue
        number += 1
        piece = spelled(tokenizer, before, row[lo : lo + length], text[:first])
        pieces.setdefault(text[:first] + piece + text[stop:], (piece[start - first :], length, number))
    bound = bounds(model, pieces, label)
    edits = [Edit(t, piece, n, bound[t].nats, bound[t].tokens, row) for t, (piece, n, row) in pieces.items()]
    return sorted(edits, key=lambda e: e.nats if rank == "text" else e.nats_per_token)[:num]


def _check_candidates(model: Model, num: int, lengths: range, rank: str, *, fixed: int) -> None:
    """Refuse too many candidates, an unknown rank, and texts beyond the window. fixed: tokens of the text that stay."""
    if num < 1 or num * len(lengths) > MAX_CANDIDATES:
        raise UsageError(
            "{num} of each of {lengths} lengths: give at least 1, and at most {most} in all",
            num=Public(num),
            lengths=Public(len(lengths)),
            most=Public(MAX_CANDIDATES),
        )
    if rank not in get_args(Rank):
        raise UsageError("unknown rank {rank!r}; {hint}", rank=rank, hint=Public(did_you_mean(rank, get_args(Rank))))
    needed = len(model.begin) + fixed + lengths[-1] + len(model.end) + 1
    if needed > model.length:
        raise UsageError(
            "the text takes {needed} tokens with a replacement of {longest} and its end, the model's window "
            "holds {window}: give a shorter text or replacement",
            needed=Public(needed),
            longest=Public(lengths[-1]),
            window=Public(model.length),
        )


def fill(
    model: Model,
    text: str | Sequence[str],
    *,
    sampler: Sampler | None = None,
    seed: int = 0,
    constraint: Constraint | Sequence[Constraint] | None = None,
    label: int | str | None = None,
    **how: Any,
) -> list[Filled]:
    """The result of `Model.fill`, with the bounds of all lengths that were tried.

    >>> fill(model, "for [MASK:4] in range([MASK:1..3]):")[0].ways[0].nats  # doctest: +SKIP
    """
    check_sampler(sampler)
    check_constraint(constraint)
    check_whole(seed=seed)
    texts = check_texts(text, "text")
    if not texts:
        raise UsageError("nothing to fill: give at least one text")
    several = [known_lengths(each, MAX_CANDIDATES) for each in texts]
    parts, keys = [], []
    for i, ways in enumerate(several):
        key = row_keys(seed, torch.tensor(i))
        parts += [split_gaps(way, model.tokenizer, exact=constraint is not None) for way in ways]
        keys += [key if len(ways) == 1 else fold(key, j) for j in range(len(ways))]
        if not any(part.gap for part in parts[-1]):
            raise UsageError("no gap in {text!r}: write [MASK] for one token, [MASK:5] for five", text=texts[i][:40])
    rows = _rows(model, parts, constraint)
    owner = [i for i, ways in enumerate(several) for _ in ways]
    options: dict[str, Any] = {"sampler": sampler, "constraint": constraint, "label": label}
    written = zip(owner, parts, write(model, rows, torch.stack(keys), owner, **options, **how), strict=True)
    fillings: list[list[Filled]] = [[] for _ in texts]
    for number, (i, each, row) in enumerate((i, each, row) for i, each, row in written if row is not None):
        ids = model.unframed(row)
        check_spelling(each, ids, model.tokenizer, constraint)
        fillings[i].append(Filled(filled_text(each, ids, model.tokenizer), number, ids=ids))
    ranked = [len(tried) > 1 for tried in several]
    bound = bounds(model, (w.text for ways, many in zip(fillings, ranked, strict=True) if many for w in ways), label)
    return [_best(ways, bound) if many else ways[0] for ways, many in zip(fillings, ranked, strict=True)]


def check_fit(model: Model, text: str, constraint: Constraint | Sequence[Constraint]) -> None:
    """Raise an error if the constraint cannot hold for any lengths of the gaps. The network is not called.

    >>> check_fit(model, "born [MASK:1..3]", unmask.constraints.Regex(pattern="[0-9]{4}"))  # doctest: +SKIP
    """
    check_constraint(constraint)
    parts = [split_gaps(way, model.tokenizer, exact=True) for way in known_lengths(text, MAX_CANDIDATES)]
    if not any(part.gap for part in parts[-1]):
        raise UsageError("the text has no gap: write [MASK] for one token, [MASK:5] for five")
    rows = _rows(model, parts, constraint)
    views = [_view(model, row, constraint) for row in rows]
    keys = row_keys(0, torch.arange(len(rows)))
    _possible(model, rows, views, keys, [0] * len(rows), None, constraint, enough=1)


def _rows(
    model: Model, parts: list[list[Part]], constraint: Constraint | Sequence[Constraint] | None
) -> list[list[int]]:
    rows = [row_of_parts(each, model.tokenizer) for each in parts]
    for each, row in zip(parts, rows, strict=True):
        check_spelling(each, row, model.tokenizer, constraint)
    return [[*model.begin, *row, *model.end] for row in rows]


def bounds(model: Model, texts: Iterable[str], label: int | str | None = None) -> dict[str, Bound]:
    """The bound of each text, with the same draws for all of them; duplicates are scored once.

    >>> bounds(model, ["a cat", "a dog", "a cat"])["a cat"].nats  # doctest: +SKIP
    """
    return {text: model.score(text, seed=0, num_samples=NUM_SAMPLES, label=label) for text in dict.fromkeys(texts)}


def _best(fillings: list[Filled], bound: dict[str, Bound]) -> Filled:
    """The text with the smallest bound."""
    ways = [Way(one.text, bound[one.text].nats, bound[one.text].tokens, one.row) for one in fillings]
    ways.sort(key=lambda way: way.nats)
    best = next(one for one in fillings if one.row == ways[0].row)
    return Filled(best.text, best.row, ways, best.ids)


def write(
    model: Model,
    rows: list[list[int]],
    key_B: Tensor,
    owner: list[int],
    *,
    sampler: Sampler | None,
    constraint: Constraint | Sequence[Constraint] | None,
    label: int | str | None = None,
    **how: Any,
) -> list[list[int] | None]:
    """Fill the masks of every row.

    Rows with the same owner are candidates for one text: those in which the constraint cannot hold are skipped and
    returned as None, as long as it can hold in another one.

    >>> write(model, rows, key_B, owner=[0, 0], sampler=None, constraint=None)  # doctest: +SKIP
    """
    keep, views = list(range(len(rows))), [(0, len(row)) for row in rows]
    if constraint is not None:
        views = [_view(model, row, constraint) for row in rows]
        if len(set(owner)) < len(rows):
            keep = _possible(model, rows, views, key_B, owner, sampler, constraint)
    visible = [rows[i][slice(*views[i])] for i in keep]
    framed = all(views[i] == (0, len(rows[i])) for i in keep)
    canvas = model.canvas(visible, constraint, may_end=False, key_B=key_B[keep], label=label, framed=framed)
    finished: list[list[int] | None] = [None] * len(rows)
    for i, part in zip(keep, model.run(canvas, sampler, **how), strict=True):
        (lo, hi), row = views[i], rows[i]
        finished[i] = [*row[:lo], *part, *row[hi:]]
    return finished


def _view(model: Model, row: list[int], constraint: Constraint | Sequence[Constraint]) -> tuple[int, int]:
    """The part of a row that the network reads.

    A constraint applies within one window: in a longer text, where only gaps are constrained, the one around all gaps,
    if they fit.
    """
    several = [constraint] if isinstance(constraint, Constraint) else list(constraint)
    gaps = [i for i, id in enumerate(row) if id == model.tokenizer.mask_id]
    around = model.length - (gaps[-1] + 1 - gaps[0])
    if len(row) <= model.length or around < 0 or any(c.over == "text" for c in several):
        return 0, len(row)
    lo = min(max(0, gaps[0] - around // 2), len(row) - model.length)
    return lo, lo + model.length


def _possible(
    model: Model,
    rows: list[list[int]],
    views: list[tuple[int, int]],
    key_B: Tensor,
    owner: list[int],
    sampler: Sampler | None,
    constraint: Constraint | Sequence[Constraint],
    enough: int | None = None,
) -> list[int]:
    """The rows in which the constraint can hold; raises the reason if an owner has none. enough: stop at this many."""
    keep: list[int] = []
    refused: dict[int, UsageError] = {}
    for i, row in enumerate(rows):
        visible = row[slice(*views[i])]
        framed = len(visible) == len(row)
        canvas = model.canvas([visible], constraint, may_end=False, key_B=key_B[i : i + 1], framed=framed)
        try:
            model.check_possible(canvas, sampler)
            keep.append(i)
            if len(keep) == enough:
                return keep
        except UsageError as e:
            # The way in which the fewest gaps are to blame tells most: that of a fixed length is among them. Of equals
            # the last, which has the longest gaps.
            if owner[i] not in refused or _blamed(e) <= _blamed(refused[owner[i]]):
                refused[owner[i]] = e
    for i in refused.keys() - {owner[i] for i in keep}:
        raise refused[i]
    return keep


def _blamed(error: UsageError) -> float:
    return error.spans if isinstance(error, Impossible) else math.inf


def _may_lend(model: Model, sampler: Sampler | None, span: str) -> bool:
    """Whether a gap can absorb the space before a span: a token can contain it, and the sampler supports
    constraints."""
    tokenizer = model.tokenizer
    first = tokenizer.decode(tokenizer.encode(span)[:1])
    if model.denoiser.causal or not (first.startswith(" ") and first.strip()):
        return False
    try:
        constrained(model.fit_sampler(sampler, 1))
        compile_constraints(LeadingSpace(), tokenizer, may_end=False)
    except UsageError:
        return False
    return True
