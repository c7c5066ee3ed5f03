"""DNA base by base: the nats of each base, and the probabilities of A, C, G and T at its position."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from unmask.corpora.fasta import other_strand
from unmask.denoisers.network import evaluating
from unmask.errors import Public, UsageError
from unmask.evaluation import SCORE_DRAWS
from unmask.evaluation.explain import mean_position_nats
from unmask.evaluation.inspection import ask_masks
from unmask.sampling.canvas import Canvas
from unmask.sampling.query import ask_about, masked_share
from unmask.text.arguments import check_whole

if TYPE_CHECKING:
    from unmask.data.tokenizers import Tokenizer
    from unmask.model import Model

BASES = "ACGT"
AT_ONCE = 1 << 15  # tokens to read at a time
Estimator = Literal["exact", "conditional", "bound"]
SAID: dict[str, str] = {
    "exact": "each base given those before it in its window: their sum is -log p",
    "conditional": "each base given all others in its window: a pseudo-likelihood, no bound",
    "bound": "each base's share of the bound, an estimate: their sum is at least -log p",
}
_JOINED = "scores per base need a token a base, which this model's tokenizer has not: use a model of DNA"
_STRANGE = re.compile(f"[^{BASES}N]")


@dataclass(frozen=True)
class BaseScores:
    """nats_L: the nats of each base, NaN if it is unknown (N). p_L4: the probabilities of A, C, G and T at its
    position, if the estimator defines them; the rest is the probability of other tokens.

    >>> BaseScores("AN", torch.tensor([1.0, torch.nan]), None, "bound").num
    1
    """

    text: str
    nats_L: Tensor
    p_L4: Tensor | None
    estimator: Estimator

    @property
    def num(self) -> int:
        """The number of scored bases."""
        return int((~self.nats_L.isnan()).sum())

    @property
    def nats(self) -> float:
        return float(self.nats_L.nansum())


class Window(NamedTuple):
    """A range to read at once, and the part of it to score."""

    start: int
    stop: int
    low: int
    high: int


def score_bases(
    model: Model,
    text: str,
    *,
    before: str = "",
    after: str = "",
    estimator: Estimator | None = None,
    both_strands: bool = False,
    label: int | str | None = None,
    seed: int = 0,
    num_samples: int = SCORE_DRAWS,
    progress: Callable[[int, int], None] | None = None,
) -> BaseScores:
    """Score each base of a sequence; the sequences `before` and `after` are context and are not scored.

    estimator: exact, for an autoregressive model; conditional, for a masked one; bound, for any other. None: the first
    of these that the model supports. seed and num_samples: for the bound's draws. both_strands: average the scores of
    both strands, each read in its own direction. A sequence longer than the window is read in windows that overlap by
    half. progress: called with the number of bases read so far, and of all.

    >>> score_bases(model, "ACGTTGCA").nats_L  # doctest: +SKIP
    """
    check_whole(seed=seed, num_samples=num_samples)
    how = _estimator(model, estimator)
    text, before, after = (_checked(part) for part in (text, before, after))
    counter = _Counter(progress, known_bases(text) * (1 + both_strands))
    reader = _Reader(model, how, base_ids(model.tokenizer), model.class_of(label), seed, num_samples, counter)
    if both_strands and getattr(getattr(model.denoiser, "config", None), "equivariance", "none") != "none":
        raise UsageError("this model reads both strands by itself: leave out both_strands")
    scores = reader.read(before, text, after)
    if not both_strands:
        return scores
    other = reader.read(*(other_strand(part) for part in (after, text, before)))
    nats_L = (scores.nats_L + other.nats_L.flip(0)) / 2
    p_L4 = None if scores.p_L4 is None or other.p_L4 is None else (scores.p_L4 + other.p_L4.flip(0, 1)) / 2
    return replace(scores, nats_L=nats_L, p_L4=p_L4)


def base_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of A, C, G and T; the tokenizer must have one token for each.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> base_ids(load_tokenizer("dna"))
    [0, 1, 2, 3]
    """
    ids = [tokenizer.encode(base) for base in BASES]
    if any(len(one) != 1 for one in ids):
        raise UsageError(_JOINED)
    return [one[0] for one in ids]


def windows(length: int, size: int, first: int, last: int, *, both: bool) -> Iterator[Window]:
    """Windows over `length` tokens in steps of half a window, which score every position from `first` to `last` once.

    both: a position is scored in the window whose middle is nearest; otherwise in the first window that contains it.

    >>> [tuple(window) for window in windows(8, 4, 1, 8, both=True)]
    [(0, 4, 1, 3), (2, 6, 3, 5), (4, 8, 5, 8)]
    >>> [tuple(window) for window in windows(8, 4, 1, 8, both=False)]
    [(0, 4, 1, 4), (2, 6, 4, 6), (4, 8, 6, 8)]
    """
    step = max(1, size // 2)
    starts = [*range(0, max(0, length - size), step), max(0, length - size)]
    low = 0
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        end = start + size
        high = length if following is None else (following + end) // 2 if both else end
        if max(low, first) < min(high, last):
            yield Window(start, min(end, length), max(low, first), min(high, last))
        low = high


def known_bases(text: str) -> int:
    """The number of bases that are scored: all but N.

    >>> known_bases("ACN")
    2
    """
    return len(text) - text.upper().count("N")


@dataclass
class _Counter:
    """Tells how many bases are read."""

    progress: Callable[[int, int], None] | None
    total: int
    done: int = 0

    def add(self, bases: int) -> None:
        self.done += bases
        if self.progress is not None:
            self.progress(self.done, self.total)


class _Reader(NamedTuple):
    """A model and the options for querying it."""

    model: Model
    estimator: Estimator
    base_ids: list[int]
    label: int | None
    seed: int
    num_samples: int
    counter: _Counter

    def read(self, before: str, text: str, after: str) -> BaseScores:
        """Score one strand."""
        model, both = self.model, self.estimator == "conditional"
        whole = before + text + (after if both else "")  # causal: nothing after, so parts multiply to one law
        ids_L = torch.tensor(model.tokenizer.encode(whole), dtype=torch.long)
        if len(ids_L) != len(whole):
            raise UsageError(_JOINED)
        known_L = torch.isin(ids_L, torch.tensor(self.base_ids))
        first, last = len(before), len(before) + len(text)
        nats_L = torch.full((len(whole),), torch.nan, dtype=torch.float64)
        p_L4 = None if self.estimator == "bound" else torch.full((len(whole), 4), torch.nan, dtype=torch.float64)
        size = model.length - len(model.begin) - len(model.end) - (_ends(model) and both)
        if size < 1:
            raise UsageError("the model's window holds no base beside what frames a row")
        for number, window in enumerate(windows(len(whole), size, first, last, both=both)):
            at_K = known_L[window.low : window.high].nonzero().squeeze(1) + window.low
            if not len(at_K):
                continue
            row = self._row(ids_L[window.start : window.stop])
            in_row_K = at_K - window.start + len(model.begin)
            if self.estimator == "bound":
                nats_L[at_K] = self._shares(row, in_row_K, number)
                self.counter.add(len(at_K))
                continue
            log_p_KI = (self._next if self.estimator == "exact" else self._left_out)(row, in_row_K).cpu().double()
            nats_L[at_K] = -log_p_KI.gather(1, ids_L[at_K, None]).squeeze(1)
            assert p_L4 is not None
            p_L4[at_K] = log_p_KI[:, self.base_ids].exp()
        return BaseScores(text, nats_L[first:last], None if p_L4 is None else p_L4[first:last], self.estimator)

    def _row(self, ids_L: Tensor) -> Tensor:
        """The ids with the model's anchors and, for a model of whole texts, the end that it expects in a row."""
        model = self.model
        row = [*model.begin, *ids_L.tolist()]
        if _ends(model) and self.estimator == "conditional":
            full = model.length - len(model.end) - len(row)
            row += [model.tokenizer.eot_id] * (full if model.packing == "fill" else 1)
        return torch.tensor([*row, *model.end], device=model.device)

    def _labels(self, rows: int) -> Tensor | None:
        return None if self.label is None else torch.full((rows,), self.label, device=self.model.device)

    def _left_out(self, row_L: Tensor, at_K: Tensor) -> Tensor:
        """[K, I] log x_theta at each position, masked in a row of its own."""
        parts = []
        for at_R in torch.split(at_K.to(row_L.device), max(1, AT_ONCE // len(row_L))):
            masked_RL = torch.zeros(len(at_R), len(row_L), dtype=torch.bool, device=row_L.device)
            masked_RL[torch.arange(len(at_R)), at_R] = True
            z_RL = row_L.expand_as(masked_RL).masked_fill(masked_RL, self.model.tokenizer.mask_id)
            canvas = Canvas(z_RL, self.model.denoiser.mask_id, torch.zeros_like(z_RL[:, 0]))
            level_R = masked_share(canvas, z_RL).float()
            parts.append(ask_masks(self.model, z_RL, level_R, masked_RL, label_B=self._labels(len(at_R))))
            self.counter.add(len(at_R))
        return torch.cat(parts)

    def _next(self, row_L: Tensor, at_K: Tensor) -> Tensor:
        """[K, I] log p of each position given those before it."""
        wanted_1L = torch.zeros(1, len(row_L), dtype=torch.bool, device=row_L.device)
        wanted_1L[0, at_K] = True
        canvas = Canvas(row_L[None], -1, torch.zeros_like(row_L[:1]), label_B=self._labels(1))
        query = ask_about(canvas, canvas.tokens, wanted_1L, torch.zeros(1, device=row_L.device))
        assert query is not None
        predictor = self.model.objective.predictor(self.model.denoiser)
        with evaluating(self.model.denoiser):
            log_p_KI = torch.log_softmax(predictor(replace(query, writes=False)), dim=-1)
        self.counter.add(len(at_K))
        return log_p_KI

    def _shares(self, row_L: Tensor, at_K: Tensor, number: int) -> Tensor:
        """[K] the bound's nats of these positions, given all others in the row."""
        scored_1L = torch.zeros(1, len(row_L), dtype=torch.bool, device=row_L.device)
        scored_1L[0, at_K] = True
        nats_1L = mean_position_nats(
            self.model.objective,
            self.model.denoiser,
            row_L[None],
            None,
            scored_BL=scored_1L,
            seed=self.seed,
            first_row=number,
            num_samples=self.num_samples,
            estimator=None,
            label_B=self._labels(1),
        )
        return nats_1L[0, at_K]


def _ends(model: Model) -> bool:
    """Whether the model's rows are whole texts, which end."""
    return model.packing != "wrap" and model.tokenizer.ends_texts


def _estimator(model: Model, name: str | None) -> Estimator:
    """The requested estimator, if the model supports it."""
    process = model.process
    if process is None:
        own: tuple[Estimator, ...] = ("exact",)
    else:
        own = ("conditional", "bound") if process.name == "absorbing" else ("bound",)
    if name is None:
        return own[0]
    for known in own:
        if known == name:
            return known
    if name not in get_args(Estimator):
        raise UsageError(f"unknown estimator {name[:40]!r} of bases; known: {', '.join(get_args(Estimator))}")
    raise UsageError(
        "the estimator {name} is none of this model's: it has {own}", name=Public(name), own=Public(" and ".join(own))
    )


def _checked(text: str) -> str:
    text = text.upper()
    if strange := _STRANGE.search(text):
        raise UsageError(
            "{letter!r} at position {position} is no base: a sequence has A C G T, and N where none is known",
            letter=strange[0],
            position=Public(strange.start() + 1),
        )
    return text
