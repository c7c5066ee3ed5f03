"""How a token is drawn once its position opens: sampled or not, temperature, top-k, top-p, exact categorical draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unmask.data.batch import DRAW_TOKEN
from unmask.devices import widest
from unmask.errors import NonFiniteError, Public, UsageError
from unmask.registry import check_fields
from unmask.rng import categorical, uniform

# Dividing by the smallest leaves only the likeliest token, by the largest all are equal; results fit into float32.
COLDEST, HOTTEST = 1e-30, 1e30


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Options shared by the samplers. temperature 0 takes the likeliest token; top_k=0 and top_p=1 cut nothing.

    draw: sample; argmax takes the likeliest token; hybrid takes it if its probability is at least `sure`, otherwise
    samples. temperature_end: the final temperature, reached linearly in the share of the row that is written.
    """

    draw: Literal["sample", "argmax", "hybrid"] = "sample"
    sure: float = 0.9
    temperature: float = 1.0
    temperature_end: float | None = None
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("temperature", "temperature_end"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError("{name} must be 0 or more, got {value}", name=Public(name), value=value)
        if not 0 <= self.sure <= 1:
            raise UsageError("sure is a probability in [0, 1], got {sure}", sure=self.sure)
        if self.top_k < 0:
            raise UsageError("top_k must be 0 (off) or more, got {top_k}", top_k=self.top_k)
        if not 0 < self.top_p <= 1:
            raise UsageError("top_p must lie in (0, 1], got {top_p}", top_p=self.top_p)

    def draw_tokens(
        self,
        log_p_NI: Tensor,
        key_N: Tensor,
        position_N: Tensor,
        forbidden: tuple[int, ...] = (),
        *,
        share_N: Tensor | None = None,
        visit: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw tokens; return them and their log-probabilities under the sampled distribution.

        share_N: the share of the row that is written. visit: the number of the draw at a position that may be drawn
        several times, so that each draw gets its own random numbers.
        """
        log_p_NI = forbid(log_p_NI, forbidden)
        if bool(log_p_NI.isnan().any()):
            raise NonFiniteError("the model's prediction is not a number: check the weights, or lower the guidance")
        return self.choose(log_p_NI, token_uniforms(key_N, position_N, visit), share_N)

    def choose(self, log_p_NI: Tensor, u_N: Tensor, share_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose tokens by one uniform number each; return them and their log-probabilities under that distribution."""
        if self.takes_likeliest:
            token_N = log_p_NI.argmax(dim=-1)
        else:
            # The largest is made 0 first: a tiny temperature then gives 0 and -inf, never -inf alone.
            temperature = self._temperature(share_N)
            law_NI = self.cut((log_p_NI - log_p_NI.amax(dim=-1, keepdim=True)) / temperature)
            token_N = categorical(law_NI, u_N)
            if self.draw == "hybrid":
                top_N, best_N = torch.softmax(log_p_NI, dim=-1).max(dim=-1)
                token_N = torch.where(top_N >= self.sure, best_N, token_N)
                # As at temperature 0, the reported probability of a token that was not sampled is the model's own.
                law_NI = torch.where((top_N >= self.sure)[:, None], log_p_NI, law_NI)
            log_p_NI = law_NI
        log_p_NI = torch.log_softmax(log_p_NI, dim=-1)
        return token_N, log_p_NI.gather(1, token_N[:, None]).squeeze(1)

    def _temperature(self, share_N: Tensor | None) -> Tensor | float:
        start = self.divisor
        if self.temperature_end is None:
            return start
        assert share_N is not None
        course_N = start + (_bounded(self.temperature_end) - start) * share_N
        return course_N.clamp(min=COLDEST)[:, None]

    @property
    def divisor(self) -> float:
        """The temperature, clamped to values that float32 can divide by."""
        return _bounded(self.temperature)

    @property
    def takes_likeliest(self) -> bool:
        """Whether tokens are never sampled."""
        return self.draw == "argmax" or (self.temperature == 0 and self.temperature_end is None)

    @property
    def draws_whole_law(self) -> bool:
        """Whether the draw is a plain categorical one at a single temperature, without cuts."""
        plain = self.draw == "sample" and self.temperature_end is None
        return plain and self.temperature > 0 and self.top_k == 0 and self.top_p == 1

    def shaped(self, log_p_NI: Tensor, forbidden: tuple[int, ...]) -> Tensor:
        """The prediction with temperature and cuts, in float64 if the device has it; its sum, which is not 1 for a
        score, is preserved."""
        log_p_NI = log_p_NI.to(widest(log_p_NI.device))
        norm_N1 = torch.logsumexp(log_p_NI, dim=1, keepdim=True)  # before anything is forbidden
        law_NI = forbid(log_p_NI, forbidden)
        if not (self.draws_whole_law and self.temperature == 1):
            divisor = COLDEST if self.takes_likeliest else self.divisor
            law_NI = self.cut((law_NI - law_NI.amax(dim=1, keepdim=True)) / divisor)
        return law_NI.log_softmax(dim=1) + norm_N1

    def cut(self, log_p_NI: Tensor) -> Tensor:
        """Apply top-k and top-p: -inf for removed tokens; the likeliest token always stays."""
        if 0 < self.top_k < log_p_NI.shape[-1]:
            kept = log_p_NI.topk(self.top_k, dim=-1)  # by index: among equals exactly k stay
            log_p_NI = torch.full_like(log_p_NI, -torch.inf).scatter(1, kept.indices, kept.values)
        if self.top_p < 1:
            # The smallest set of likeliest tokens that holds at least top_p; the likeliest one always stays.
            sorted_p, order = torch.softmax(log_p_NI, dim=-1).sort(dim=-1, descending=True)
            before = sorted_p.cumsum(dim=-1) - sorted_p
            drop = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= self.top_p)
            log_p_NI = log_p_NI.masked_fill(drop, -torch.inf)
        return log_p_NI


def token_uniforms(key_N: Tensor, position_N: Tensor, visit: int | None = None) -> Tensor:
    """[N] the numbers that decide on tokens: 53 bits each, on the CPU if the device has no float64."""
    if widest(key_N.device) != torch.float64:
        key_N, position_N = key_N.cpu(), position_N.cpu()
    return uniform(key_N, DRAW_TOKEN, position_N, *(() if visit is None else (visit,)))


def _bounded(temperature: float) -> float:
    return min(max(temperature, COLDEST), HOTTEST)


def forbid(log_p_NI: Tensor, ids: tuple[int, ...]) -> Tensor:
    """Set log_p to -inf at these ids.

    >>> forbid(torch.zeros(1, 3), (1,))
    tensor([[0., -inf, 0.]])
    """
    return log_p_NI.index_fill(1, torch.tensor(ids, device=log_p_NI.device), -torch.inf) if ids else log_p_NI
