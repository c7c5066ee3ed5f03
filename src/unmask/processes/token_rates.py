"""Masks with a rate per token: alpha_v(t) = 1 - level_v(t), with one parameter for each token v.

Spindle (DiffusionBERT, He et al. 2022, arXiv 2211.15029): alpha_v = 1 - t - lambda sin(pi t) h_v, where h_v compares
the information of a token with the mean, either over the training tokens or, as in the paper, over a row
(`Spindle.centred`), which only the forward process knows. Power (GenMD4, Shi et al. 2024, arXiv 2406.04329, section
6): alpha_v = 1 - t^{k_v}, k learned. The ends are exact for all parameters: level_v(0) = 0, level_v(1) = 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor, nn

from unmask.data.rows import Ints
from unmask.devices import put_like
from unmask.errors import UsageError
from unmask.noise.log_linear import LogLinear
from unmask.processes.absorbing import Masking, position_uniforms
from unmask.processes.base import per_position


class Rates(nn.Module, ABC):
    """alpha_v(t) for all v. `numbers` returns one parameter c_v per token; the other methods broadcast t and c.

    >>> rates = Power(num_ids=3, k=2.0)
    >>> rates.level(torch.tensor(0.5), rates.numbers(torch.ones(()))).tolist()
    [0.25, 0.25, 0.25]
    """

    @abstractmethod
    def numbers(self, like: Tensor) -> Tensor:
        """[I] c_v, with the dtype and device of `like`, differentiable if it is learned."""

    def check(self, c_I: Tensor) -> None:
        """Refuse parameters that have not been initialised yet."""
        return

    @abstractmethod
    def level(self, t: Tensor, c: Tensor) -> Tensor:
        """1 - alpha_v(t): the probability that v is masked at time t."""

    @abstractmethod
    def weight(self, t: Tensor, c: Tensor) -> Tensor:
        """w_v = -alpha'_v / (1 - alpha_v)."""

    @abstractmethod
    def opens(self, t: Tensor, step: Tensor, c: Tensor) -> Tensor:
        """rho_v = (alpha_s - alpha_t) / (1 - alpha_t), s = t - step: the probability that v, masked at t, was visible
        at s. Written so that it is accurate in float32 for short steps."""


class Spindle(Rates):
    """alpha_v = 1 - t - strength sin(pi t) h_v. h is NaN until it is computed from counts or loaded.

    |h_v| is clipped below 1 / (strength pi), so that alpha_v decreases everywhere.
    """

    h_I: Tensor

    def __init__(self, num_ids: int, strength: float) -> None:
        super().__init__()
        self.strength = strength
        self.register_buffer("h_I", torch.full((num_ids,), math.nan))

    def count(self, counts_I: Ints, mask_id: int) -> None:
        """Set h_v = 1 - H / H(v) from token counts: H(v) = -log of v's share of the tokens, H its mean over them.

        1 is added to every count, so that tokens that do not occur have a positive share, too.
        """
        share_I = np.delete(counts_I, mask_id) + 1.0
        share_I = share_I / share_I.sum()
        told_I = -np.log(share_I)
        h_I = 1 - (share_I * told_I).sum() / np.maximum(told_I, 1e-12)
        with torch.no_grad():
            self.h_I.copy_(torch.from_numpy(np.insert(h_I, mask_id, 0.0)))

    def numbers(self, like: Tensor) -> Tensor:
        return self._falling(put_like(self.h_I, like))

    def centred(self, x_BL: Tensor, open_BL: Tensor, like: Tensor) -> Tensor:
        """[B, L] 1 - H_row / H(x_l), H_row the mean of H over the open tokens of the row."""
        share_BL = (1 - put_like(self.h_I, like)[x_BL]).clamp(min=1e-6)  # H / H(x_l)
        told_B = (open_BL / share_BL).sum(dim=1) / open_BL.sum(dim=1).clamp(min=1)  # H_row / H
        return self._falling(1 - told_B[:, None] * share_BL)

    def _falling(self, h: Tensor) -> Tensor:
        most = 0.999 / (math.pi * self.strength)
        return h.clamp(-most, most)

    def check(self, c_I: Tensor) -> None:
        if bool(c_I.isnan().any()):
            raise UsageError(
                "the spindle's rates are made from how often each token stands in the training rows, and nobody has "
                "counted: train it by a recipe, or call objective.prepare(network, token_counts) first"
            )

    def level(self, t: Tensor, c: Tensor) -> Tensor:
        return t + self.strength * torch.sin(math.pi * torch.minimum(t, 1 - t)) * c  # sin(pi) is not 0 in floats

    def weight(self, t: Tensor, c: Tensor) -> Tensor:
        return (1 + self.strength * math.pi * torch.cos(math.pi * t) * c) / self.level(t, c)

    def opens(self, t: Tensor, step: Tensor, c: Tensor) -> Tensor:
        # sin(pi t) - sin(pi s) = 2 cos(pi (t + s) / 2) sin(pi (t - s) / 2)
        rise = 2 * torch.cos(math.pi * (t - step / 2)) * torch.sin(math.pi / 2 * step)
        opens = (step + self.strength * rise * c) / self.level(t, c)
        return torch.where(step < t, opens, 1.0)


class Power(Rates):
    """alpha_v = 1 - t^{k_v}, k_v = e^{p_v} with a parameter p_v; all start at the same k."""

    def __init__(self, num_ids: int, k: float) -> None:
        super().__init__()
        self.log_k_I = nn.Parameter(torch.full((num_ids,), math.log(k)))

    def numbers(self, like: Tensor) -> Tensor:
        return put_like(self.log_k_I, like).clamp(-5, 5).exp()  # else float32 would round t^k or 1 - t^k to 0

    def level(self, t: Tensor, c: Tensor) -> Tensor:
        return t**c

    def weight(self, t: Tensor, c: Tensor) -> Tensor:
        return c / t

    def opens(self, t: Tensor, step: Tensor, c: Tensor) -> Tensor:
        # 1 - (s/t)^k. The logarithm is kept finite at s = 0, where its unused gradient would otherwise be NaN.
        last = step >= t
        log_ratio = torch.log1p(-torch.where(last, 0.0, step / t))
        return torch.where(last, 1.0, -torch.expm1(c * log_ratio))


class TokenRates(Masking):
    """Masking with a rate per token: q(z_t | x) is x with probability alpha_x(t), else the mask.

    by_row: the forward rates are the spindle's, centred on each row; the reverse process, which cannot know the row's
    mean, has those of `rates`. The noise level of the network and the samplers' clock is t itself.

    >>> process = TokenRates(Power(num_ids=3, k=1.0), num_ids=3, mask_id=2)
    >>> half, one = torch.tensor([0.5]), torch.tensor([1.0])
    >>> process.posterior(torch.tensor([2]), torch.tensor([[1.0, 0.0, 0.0]]), half, one)
    tensor([[0.5000, 0.0000, 0.5000]])
    """

    def __init__(self, rates: Rates, *, num_ids: int, mask_id: int, by_row: bool = False) -> None:
        super().__init__(LogLinear(), num_ids=num_ids, mask_id=mask_id)
        self.rates, self.by_row = rates, by_row

    def forward_numbers(self, x_BL: Tensor, open_BL: Tensor, like: Tensor) -> Tensor:
        """[B, L] the rate parameters of the forward process, differentiable if they are learned."""
        c_I = self.rates.numbers(like)
        self.rates.check(c_I)
        if not self.by_row:
            return c_I[x_BL]
        assert isinstance(self.rates, Spindle)
        return self.rates.centred(x_BL, open_BL, like)

    def levels(self, x_BL: Tensor, t: Tensor, open_BL: Tensor) -> Tensor:
        """[B, L] the probability that each token is masked at time t, if it is open."""
        return self.rates.level(per_position(t), self.forward_numbers(x_BL, open_BL, t))

    def corrupt(self, x_BL: Tensor, t: Tensor, key_B: Tensor, open_BL: Tensor) -> Tensor:
        with torch.no_grad():
            masked_BL = open_BL & (position_uniforms(key_B, open_BL) < self.levels(x_BL, t, open_BL))
        return x_BL.masked_fill(masked_BL, self.mask_id)

    @torch.no_grad()
    def posterior(self, z_N: Tensor, x_hat_NI: Tensor, s: Tensor, t: Tensor) -> Tensor:
        """A mask becomes v with probability x_hat[v] rho_v and otherwise stays; a token stays."""
        s, t = (time.to(x_hat_NI).expand(len(z_N))[:, None] for time in (s, t))
        law_NI = x_hat_NI * self.rates.opens(t, t - s, self.rates.numbers(x_hat_NI))
        mask_N1 = torch.full_like(z_N, self.mask_id)[:, None]
        law_NI = law_NI.scatter(1, mask_N1, 0.0)
        law_NI = law_NI.scatter(1, mask_N1, 1 - law_NI.sum(dim=1, keepdim=True))
        one_hot = torch.nn.functional.one_hot(z_N, self.num_ids).to(law_NI)
        return torch.where((z_N == self.mask_id)[:, None], law_NI, one_hot)
