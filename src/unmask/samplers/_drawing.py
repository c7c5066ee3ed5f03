"""How a token is drawn once its position opens: temperature, top-k, top-p, exact categorical draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.batch import DRAW_TOKEN
from unmask.draws import categorical, uniform
from unmask.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Options shared by the samplers. temperature 0 takes the likeliest token; top_k=0 and top_p=1 cut nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must lie in (0, 1], got {self.top_p}")

    def draw(
        self, log_p_NI: Tensor, key_N: Tensor, position_N: Tensor, forbidden: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities under the law they were drawn from."""
        if forbidden:
            log_p_NI = log_p_NI.index_fill(1, torch.tensor(forbidden, device=log_p_NI.device), -torch.inf)
        if key_N.device.type == "mps":  # 53 bits, as everywhere else
            key_N, position_N = key_N.cpu(), position_N.cpu()
        return self.choose(log_p_NI, uniform(key_N, DRAW_TOKEN, position_N))

    def choose(self, log_p_NI: Tensor, u_N: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens by one uniform each, and their log-probabilities under the law they were drawn from."""
        if self.temperature == 0:
            token_N = log_p_NI.argmax(dim=-1)
        else:
            # The largest is made 0 first: a tiny temperature then gives 0 and -inf, never -inf alone.
            log_p_NI = self.cut((log_p_NI - log_p_NI.amax(dim=-1, keepdim=True)) / self.temperature)
            token_N = categorical(log_p_NI, u_N)
        log_p_NI = torch.log_softmax(log_p_NI, dim=-1)
        return token_N, log_p_NI.gather(1, token_N[:, None]).squeeze(1)

    @property
    def draws_whole_law(self) -> bool:
        """Nothing is cut off and something is drawn: the plain categorical draw at some temperature."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p == 1

    def cut(self, log_p_NI: Tensor) -> Tensor:
        """Top-k and top-p: -inf for what is cut off; the likeliest token always stays."""
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
