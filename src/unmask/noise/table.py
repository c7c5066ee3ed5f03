"""alpha = 1 - u(t)^2, where u increases piecewise linearly with learned slopes.

The masking rates are then drawn from a table of probabilities over `bins` equal intervals of rates. Within an interval
the density is proportional to 1 / sqrt(rate): near rate 0 a masked token has a large weight, and with a uniform density
the estimate of MDLM's bound (arXiv 2406.07524, equation 11) would have no finite variance. The slopes are trained to
reduce this variance (`variance_gradient` in `objectives/terms.py`), an idea of VDM (Kingma et al. 2021, arXiv
2107.00630), whose schedule is a monotone network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unmask.devices import put_like
from unmask.errors import UsageError
from unmask.noise import Noise
from unmask.noise.learned import LearnedNoise
from unmask.registry import check_fields

LEAST = 0.05  # lower limit of a bin's share, relative to its initial share, so that alpha decreases strictly


class LearnedTable(LearnedNoise):
    """u^2 goes from k / bins to (k + 1) / bins while t passes through a share of (0, 1): the softmax of `logits`."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(bins))  # u^2 = t at all ends of bins

    def _ends(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """[bins + 1] u at the ends of the bins, and the times of these ends; both go from 0 to 1 exactly."""
        bins = len(self.logits)
        share = (1 - LEAST) * put_like(self.logits, like).softmax(dim=0) + LEAST / bins
        times = torch.cat([like.new_zeros(1), share.cumsum(dim=0)[:-1], like.new_ones(1)])
        return (torch.arange(bins + 1, device=like.device, dtype=like.dtype) / bins).sqrt(), times

    def _line(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """u(t) and u'(t)."""
        u, times = self._ends(t)
        k = torch.bucketize(t.detach(), times.detach()[1:-1], right=True)
        share = times.diff()[k]
        part = (t - times[k]) / share
        return u[k] * (1 - part) + u[k + 1] * part, u.diff()[k] / share

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - self.level(t)

    def level(self, t: Tensor) -> Tensor:
        return self._line(t)[0].square()

    def dalpha(self, t: Tensor) -> Tensor:
        u, slope = self._line(t)
        return -2 * u * slope

    def inverse(self, alpha: Tensor) -> Tensor:
        u, times = self._ends(alpha)
        level, bins = 1 - alpha, len(self.logits)
        k = (level.detach() * bins).long().clamp(max=bins - 1)
        return times[k] + (level.sqrt() - u[k]) / u.diff()[k] * times.diff()[k]


@dataclass(frozen=True, kw_only=True)
class Table(Noise):
    """Learned: how often each masking rate is drawn, by a table of `bins` shares; it begins near alpha = 1 - t."""

    bins: int = 16

    def __post_init__(self) -> None:
        check_fields(self)
        if not 2 <= self.bins <= 1000:
            raise UsageError("a table has 2..1000 bins, got {bins}", bins=self.bins)

    def build(self) -> LearnedTable:
        return LearnedTable(self.bins)

    def alpha(self, t: Tensor) -> Tensor:
        return self.build().alpha(t).detach()

    def dalpha(self, t: Tensor) -> Tensor:
        return self.build().dalpha(t).detach()

    def inverse(self, alpha: Tensor) -> Tensor:
        return self.build().inverse(alpha).detach()

    def level(self, t: Tensor) -> Tensor:
        return self.build().level(t).detach()
