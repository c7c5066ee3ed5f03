"""The bound of a set of sequences, stored as sums and counts, never as means, so that parts add up exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unmask.errors import NonFiniteError, UsageError
from unmask.evaluation.measurement import SIGN, by_text, ratio_error, student_975
from unmask.objectives.base import Kind


@dataclass(frozen=True)
class TokenNats:
    """One token of a scored text, and its contribution to the bound in nats, averaged over the draws."""

    text: str
    nats: float

    def __repr__(self) -> str:
        return f"{self.text!r}: {self.nats:.3f}"


@dataclass(frozen=True, repr=False)
class Bound:
    """Upper bounds of -log p in nats: one row per sequence, one column per independent draw of times and masks.

    >>> import torch
    >>> b = Bound(draws_BS=torch.tensor([[2.0, 4.0]]), tokens_B=torch.tensor([3]))
    >>> b.nats_B.tolist(), round(b.nats_per_token, 3)
    ([3.0], 1.0)
    """

    draws_BS: Tensor
    tokens_B: Tensor
    num_bytes: int | None = None  # of the text of the tokens, if known
    kind: Kind = "upper bound"  # or exact: a likelihood without draws; or pseudo: no bound
    of_B: Tensor | None = field(default=None, compare=False)  # text numbers of rows; None: each row is a text
    explained: Callable[[], list[list[TokenNats]]] | None = field(default=None, compare=False)  # see `explain`

    def __repr__(self) -> str:
        sign, rows = SIGN[self.kind], len(self.tokens_B)
        number = (
            f"{self.nats_per_token:.4f} nats per token, {self.ppl_name} {sign} {self.ppl:.4g}"
            if self.tokens
            else "none"
        )
        return (
            f"Bound({sign} {number}; {self.tokens:,} tokens in {rows:,} rows, {self.draws_BS.shape[1]} estimates each)"
        )

    @property
    def exact(self) -> bool:
        return self.kind == "exact"

    def explain(self) -> list[list[TokenNats]]:
        """Split the nats by token: for each text its scored tokens, whose nats add up to `nats_B`.

        The draws of the bound are repeated and averaged per token; a token that was never masked has 0. Only bounds of
        `Model.score` can be explained.

        >>> model.score("import os").explain()[0][:2]  # doctest: +SKIP
        ['i': 3.110, 'm': 0.412]
        """
        if self.explained is None:
            raise UsageError("this bound does not know its texts: Model.score gives one that explains itself")
        return self.explained()

    @property
    def nats_B(self) -> Tensor:
        """The estimate for each sequence: the mean over its draws."""
        return self.draws_BS.mean(dim=1)

    @property
    def nats(self) -> float:
        return float(self.nats_B.double().sum())

    @property
    def tokens(self) -> int:
        return int(self.tokens_B.sum())

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def ppl(self) -> float:
        return _exp(self.nats_per_token)

    @property
    def ppl_name(self) -> str:
        """The name for `ppl`: for a pseudo-likelihood it is not a perplexity."""
        return "pseudo-perplexity" if self.kind == "pseudo" else "perplexity"

    @property
    def ppl_key(self) -> str:
        """The same as a key among others."""
        return "pseudo_ppl" if self.kind == "pseudo" else "ppl"

    @property
    def bits_per_byte(self) -> float | None:
        return None if not self.num_bytes else self.nats / math.log(2) / self.num_bytes

    @property
    def standard_error(self) -> float:
        """Standard error of nats per token.

        With many sequences, they are a sample of texts, and the noise of each one's draws is included; rows of one text
        (`of_B`) count as one. With one sequence, the text is given and only the draws of times and masks vary.
        """
        if len(self.tokens_B) == 1:
            return self.draws_error
        return ratio_error(by_text(self.nats_B, self.of_B), by_text(self.tokens_B, self.of_B))

    @property
    def num_texts(self) -> int:
        """The number of texts that an interval over texts is of."""
        return len(self.tokens_B) if self.of_B is None else int(self.of_B.max()) + 1

    @property
    def draws_error(self) -> float:
        """The standard error of nats per token given the texts: only times and masks vary.

        NaN after a single draw; 0 if nothing is drawn.

        >>> Bound(draws_BS=torch.tensor([[1.0, 3.0], [2.0, 2.0]]), tokens_B=torch.tensor([1, 1])).draws_error
        0.5
        """
        columns = self.draws_BS.shape[1]
        if self.exact:
            return 0.0
        variance = float(self.draws_BS.double().var(dim=1).sum()) / columns if columns > 1 else math.nan
        return math.sqrt(variance) / self.tokens

    @property
    def draws_ci95(self) -> tuple[float, float]:
        """A 95% interval of nats per token given the texts, over times and masks alone."""
        return self.nats_per_token - self.draws_half, self.nats_per_token + self.draws_half

    @property
    def draws_half(self) -> float:
        """Half-width of `draws_ci95`; NaN after a single draw."""
        rows, columns = self.draws_BS.shape
        return student_975(rows * (columns - 1)) * self.draws_error

    @property
    def ci95(self) -> tuple[float, float]:
        """A 95% interval of nats per token over texts and times."""
        rows, columns = self.num_texts, self.draws_BS.shape[1]
        half = student_975(max(rows, 1 if rows > 1 else columns) - 1) * self.standard_error
        return self.nats_per_token - half, self.nats_per_token + half

    def check_finite(self, whose: str, texts: str) -> None:
        """Refuse a value that is no number, which broken weights give. whose: the model's; texts: what was measured.

        >>> Bound(draws_BS=torch.tensor([[math.nan]]), tokens_B=torch.tensor([1])).check_finite("the model", "a.txt")
        Traceback (most recent call last):
        unmask.errors.NonFiniteError: the model gives nan nats on a.txt, which is no finite number: see its weights
        """
        if not math.isfinite(self.nats):
            raise NonFiniteError(
                f"{whose} gives {self.nats} nats on {texts}, which is no finite number: see its weights"
            )

    def with_more(self, other: Bound) -> Bound:
        """Combine the estimates of two bounds of the same sequences.

        >>> one = Bound(draws_BS=torch.ones(2, 1), tokens_B=torch.tensor([1, 1]))
        >>> one.with_more(one).draws_BS.shape
        torch.Size([2, 2])
        """
        return replace(self, draws_BS=torch.cat([self.draws_BS, other.draws_BS], dim=1))

    def with_larger(self, other: Bound) -> Bound:
        """Average two bounds of the same sequences draw by draw: each holds half of every group of draws.

        >>> one, two = (Bound(draws_BS=torch.full((1, 2), x), tokens_B=torch.tensor([1])) for x in (1.0, 2.0))
        >>> one.with_larger(two).draws_BS
        tensor([[1.5000, 1.5000]])
        """
        return replace(self, draws_BS=(self.draws_BS + other.draws_BS) / 2)

    def summary(self) -> dict[str, float | int | list[float] | None]:
        """Plain numbers for `--json`."""
        lo, hi = self.ci95
        per_byte = self.tokens / self.num_bytes / math.log(2) if self.num_bytes else None
        return {
            self.ppl_key: self.ppl if math.isfinite(self.ppl) else None,
            f"{self.ppl_key}_ci95": _finite(_exp(lo), _exp(hi)),
            "nats_per_token": self.nats_per_token,
            "nats_per_token_ci95": _finite(lo, hi),
            "nats_per_token_ci95_given_texts": _finite(*self.draws_ci95),
            "bits_per_byte": self.bits_per_byte,
            "bits_per_byte_ci95": None if per_byte is None else _finite(lo * per_byte, hi * per_byte),
            "nats": self.nats,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "sequences": len(self.tokens_B),
        } | ({} if self.of_B is None else {"texts": self.num_texts})


def join(bounds: list[Bound], num_bytes: int | None = None) -> Bound:
    """One bound over all the sequences.

    >>> import torch
    >>> one = Bound(draws_BS=torch.ones(1, 1), tokens_B=torch.tensor([1]))
    >>> join([one, one]).nats
    2.0
    """
    return Bound(
        draws_BS=torch.cat([b.draws_BS.cpu() for b in bounds]),
        tokens_B=torch.cat([b.tokens_B.cpu() for b in bounds]),
        num_bytes=num_bytes,
        kind=bounds[0].kind,
    )


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _finite(lo: float, hi: float) -> list[float] | None:
    """An interval for JSON, which cannot represent NaN or infinity."""
    return [lo, hi] if math.isfinite(lo) and math.isfinite(hi) else None
