"""Queries of samplers and predictions of networks: the network is called between `ask` and `tell`, outside both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from unmask.denoisers.network import Cache, Network, read_on
from unmask.errors import UsageError
from unmask.objectives.terms import subs_log_probs
from unmask.processes.base import Process

MAX_ANSWER = 1 << 26  # lines × vocabulary of one answer


@dataclass(frozen=True)
class Query:
    """A question to the network: which rows, at which noise level, and the positions whose predictions are wanted.

    tokens_BL: the whole canvas. rows_R: the rows in question (None: all). at_RK: positions, padded on the right;
    wanted_RK says which are real. The answer has one line for each real one, row by row.
    label_B: the class of each row, -1 for none (None: none has one).
    reach: one more than the rightmost real position, known without a device synchronisation.
    lo: the column of the sampler's canvas at which these columns begin, if they are a window of a longer text.
    latent_NE: if states are vectors, those of the positions in question, one line each; all others are tokens.
    writes: the answer is written into the canvas, and the next query continues from there; False: it is only read, so
    an autoregressive network may answer any number of positions at once.
    """

    tokens_BL: Tensor
    level_R: Tensor
    at_RK: Tensor
    wanted_RK: Tensor
    reach: int
    rows_R: Tensor | None = None
    valid_BL: Tensor | None = None
    label_B: Tensor | None = None
    lo: int = 0
    writes: bool = True
    latent_NE: Tensor | None = None

    @property
    def z_RL(self) -> Tensor:
        return self.tokens_BL if self.rows_R is None else self.tokens_BL[self.rows_R]

    @property
    def valid_RL(self) -> Tensor | None:
        return self.valid_BL if self.valid_BL is None or self.rows_R is None else self.valid_BL[self.rows_R]

    @property
    def label_R(self) -> Tensor | None:
        return self.label_B if self.label_B is None or self.rows_R is None else self.label_B[self.rows_R]


Gives = Literal["x0", "x0_and_mask", "x0_by_rates", "score", "next"]


class Predictor(Protocol):
    """Answers a query with one line per wanted position. A sampler accepts only processes and answers that it supports.

    process: the forward process that the network has learned to reverse; None for autoregression.
    gives: x0: log x_theta. x0_and_mask: the same for a network that may predict the mask. x0_by_rates: log x_theta if
    each token has a rate of its own, so that the predicted token decides when it opens. score: log-ratios of the
    process's marginals. next: log p(x_l | x_<l).
    left_to_right: the prediction for a position is correct only if everything before it is written, and does not depend
    on anything after it, as for an autoregressive network.
    """

    @property
    def process(self) -> Process | None: ...

    @property
    def gives(self) -> Gives: ...

    @property
    def left_to_right(self) -> bool: ...

    def __call__(self, query: Query) -> Tensor: ...


class XTheta:
    """log x_theta [N, I]; samplers query masked positions only, which implements the carry-over half of SUBS."""

    left_to_right = False

    def __init__(
        self, denoiser: Network, process: Process, *, zero_masking: bool = True, gives: Gives | None = None
    ) -> None:
        self.denoiser, self.process = denoiser, process
        self.zero_masking = zero_masking
        self.gives: Gives = gives or ("x0" if zero_masking else "x0_and_mask")

    @torch.no_grad()
    def __call__(self, query: Query) -> Tensor:
        h_RKD = self.denoiser.trunk(
            query.z_RL, query.level_R, valid_BL=query.valid_RL, cond=query.label_R, at_BK=query.at_RK
        )
        return subs_log_probs(self.denoiser.head(h_RKD[query.wanted_RK]), self.denoiser.mask_id, self.zero_masking)


class VectorXTheta:
    """log x_theta [N, I] of a network that reads vectors: states at the queried positions, tokens everywhere else.

    vectors(tokens_RL, row_N, at_N, latent_NE, level_N, x_hat_NE): the network's input. log_probs(logits_NI, latent_NE,
    level_N): log x_theta. mean(p_NI): x_hat_NE, of a network that reads its own estimate and is called twice. All come
    from the objective.
    """

    left_to_right = False
    gives: Gives = "x0"

    def __init__(
        self,
        denoiser: Network,
        process: Process,
        *,
        vectors: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor],
        log_probs: Callable[[Tensor, Tensor, Tensor], Tensor],
        mean: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.denoiser, self.process, self.vectors, self.log_probs = denoiser, process, vectors, log_probs
        self.mean = mean

    @torch.no_grad()
    def __call__(self, query: Query) -> Tensor:
        log_p_NI = self._pass(query, None)
        return log_p_NI if self.mean is None else self._pass(query, self.mean(log_p_NI.exp()))

    def _pass(self, query: Query, x_hat_NE: Tensor | None) -> Tensor:
        latent_NE = query.latent_NE
        if latent_NE is None:
            raise UsageError("this model reads vectors: ask about their states, as its own sampler does")
        num = len(latent_NE)  # a batch may be padded with further lines after these
        row_N, column_N = (x[:num] for x in query.wanted_RK.nonzero(as_tuple=True))
        at_N, level_N = query.at_RK[row_N, column_N], query.level_R[row_N]
        z_RLD = self.vectors(query.z_RL, row_N, at_N, latent_NE, level_N, x_hat_NE)
        how: dict[str, Any] = {"valid_BL": query.valid_RL, "cond": query.label_R, "at_BK": query.at_RK}
        h_RKD = self.denoiser.trunk(z_RLD, query.level_R, **how)
        logits_NI = self.denoiser.head(h_RKD[query.wanted_RK])[:num]
        return self.log_probs(logits_NI, latent_NE, level_N)


class NextToken:
    """log p(x_l | x_<l) [N, I] from a causal network, with its cache if it has one; rows advance in lockstep.

    It keeps the length of the cache, so each generation needs a new one.
    """

    process = None
    gives: Gives = "next"
    left_to_right = True

    def __init__(self, denoiser: Network) -> None:
        self.denoiser = denoiser
        self.cache: Cache | None = None
        self.length = 0  # positions in the cache

    @torch.no_grad()
    def __call__(self, query: Query) -> Tensor:
        if not query.writes:  # all tokens are given: one call answers every position
            h_RKD = self.denoiser.trunk(query.z_RL, valid_BL=query.valid_RL, at_BK=query.at_RK)
            return subs_log_probs(self.denoiser.head(h_RKD[query.wanted_RK]), self.denoiser.mask_id)
        if self.length == 0:
            self.cache = self.denoiser.new_cache(*query.tokens_BL.shape)
        h_BD = read_on(self.denoiser, query.tokens_BL, self.cache, self.length, query.reach)
        self.length = query.reach
        h_RD = h_BD if query.rows_R is None else h_BD[query.rows_R]
        return subs_log_probs(self.denoiser.head(h_RD), self.denoiser.mask_id)
