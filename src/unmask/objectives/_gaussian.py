"""Shared by the objectives with Gaussian states: the three parts of the bound, and how a network reads vectors.

With SNR = e^{-gamma} and x_hat = Σ_v x_theta[v] e_v (Variational Diffusion Models, arXiv 2107.00630)
-log p(x) <= KL(q(z_1|x) ‖ N(0, 1)) + E[-log p(x|z_0)] + ½ ∫ -SNR'(t) ‖e_x - x_hat(z_t)‖² dt, and in T steps the last
part is ½ Σ (SNR_s - SNR_t) ‖e_x - x_hat(z_t)‖². A row's estimate has one z_t and one z_0.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unmask.data.batch import Batch
from unmask.denoisers import Denoiser
from unmask.denoisers.base import other_way
from unmask.denoisers.network import Network
from unmask.denoisers.ragged import vectors_at
from unmask.devices import put, widest
from unmask.errors import UsageError
from unmask.objectives import Objective
from unmask.objectives._entry import check_share, read_twice, without_gradient
from unmask.objectives.chunked_loss import CHUNK_NUMBERS, Term, at_positions, cross_entropy, token_nats
from unmask.objectives.draws import bound_draws
from unmask.objectives.score_queries import ScoreQuery
from unmask.objectives.terms import subs_log_probs
from unmask.processes.gamma import Gamma
from unmask.processes.gaussian import Gaussian, snr_drop
from unmask.registry import check_fields
from unmask.sampling.canvas import Canvas
from unmask.sampling.query import ask_about

if TYPE_CHECKING:
    from unmask.sampling.predictor import Predictor, Query

MAX_WIDTH = 1 << 14
AT_Z0, AT_ZT = 0, 1  # which of a position's noise vectors is drawn


class Times(NamedTuple):
    """Per row: gamma of its z_t, the weight of ‖e_x - x_hat‖², and the level that the network is conditioned on."""

    gamma_B: Tensor
    weight_B: Tensor
    level_B: Tensor


@dataclass(frozen=True)
class Lines:
    """The noised positions of a batch, one line each, row by row.

    where_BL and flat_N are on the batch's device, all other tensors on the network's. valid_BL: the positions that the
    network may see. times_N: how many times each line counts.
    """

    where_BL: Tensor
    flat_N: Tensor
    row_N: Tensor
    position_N: Tensor
    key_N: Tensor
    x_N: Tensor
    valid_BL: Tensor | None
    times_N: Tensor | None = None

    @classmethod
    def of(
        cls,
        batch: Batch,
        where_BL: Tensor,
        valid_BL: Tensor | None,
        device: torch.device,
        times_B: Tensor | None = None,
    ) -> Lines:
        flat_N = where_BL.flatten().nonzero().squeeze(1)
        row_N, length = flat_N // where_BL.shape[1], where_BL.shape[1]
        lines = (row_N, flat_N % length, batch.key_B[row_N], batch.x_BL.flatten()[flat_N])
        row, position, key, x = (put(line, device) for line in lines)
        times_N = None if times_B is None else put(times_B[row_N], device)
        return cls(where_BL, flat_N, row, position, key, x, valid_BL, times_N)

    def counted(self, nats_N: Tensor) -> Tensor:
        return nats_N if self.times_N is None else nats_N * self.times_N.to(nats_N)


class GaussianObjective(Objective):
    """Base class of objectives whose states are vectors.

    A subclass defines the process, and how the network reads the vectors.
    """

    steps: int | None
    self_conditioning: float = 0.0  # a field of subclasses whose network can read an estimate (`_entry.py`)

    def check_options(self, **widths: int) -> None:
        check_fields(self)
        check_share(self.self_conditioning)
        if self.steps is not None and not 1 <= self.steps <= 10**9:
            raise UsageError(f"steps must be at least 1, or none for continuous time; got {self.steps}")
        for name, width in widths.items():
            if not 1 <= width <= MAX_WIDTH:
                raise UsageError(f"{name} must lie in 1..{MAX_WIDTH}, got {width}")

    def check(self, denoiser: Denoiser | Network) -> None:
        if denoiser.causal:
            raise UsageError(
                f"Gaussian diffusion needs a denoiser that sees both sides: {other_way(denoiser, causal=False)}"
            )
        if not denoiser.uses_level:
            raise UsageError(
                'Gaussian diffusion tells its denoiser the noise level: set denoiser.conditioning = "level"'
            )

    @abstractmethod
    def process(self, network: Network) -> Gaussian:
        """The process, with the embeddings and the gamma schedule that `build` created."""

    @abstractmethod
    def vectors(
        self,
        network: Network,
        tokens_BL: Tensor,
        row_N: Tensor,
        position_N: Tensor,
        z_NE: Tensor,
        gamma_N: Tensor,
        x_hat_NE: Tensor | None = None,
    ) -> Tensor:
        """The network's input [B, L, D]: the states z at the noised positions, token vectors elsewhere.

        x_hat_NE: under self-conditioning, the network's estimate of the embeddings; None: the first pass.
        """

    def log_probs(self, process: Gaussian, logits_NI: Tensor, z_NE: Tensor, gamma_N: Tensor) -> Tensor:
        """log x_theta, from the head's logits."""
        return subs_log_probs(logits_NI, process.mask_id)

    # --- the bound ---

    def lines(self, network: Network, batch: Batch) -> Lines:
        return Lines.of(batch, batch.scored_BL, batch.valid_BL, network.device_for(batch.x_BL))

    def times(self, gamma: Gamma, time_B: Tensor) -> Times:
        """The times of a batch; with T steps, the ends of the steps that contain them."""
        return self._times_at(gamma, self.step_ends(time_B))

    def _times_at(self, gamma: Gamma, t_B: Tensor) -> Times:
        if self.steps is None:
            gamma_B = gamma.gamma(t_B)
            return Times(gamma_B, gamma.rate(t_B) * torch.exp(-gamma_B) / 2, gamma.level(t_B))
        gamma_B, before_B = gamma.gamma(t_B), gamma.gamma((t_B - 1 / self.steps).clamp(min=0))
        return Times(gamma_B, self.steps * snr_drop(before_B, gamma_B) / 2, gamma.level(t_B))

    def bound_times(self, gamma: Gamma, time_B: Tensor) -> Times:
        """`times` for an estimate of the bound: half are drawn uniformly in t, half uniformly in gamma.

        The weights correct for this. With t uniform alone, few draws would fall where gamma is steep, and those few
        would contribute as much as all others.
        """
        ends_2 = gamma.gamma(torch.tensor([0.0, 1.0], dtype=time_B.dtype, device=time_B.device))
        first, width = ends_2[0], ends_2[1] - ends_2[0]

        def share(t: Tensor) -> Tensor:
            """The fraction of the draws before t."""
            return (t + (gamma.gamma(t) - first) / width) / 2

        t_B = self.step_ends(inverse(share, time_B))
        times = self._times_at(gamma, t_B)
        if self.steps is None:
            density_B = (1 + gamma.rate(t_B) / width) / 2
        else:
            density_B = self.steps * (share(t_B) - share((t_B - 1 / self.steps).clamp(min=0)))
        return times._replace(weight_B=times.weight_B / density_B)

    def step_ends(self, t_B: Tensor) -> Tensor:
        return t_B if self.steps is None else torch.ceil(t_B * self.steps).clamp(1, self.steps) / self.steps

    def diffusion(
        self, network: Network, batch: Batch, process: Gaussian, lines: Lines, times: Times
    ) -> tuple[Tensor, Term, list[Tensor]]:
        """The trunk's vectors at z_t, the loss term (times.weight_B ‖e_x - x_hat‖²), and the tensors that it uses."""
        gamma_N, weight_N = times.gamma_B[lines.row_N], lines.counted(times.weight_B[lines.row_N])
        noise_NE = process.noise(lines.key_N, lines.position_N, AT_ZT)
        z_NE = process.noised(lines.x_N, gamma_N, noise_NE)
        h_ND = self._read(network, batch, lines, z_NE, gamma_N, times.level_B)

        def term(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
            x_C, gamma_C = lines.x_N[lo:hi], gamma_N[lo:hi]
            with full_precision(logits_CI):
                # z_t is recomputed: the tensors that a term names must not depend on each other, and the given z_t
                # depends on the embeddings
                log_p_CI = self.log_probs(process, logits_CI, process.noised(x_C, gamma_C, noise_NE[lo:hi]), gamma_C)
                error_C = process.squared_error(log_p_CI.exp(), x_C)
                return weight_N[lo:hi].to(error_C) * error_C

        return h_ND, term, [*self.learned(process), gamma_N, weight_N]

    def reconstruction(
        self, network: Network, batch: Batch, process: Gaussian, lines: Lines
    ) -> tuple[Tensor, Term, list[Tensor]]:
        """The trunk's vectors at z_0, and -log x_theta(z_0)[x] for each; used if the process `reads_z0`."""
        gamma_N, noise_NE = self.at_zero(process, lines)
        zero_B = torch.zeros(len(batch.x_BL), device=noise_NE.device)
        h_ND = self._read(network, batch, lines, process.noised(lines.x_N, gamma_N, noise_NE), gamma_N, zero_B)

        def term(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
            x_C, gamma_C = lines.x_N[lo:hi], gamma_N[lo:hi]
            with full_precision(logits_CI):
                log_p_CI = self.log_probs(process, logits_CI, process.noised(x_C, gamma_C, noise_NE[lo:hi]), gamma_C)
                return -log_p_CI.gather(1, x_C[:, None]).squeeze(1)

        return h_ND, term, [*self.learned(process), gamma_N]

    def rounding_nats(self, process: Gaussian, lines: Lines) -> Tensor:
        """[N] -log p(x|z_0), p ∝ N(z_0; alpha_0 e_v, sigma_0²), without the network.

        Computed in chunks, and recomputed in the backward pass.
        """
        gamma_N, noise_NE = self.at_zero(process, lines)
        size = max(64, CHUNK_NUMBERS // process.num_ids)

        def chunk(x_C: Tensor, gamma_C: Tensor, noise_CE: Tensor) -> Tensor:
            with full_precision(noise_CE):
                log_CI = process.log_likelihood(process.noised(x_C, gamma_C, noise_CE), gamma_C)
                return cross_entropy(x_C, process.mask_id)(log_CI, 0, len(x_C))

        parts = zip(*(torch.split(line, size) for line in (lines.x_N, gamma_N, noise_NE)), strict=True)
        made = [cast(Tensor, checkpoint(chunk, *part, use_reentrant=False)) for part in parts]
        return lines.counted(torch.cat(made)) if made else noise_NE.new_zeros(0)

    def at_zero(self, process: Gaussian, lines: Lines) -> tuple[Tensor, Tensor]:
        """gamma and the noise of z_0, for each line."""
        device = process.like.device
        gamma_N = process.gamma.gamma(torch.zeros(len(lines.x_N), dtype=widest(device), device=device))
        return gamma_N, process.noise(lines.key_N, lines.position_N, AT_Z0)

    def _read(
        self, network: Network, batch: Batch, lines: Lines, z_NE: Tensor, gamma_N: Tensor, level_B: Tensor
    ) -> Tensor:
        x_hat_NE = None
        if self.self_conditioning:
            x_hat_NE = self._estimate(network, batch, lines, z_NE, gamma_N, level_B)
        return self._pass(network, batch, lines, z_NE, gamma_N, level_B, x_hat_NE)

    def _pass(
        self,
        network: Network,
        batch: Batch,
        lines: Lines,
        z_NE: Tensor,
        gamma_N: Tensor,
        level_B: Tensor,
        x_hat_NE: Tensor | None = None,
    ) -> Tensor:
        tokens_BL = put(batch.x_BL, z_NE.device)
        z_BLD = self.vectors(network, tokens_BL, lines.row_N, lines.position_N, z_NE, gamma_N, x_hat_NE)
        how: dict[str, Any] = {"valid_BL": lines.valid_BL, "label_B": batch.label_B}
        return vectors_at(network, z_BLD, level_B, lines.flat_N, **how)

    def _estimate(
        self, network: Network, batch: Batch, lines: Lines, z_NE: Tensor, gamma_N: Tensor, level_B: Tensor
    ) -> Tensor:
        """[N, E] x_hat by a pass of its own over the rows that are read twice; 0 in all others."""
        twice_B = read_twice(batch, self.self_conditioning)
        none = not bool(twice_B.any())
        if none:  # sharded weights need this call from every process, so one row is read in vain
            twice_B = torch.arange(len(twice_B), device=twice_B.device) == 0
        batch, valid_BL = batch.where(twice_B), None if lines.valid_BL is None else lines.valid_BL[twice_B]
        part = Lines.of(batch, lines.where_BL[twice_B], valid_BL, z_NE.device)
        line_K = put(twice_B[lines.flat_N // lines.where_BL.shape[1]].nonzero().squeeze(1), z_NE.device)
        z_KE, gamma_K = z_NE[line_K], gamma_N[line_K]
        process, level_B = self.process(network), level_B[put(twice_B.nonzero().squeeze(1), level_B.device)]

        def mean(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
            with full_precision(logits_CI):
                log_p_CI = self.log_probs(process, logits_CI, z_KE[lo:hi], gamma_K[lo:hi])
                return process.mean(log_p_CI.exp())

        with without_gradient(z_NE.device):
            x_hat_KE = token_nats(network, self._pass(network, batch, part, z_KE, gamma_K, level_B), mean)
        x_hat_NE = torch.zeros_like(z_NE)
        return x_hat_NE if none or not len(line_K) else x_hat_NE.index_copy(0, line_K, x_hat_KE)

    def learned(self, process: Gaussian) -> list[Tensor]:
        """The tensors that require a gradient and that a term uses besides gamma and weights."""
        return [process.e_IE]

    @torch.no_grad()
    def position_nats(self, network: Network, batch: Batch) -> Tensor:
        process, lines = self.process(network), self.lines(network, batch)
        times = self.bound_times(process.gamma, put(batch.time_B, process.like.device))
        h_ND, term, _ = self.diffusion(network, batch, process, lines, times)
        nats_N = token_nats(network, h_ND, term) + lines.counted(process.prior_nats(lines.x_N))
        if process.reads_z0:
            h_ND, term, _ = self.reconstruction(network, batch, process, lines)
            nats_N += lines.counted(token_nats(network, h_ND, term))
        else:
            nats_N += self.rounding_nats(process, lines)
        return at_positions(lines.where_BL, nats_N)

    def estimator(self, network: Network | Denoiser) -> str:
        return "time" if self.steps is None else f"T={self.steps}"

    def with_estimator(self, name: str) -> Self:
        """This objective with its bound in continuous time ("time") or in T steps ("T=1000")."""
        match = re.fullmatch(r"T=([1-9]\d{0,8})", name)
        if name != "time" and not match:
            raise UsageError(f"unknown estimator {name!r}; known: time, T=<steps>")
        return cast(Self, replace(cast(Any, self), steps=int(match[1]) if match else None))

    @torch.no_grad()
    def score_queries(self, network: Network, batch: Batch, *, num_samples: int) -> Iterator[ScoreQuery]:
        process = self.process(network)
        for g, group in enumerate(bound_draws(batch.key_B, num_samples)):
            for key_1, time_1 in group:
                one = replace(batch, key_B=key_1, time_B=time_1)
                for query, position_N, nats in self._questions(network, process, one):
                    yield ScoreQuery(query, g, 1 / len(group), position_N, nats)

    def _questions(
        self, network: Network, process: Gaussian, batch: Batch
    ) -> Iterator[tuple[Query, Tensor, Callable[[Tensor], Tensor]]]:
        """For one row and one draw: the query at z_t, and at z_0 if the process reads it, with their nats."""
        lines = self.lines(network, batch)
        times = self.bound_times(process.gamma, put(batch.time_B, process.like.device))
        seen = batch.x_BL.shape[1] if lines.valid_BL is None else int(lines.valid_BL.sum())
        canvas = Canvas(batch.x_BL, process.mask_id, batch.key_B, label_B=batch.label_B)
        canvas = canvas.part(0, seen, batch.x_BL, lines.where_BL)
        position_N = lines.where_BL[0].nonzero().squeeze(1)

        def question(level_1: Tensor, gamma_N: Tensor, noise_NE: Tensor) -> Query | None:
            query = ask_about(canvas, canvas.tokens, canvas.open_BL, level_1.to(canvas.tokens.device))
            z_NE = process.noised(lines.x_N, gamma_N, noise_NE).to(canvas.tokens.device)
            return None if query is None else replace(query, latent_NE=z_NE)

        @torch.no_grad()
        def diffused(log_p_NI: Tensor) -> Tensor:
            error_N = process.squared_error(log_p_NI.to(process.like.device).exp(), lines.x_N)
            return (still_N + lines.counted(times.weight_B[lines.row_N] * error_N)).cpu().double()

        def reconstructed(log_p_NI: Tensor) -> Tensor:
            return lines.counted(-log_p_NI.to(lines.x_N.device).gather(1, lines.x_N[:, None]).squeeze(1)).cpu().double()

        still_N = lines.counted(process.prior_nats(lines.x_N))
        if not process.reads_z0:
            still_N = still_N + self.rounding_nats(process, lines)
        noise_NE = process.noise(lines.key_N, lines.position_N, AT_ZT)
        if (query := question(times.level_B, times.gamma_B[lines.row_N], noise_NE)) is None:
            return
        yield query, position_N, diffused
        if process.reads_z0 and (query := question(torch.zeros(1), *self.at_zero(process, lines))) is not None:
            yield query, position_N, reconstructed

    # --- sampling ---

    def predictor(self, network: Network) -> Predictor:
        from unmask.sampling.predictor import VectorXTheta

        self.check(network)
        process = self.process(network)

        def vectors(
            tokens_RL: Tensor, row_N: Tensor, at_N: Tensor, z_NE: Tensor, level_N: Tensor, x_hat_NE: Tensor | None
        ) -> Tensor:
            return self.vectors(network, tokens_RL, row_N, at_N, z_NE, process.gamma.of_level(level_N), x_hat_NE)

        def log_probs(logits_NI: Tensor, z_NE: Tensor, level_N: Tensor) -> Tensor:
            return self.log_probs(process, logits_NI, z_NE, process.gamma.of_level(level_N))

        mean = process.mean if self.self_conditioning else None
        return VectorXTheta(network, process, vectors=vectors, log_probs=log_probs, mean=mean)


def inverse(rising: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """The t in [0, 1] at which an increasing function has this value, by bisection.

    >>> inverse(torch.square, torch.tensor([0.25], dtype=torch.float64))
    tensor([0.5000], dtype=torch.float64)
    """
    low, high = torch.zeros_like(value), torch.ones_like(value)
    for _ in range(60):
        middle = (low + high) / 2
        below = rising(middle) < value
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Disable autocast: at an SNR of a million, bfloat16 would lose every difference."""
    with torch.autocast(like.device.type, enabled=False):
        yield
