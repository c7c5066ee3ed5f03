"""The bound of a set of sequences: sums and counts, never means, so that parts add up exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.objectives.base import Kind


@dataclass(frozen=True)
class Bound:
    """Upper bounds of -log p in nats, one row a sequence and one column an independent draw of times and masks.

    >>> import torch
    >>> b = Bound(draws_BS=torch.tensor([[2.0, 4.0]]), tokens_B=torch.tensor([3]))
    >>> b.nats_B.tolist(), round(b.nats_per_token, 3)
    ([3.0], 1.0)
    """

    draws_BS: Tensor
    tokens_B: Tensor
    num_bytes: int | None = None  # of the tokens' text, where it is known
    kind: Kind = "upper bound"  # or exact: a likelihood, of which nothing was drawn; or pseudo: no bound

    @property
    def exact(self) -> bool:
        return self.kind == "exact"

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
    def bits_per_byte(self) -> float | None:
        return None if not self.num_bytes else self.nats / math.log(2) / self.num_bytes

    @property
    def standard_error(self) -> float:
        """Of nats per token. Many sequences: they are a sample of texts, and each one's mean carries its own noise.

        One sequence: the text is given, and only the draws of times and masks vary; one draw tells nothing of its
        error, which is NaN then.
        """
        rows, columns = self.draws_BS.shape
        if rows > 1:  # the ratio estimator's error: sequences that hold more tokens weigh more
            residual_B = self.nats_B.double() - self.nats_per_token * self.tokens_B.double()
            variance = float(residual_B.square().sum()) * rows / (rows - 1)
        elif self.exact:
            variance = 0.0
        else:
            variance = float(self.draws_BS.double().var()) / columns if columns > 1 else math.nan
        return math.sqrt(variance) / self.tokens

    @property
    def ci95(self) -> tuple[float, float]:
        """A 95% interval of nats per token over sequences and times."""
        rows, columns = self.draws_BS.shape
        half = _student_975(max(rows, 1 if rows > 1 else columns) - 1) * self.standard_error
        return self.nats_per_token - half, self.nats_per_token + half

    def summary(self) -> dict[str, float | int | list[float] | None]:
        """Plain numbers for `--json`."""
        lo, hi = self.ci95
        per_byte = self.tokens / self.num_bytes / math.log(2) if self.num_bytes else None
        return {
            "ppl": self.ppl if math.isfinite(self.ppl) else None,
            "ppl_ci95": _finite(_exp(lo), _exp(hi)),
            "nats_per_token": self.nats_per_token,
            "nats_per_token_ci95": _finite(lo, hi),
            "bits_per_byte": self.bits_per_byte,
            "bits_per_byte_ci95": None if per_byte is None else _finite(lo * per_byte, hi * per_byte),
            "nats": self.nats,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "sequences": len(self.tokens_B),
        }


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
    """An interval for JSON, which has neither NaN nor infinity."""
    return [lo, hi] if math.isfinite(lo) and math.isfinite(hi) else None


def _student_975(freedom: int) -> float:
    """The 97.5% point of Student's t: exact for 1 and 2, the Cornish–Fisher expansion above (within 1% from 3 on)."""
    if freedom <= 2:
        return (12.706, 12.706, 4.303)[max(freedom, 0)]
    z, v = 1.959964, float(freedom)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2) + third / v**3
