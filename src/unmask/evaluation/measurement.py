"""A number with everything it must be reported with: its interval, sample size, kind and protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from unmask.objectives import base as objectives

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.evaluation.bound import Bound

# For a likelihood the objective's kind: exact, upper bound or pseudo; everything else is a sample mean, an estimate.
Kind = objectives.Kind | Literal["estimate"]
SIGN: dict[str, str] = {"exact": "=", "upper bound": "≤", "pseudo": "≈", "estimate": "≈"}


@dataclass(frozen=True)
class Measurement:
    """The result of a metric. ci95: a 95% interval over texts and draws; None if there is only one draw.

    n: the number of tokens (or other units that the metric counts). protocol: everything that the number depends on, as
    plain data. bound: the underlying draws, if it is a likelihood.

    >>> print(Measurement(12.5, (12.0, 13.0), 400, kind="upper bound", name="perplexity"))
    perplexity ≤ 12.5000 (95% interval 12.0000 – 13.0000, n = 400)
    """

    value: float
    ci95: tuple[float, float] | None
    n: int
    protocol: Mapping[str, Any] = field(default_factory=dict, repr=False)
    kind: Kind = "estimate"
    name: str = "value"
    bound: Bound | None = field(default=None, repr=False, compare=False)

    @property
    def sign(self) -> str:
        """=, ≤ or ≈: how the value relates to the measured quantity."""
        return SIGN[self.kind]

    def __str__(self) -> str:
        value = f"{self.value:.4f}" if math.isfinite(self.value) else "not finite"
        interval = "no interval" if self.ci95 is None else "95% interval {:.4f} – {:.4f}".format(*self.ci95)
        return f"{self.name} {self.sign} {value} ({interval}, n = {self.n:,})"

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON, which cannot represent NaN or infinity.

        >>> Measurement(math.inf, None, 4).summary()["value"] is None
        True
        """
        return {
            "metric": self.name,
            "value": self.value if math.isfinite(self.value) else None,
            "ci95": None if self.ci95 is None else list(self.ci95),
            "n": self.n,
            "kind": self.kind,
            "protocol": dict(self.protocol),
        }


def ratio_ci95(total_B: Tensor, count_B: Tensor, of_B: Tensor | None = None) -> tuple[float, float] | None:
    """A 95% interval of sum(total) / sum(count) for texts that are a sample; those with larger counts weigh more.

    of_B: the text number of each row, as `text_numbers` gives them; None: each row is a text.

    >>> import torch
    >>> ratio_ci95(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2, 2, 2]))
    (0.5, 0.5)
    """
    total_T, count_T = by_text(total_B, of_B), by_text(count_B, of_B)
    texts, count = len(count_T), float(count_T.sum())
    if texts < 2 or not count:
        return None
    mean = float(total_T.sum()) / count
    half = student_975(texts - 1) * ratio_error(total_T, count_T)
    return mean - half, mean + half


def by_text(value_B: Tensor, of_B: Tensor | None) -> Tensor:
    """[T] values of rows in float64, summed over the rows of each text; of_B None: each row is a text.

    >>> import torch
    >>> by_text(torch.tensor([1, 2, 4]), torch.tensor([0, 0, 1])).tolist()
    [3.0, 4.0]
    """
    value_B = value_B.double()
    return value_B if of_B is None else value_B.new_zeros(int(of_B.max()) + 1).index_add(0, of_B, value_B)


def ratio_error(total_B: Tensor, count_B: Tensor) -> float:
    """The standard error of the ratio estimator sum(total) / sum(count).

    >>> import torch
    >>> ratio_error(torch.tensor([0.0, 2.0]), torch.tensor([1, 1]))
    1.0
    """
    rows, count = len(count_B), float(count_B.sum())
    residual_B = total_B.double() - float(total_B.double().sum()) / count * count_B.double()
    return math.sqrt(float(residual_B.square().sum()) * rows / (rows - 1)) / count


def student_975(freedom: int) -> float:
    """The 97.5% point of Student's t: exact for 1 and 2, the Cornish–Fisher expansion above (within 1% from 3 on).

    >>> student_975(1), round(student_975(1000), 3)
    (12.706, 1.962)
    """
    if freedom <= 2:
        return (12.706, 12.706, 4.303)[max(freedom, 0)]
    z, v = 1.959964, float(freedom)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2) + third / v**3
