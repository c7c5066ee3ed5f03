"""A model for lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness): the likelihood of a
continuation given its context, the likelihood of a whole text, and generation up to a stop string. This file imports
nothing from the harness; `evaluation/harness/lm_eval_adapter.py` is the class that it sees.

log p of a continuation is exact for an autoregressive model, and for a diffusion model in a fixed order
(`evaluation/orders.py`). Otherwise it is minus the objective's bound, where the context is neither noised nor scored.
End-of-text is not scored: the harness asks for the text alone, whereas `Model.score` scores a document.

A diffusion model sees where a row ends, so its value is conditioned on the number of tokens. A text longer than the
window is scored window by window, each token once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from unmask.data.batch import Batch
from unmask.denoisers.network import evaluating
from unmask.errors import NonFiniteError, UsageError
from unmask.evaluation import SCORE_DRAWS
from unmask.evaluation.estimate import estimate_bound
from unmask.evaluation.gaps import seam
from unmask.evaluation.orders import check_order, follow_order
from unmask.evaluation.score import scored_positions
from unmask.rng import row_keys
from unmask.samplers import Sampler
from unmask.samplers import room as samplers
from unmask.samplers.confidence import Confidence
from unmask.sampling.canvas import Canvas
from unmask.sampling.factory import UnknownOption
from unmask.sampling.predictor import MAX_ANSWER, Predictor
from unmask.sampling.query import ask_about, lines_of
from unmask.text.arguments import check_whole
from unmask.text.prompts import spelled, until_end

if TYPE_CHECKING:
    from unmask.model import Model

DEFAULT_TOKENS = 256  # of a generation, if the task sets no limit
TASK_DRAWING = ("temperature", "top_k", "top_p")  # drawing options that a task may set
ORDERS = ("confidence", "margin", "entropy", "left_to_right")


class Row(NamedTuple):
    """One row for the network, with the model's anchors; ids before `first` are conditioned on, not scored."""

    ids: list[int]
    first: int


@dataclass
class Counts:
    """What a run had to truncate, to be reported with its numbers."""

    contexts_cut: int = 0  # contexts whose beginning did not fit in the window
    texts_in_windows: int = 0  # texts and continuations longer than the window
    generations_shortened: int = 0  # generations with fewer tokens than the task asks for, because of the window


class HarnessModel:
    """Answers the three request types of the harness; an answer does not depend on the batch or the order of requests.

    num_samples: draws of time and masks per bound. seed: drives them, together with the content of the request. order:
    the fixed order of an exact likelihood (confidence, margin, entropy, left_to_right), which takes one call per token.
    sampler and options: how texts are generated, as in `Model.make_sampler`; a task's temperature, top_k and top_p
    apply unless the options set them. separator: ends every context; None: the model's own.

    >>> ask = HarnessModel(unmask.load("stories"), num_samples=32)  # doctest: +SKIP
    >>> ask.loglikelihood([("The cat sat on the", " mat")])  # doctest: +SKIP
    [(-6.1, False)]
    """

    def __init__(
        self,
        model: Model,
        *,
        batch: int = 32,
        num_samples: int = SCORE_DRAWS,
        estimator: str | None = None,
        order: str | None = None,
        seed: int = 0,
        separator: str | None = None,
        sampler: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_whole(batch=batch, num_samples=num_samples, seed=seed)
        if batch < 1 or num_samples < 1:
            raise UsageError(f"batch_size and num_samples must be at least 1, got {batch} and {num_samples}")
        self.model, self.batch, self.num_samples, self.seed = model, batch, num_samples, seed
        self.separator = model.separator if separator is None else separator
        self.counts, self.sampler, self.options = Counts(), sampler, dict(options or {})
        self._make_sampler(self.options)  # a wrong name or option is refused before the first request
        predictor = model.objective.predictor(model.denoiser)
        self.reads_next = predictor.gives == "next"
        self.order = _fixed_order(order, reads_next=self.reads_next)
        form = model.objective.estimator(model.denoiser) if estimator is None else estimator
        if (self.order is not None or self.reads_next) and estimator not in (None, "exact"):
            raise UsageError(f"the likelihood is exact here: leave out estimator={estimator}")
        self.estimator = "order" if self.order is not None else form
        objective = model.objective.with_estimator(form)
        self.kind = "exact" if self.order is not None or self.reads_next else objective.kind
        if self.order is not None:
            check_order(self.order, predictor)
        # A bound implies no decoding order: most confident first, if the model can be read that way.
        process = predictor.process
        surest = Confidence() if process and (process.name, predictor.gives) in Confidence.accepts else None
        self.greedy_order = self.order or surest

    # --- the three questions ---

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """log p of each continuation given its context, and whether greedy decoding would write it.

        Greedy decoding takes the most likely token: from left to right in an autoregressive model, otherwise in the
        order `order` or most confident first. It is always False for a model without such an order.
        """
        rows, owner = [], []
        for i, (context, continuation) in enumerate(requests):
            for row in self._rows(*self._encoded(context, continuation)):
                rows.append(row)
                owner.append(i)
        log_p, greedy = [0.0] * len(requests), [True] * len(requests)
        for i, (nats, likeliest) in zip(owner, self._scored(rows, with_greedy=True), strict=True):
            log_p[i] -= nats
            greedy[i] = greedy[i] and likeliest
        return list(zip(log_p, greedy, strict=True))

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """log p of each whole text; a text longer than the window is split into several rows, each token
        scored once."""
        rows, owner = [], []
        for i, text in enumerate(texts):
            for row in self._rows(self._nothing_before(), self.model.tokenizer.encode(text), again=False):
                rows.append(row)
                owner.append(i)
        log_p = [0.0] * len(texts)
        for i, (nats, _) in zip(owner, self._scored(rows, with_greedy=False), strict=True):
            log_p[i] -= nats
        return log_p

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """What the sampler writes after each context: at most max_gen_toks tokens, cut before the first string of
        `until`.

        Greedy unless the task or this model's options say otherwise. A repeated request gets a new draw.
        """
        rows, gaps, how = [], [], []
        keys, seen = [], dict[tuple[str, str], int]()
        for context, wishes in requests:
            row, gap = self._open_row(context, most_tokens(wishes))
            drawing = self._drawing(wishes)
            content = (repr(row), repr(drawing))
            seen[content] = seen.get(content, -1) + 1
            rows.append(row)
            gaps.append(gap)
            how.append(tuple(sorted(drawing.items())))
            keys.append(_hashed(row.ids, row.first, seen[content]))
        texts = [""] * len(requests)
        for way in dict.fromkeys(how):
            sampler = self._make_sampler(dict(way) | self.options)
            same = sorted((i for i in range(len(rows)) if how[i] == way), key=lambda i: len(rows[i].ids))
            for lo in range(0, len(same), self.batch):
                some = same[lo : lo + self.batch]
                key_B = row_keys(self.seed, torch.tensor([keys[i] for i in some]))
                canvas = self.model.canvas([rows[i].ids for i in some], may_end=True, key_B=key_B)
                for i, ids in zip(some, self.model.run(canvas, sampler), strict=True):
                    context, wishes = requests[i]
                    written = until_end(ids[rows[i].first : rows[i].first + gaps[i]], self.model.tokenizer)
                    before = ids[len(self.model.begin) : rows[i].first]
                    text = spelled(self.model.tokenizer, before, written, context + self.separator)
                    texts[i] = cut_before(text, wishes.get("until"))
        return texts

    # --- what the numbers are ---

    def protocol(self) -> dict[str, Any]:
        """Everything that this model's numbers depend on."""
        drawn = self.kind != "exact"
        greedy = "left to right" if self.reads_next else repr(self.greedy_order) if self.greedy_order else "never True"
        return {
            "loglikelihood": self.kind,
            "estimator": self.estimator,
            **({"order": repr(self.order)} if self.order is not None else {}),
            **({"num_samples": self.num_samples, "draws_seed": self.seed} if drawn else {}),
            "is_greedy": greedy,
            "length_is_given": not self.reads_next,
            "window": self.model.length,
            "sampler": repr(self._make_sampler(self.options)),
            **vars(self.counts),
        }

    def sentence(self) -> str:
        """The protocol as a sentence.

        >>> print(HarnessModel(unmask.load("stories")).sentence())  # doctest: +SKIP
        """
        number = {
            "exact": "log-likelihoods are exact",
            "upper bound": "log-likelihoods are lower bounds of log p (perplexities are upper bounds)",
            "pseudo": "log-likelihoods are pseudo-likelihoods, no bound of log p",
        }[self.kind]
        how = f", in the order of {type(self.order).__name__}" if self.order is not None else ""
        how += f", {self.num_samples} draws each (estimator {self.estimator})" if self.kind != "exact" else ""
        how += "" if self.reads_next else ", given the number of tokens"
        cut = [f"{number} {name.replace('_', ' ')}" for name, number in vars(self.counts).items() if number]
        return f"{number}{how}" + (f"; {', '.join(cut)} (window of {self.model.length} tokens)" if cut else "")

    # --- rows ---

    def _nothing_before(self) -> list[int]:
        """The ids before a text without context: in a stream of texts, the end of the previous one."""
        return [self.model.tokenizer.eot_id] if self.model.packing == "wrap" and not self.model.begin else []

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of both: tokenized as one text and cut where the context ends, as the harness does; separately if a
        token crosses the boundary or the model has a separator."""
        encode = self.model.tokenizer.encode
        if not continuation:
            return [], []
        if self.separator or not context:
            return (encode(context + self.separator) or self._nothing_before()), encode(continuation)
        return seam(self.model.tokenizer, context, continuation)

    def _rows(self, before: list[int], scored: list[int], *, again: bool = True) -> Iterator[Row]:
        """Rows of the scored ids after the given ones, which are cut from the left but keep at least half of the
        window.

        Scored ids that do not fit continue in further rows, after the same given ids (again) or after none.
        """
        begin, end = self.model.begin, self.model.end
        room = self.model.length - len(begin) - len(end)
        given = _last(before, max(room - len(scored), room // 2))
        first = room - len(given)
        rest = first if again else room
        self.counts.contexts_cut += bool(scored) and len(given) < len(before)
        self.counts.texts_in_windows += len(scored) > first
        if scored:
            yield Row([*begin, *given, *scored[:first], *end], len(begin) + len(given))
        for lo in range(first, len(scored), rest):
            head = [*begin, *(given if again else [])]
            yield Row([*head, *scored[lo : lo + rest], *end], len(head))

    def _open_row(self, context: str, tokens: int) -> tuple[Row, int]:
        """A row of the context and masks, and the number of masks: at least half of the window if as many are
        wanted."""
        tok, model = self.model.tokenizer, self.model
        before = tok.encode(context + self.separator) or self._nothing_before()
        room = model.length - len(model.begin) - len(model.end)
        gap = min(tokens, max(room - len(before), (room + 1) // 2))
        given = _last(before, room - gap)
        self.counts.contexts_cut += len(given) < len(before)
        self.counts.generations_shortened += gap < tokens
        head = [*model.begin, *given]
        return Row([*head, *[tok.mask_id] * gap, *model.end], len(head)), gap

    # --- numbers ---

    def _scored(self, rows: list[Row], *, with_greedy: bool) -> list[tuple[float, bool]]:
        """-log p of each row's scored tokens, and whether greedy decoding would write them."""
        made: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        looks = with_greedy or self.order is not None or self.reads_next
        for some in self._batches(rows, looks=looks):
            batch = self._batch([rows[i] for i in some])
            with evaluating(self.model.denoiser), torch.no_grad():
                nats_B, likeliest_B = self._nats(batch, with_greedy=with_greedy)
            if bool(nats_B.isnan().any()):
                raise NonFiniteError("the model gives a number that is none: check its weights")
            for i, nats, likeliest in zip(some, nats_B.tolist(), likeliest_B.tolist(), strict=True):
                made[i] = (nats, likeliest)
        return made

    def _batches(self, rows: list[Row], *, looks: bool) -> Iterator[list[int]]:
        """Indices of rows to batch together: of similar length, and few enough for the outputs to fit in memory."""
        some: list[int] = []
        for i in sorted(range(len(rows)), key=lambda i: (-len(rows[i].ids), i)):
            lines = max(len(rows[k].ids) - rows[k].first for k in [*some, i]) * (len(some) + 1)
            if some and (len(some) == self.batch or (looks and lines * self.model.denoiser.num_ids > MAX_ANSWER)):
                yield some
                some = []
            some.append(i)
        if some:
            yield some

    def _batch(self, rows: list[Row]) -> Batch:
        """A batch of rows, each keyed by its content."""
        key_B = row_keys(self.seed, torch.tensor([_hashed(row.ids, row.first) for row in rows]))
        canvas = self.model.canvas([row.ids for row in rows], may_end=True, key_B=key_B)
        scored_BL = scored_positions(canvas, [row.first for row in rows], self.model.tokenizer.fixed_ids)
        ones_B = torch.ones(len(rows), device=canvas.tokens.device)  # no time is read: a bound draws its own
        return Batch(canvas.tokens, canvas.valid_BL, scored_BL, canvas.key_B, ones_B)

    def _nats(self, batch: Batch, *, with_greedy: bool) -> tuple[Tensor, Tensor]:
        model = self.model
        predictor = model.objective.predictor(model.denoiser)
        if self.reads_next:
            return _next_token_nats(predictor, batch)
        mask_id = model.denoiser.mask_id
        z_BL = batch.x_BL.masked_fill(batch.scored_BL, mask_id)
        canvas = Canvas(z_BL, mask_id, batch.key_B, batch.valid_BL, open_BL=batch.scored_BL)
        if self.order is not None:
            return follow_order(predictor, canvas, self.order, batch.x_BL)
        bound = estimate_bound(
            model.objective,
            model.denoiser,
            batch.x_BL,
            batch.valid_BL,
            scored_BL=batch.scored_BL,
            num_samples=self.num_samples,
            estimator=self.estimator,
            key_B=batch.key_B,
        )
        likeliest_B = torch.zeros(len(batch.x_BL), dtype=torch.bool)
        if with_greedy and self.greedy_order is not None:
            likeliest_B = follow_order(predictor, canvas, self.greedy_order, batch.x_BL, while_likeliest=True)[1]
        return bound.nats_B.double(), likeliest_B

    # --- sampling ---

    def _drawing(self, wishes: Mapping[str, Any]) -> dict[str, Any]:
        """The task's drawing options that the sampler supports."""
        greedy = not wishes.get("do_sample", float(wishes.get("temperature") or 0) > 0)
        wanted = {"temperature": 0.0} if greedy else {k: wishes[k] for k in TASK_DRAWING if wishes.get(k) is not None}
        wanted = {name: value for name, value in wanted.items() if name not in self.options}
        try:
            self._make_sampler(wanted | self.options)
        except UnknownOption:  # it has no drawing options
            return {}
        return wanted

    def _make_sampler(self, options: Mapping[str, Any]) -> Sampler:
        # The harness would read inf as a number of steps; here it means one token per call.
        told = {name: None if name == "steps" and value == math.inf else value for name, value in options.items()}
        return self.model.make_sampler(self.sampler, **told)


def _fixed_order(name: str | None, *, reads_next: bool) -> Sampler | None:
    if name is None or (reads_next and name == "left_to_right"):
        return None
    if name not in ORDERS:
        raise UsageError(
            f"order={name} is none of the orders that have one likelihood: give one of {', '.join(ORDERS)}"
        )
    if reads_next:
        raise UsageError(f"an autoregressive model reads from left to right: leave out order={name}")
    made: Sampler = samplers.get(name)()
    return made


def _next_token_nats(predictor: Predictor, batch: Batch) -> tuple[Tensor, Tensor]:
    """For an autoregressive model: one forward pass scores all positions."""
    canvas = Canvas(batch.x_BL, -1, batch.key_B, batch.valid_BL)
    nats_B = torch.zeros(len(batch.x_BL), dtype=torch.float64)
    likeliest_B = torch.ones(len(batch.x_BL), dtype=torch.bool)
    query = ask_about(canvas, batch.x_BL, batch.scored_BL, torch.zeros(len(batch.x_BL), device=batch.x_BL.device))
    if query is None:
        return nats_B, likeliest_B
    log_p_NI = predictor(replace(query, writes=False))
    row_N, position_N = lines_of(query)
    token_N = batch.x_BL[row_N, position_N]
    nats_B.index_add_(0, row_N.cpu(), -log_p_NI.gather(1, token_N[:, None]).squeeze(1).cpu().double())
    likeliest_B[row_N[log_p_NI.argmax(dim=-1) != token_N].cpu()] = False
    return nats_B, likeliest_B


def most_tokens(wishes: Mapping[str, Any]) -> int:
    """The maximum number of tokens that a task allows.

    >>> most_tokens({"max_gen_toks": 8}), most_tokens({})
    (8, 256)
    """
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    tokens = next((int(wishes[name]) for name in names if wishes.get(name) is not None), DEFAULT_TOKENS)
    if tokens < 1:
        raise UsageError(f"max_gen_toks must be at least 1, got {tokens}")
    return tokens


def cut_before(text: str, until: str | Sequence[str] | None) -> str:
    """The text up to the first of the stop strings.

    >>> cut_before("4. Then", [".", "T"])
    '4'
    """
    stops = [until] if isinstance(until, str) else list(until or ())
    return text[: min([text.find(stop) for stop in stops if stop and stop in text], default=len(text))]


def _last(ids: list[int], num: int) -> list[int]:
    return ids[max(0, len(ids) - num) :]


def _hashed(ids: Sequence[int], *numbers: int) -> int:
    return int.from_bytes(hashlib.sha256(repr((list(ids), numbers)).encode()).digest()[:8], "big") >> 1
