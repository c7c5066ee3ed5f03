"""Gaussian diffusion on the simplex of the vocabulary, block by block (SSD-LM, Han, Kumar, Tsvetkov 2022, 2210.17432).

A token is the corner K (2·1_v - 1), noise has standard deviation K, and the network reads softmax(z_t) times its
embeddings. The training loss is the cross-entropy of x_theta(z_t) in a block of 25 positions, given everything before
the block and nothing after it. The paper states no bound; here it is the bound of the Gaussian chain in T steps, given
the preceding tokens, summed over the blocks: ½ Σ (SNR_s - SNR_t) 4 ‖1_x - x_theta‖² plus the terms at both ends. An
estimate uses one block of each row, multiplied by the number of blocks.

What differs from the published system: blocks begin at multiples of their size, whereas published training draws where
they begin; the network learns from scratch, with one embedding for context and simplex; all positions are conditioned
on the time; the cosine schedule begins at an offset of 0.1 instead of 1e-4: its SNR at 0 is 48, at which the noisy
state alone identifies the token. With the published SNR at 0, 4e7, the bound would mostly measure probabilities in the
seventh digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.data.batch import DRAW_BLOCK, Batch
from unmask.denoisers.network import Network
from unmask.devices import put
from unmask.errors import UsageError
from unmask.objectives._entry import in_their_places
from unmask.objectives._gaussian import GaussianObjective, Lines
from unmask.objectives.chunked_loss import LossSum, weighted_cross_entropy
from unmask.processes.gamma import Cosine
from unmask.processes.gaussian import Gaussian, Simplex
from unmask.rng import uniform

if TYPE_CHECKING:
    from unmask.samplers import Sampler


@dataclass(frozen=True, kw_only=True)
class SSDLM(GaussianObjective):
    """The cross-entropy above; the bound in T = `steps`, or in continuous time for none.

    scale: K. block: positions that are noised together. offset: where on the cosine's way time begins.
    """

    scale: float = 5.0
    block: int = 25
    offset: float = 0.1
    steps: int | None = 5000

    def __post_init__(self) -> None:
        self.check_options(block=self.block)
        if not (math.isfinite(self.scale) and 0 < self.scale <= 1e4):
            raise UsageError(f"scale is the K of the simplex's corners, above 0 and at most 10000; got {self.scale}")
        if not 1e-6 <= self.offset <= 1:
            raise UsageError(f"offset must lie in 0.000001..1, got {self.offset}")

    def process(self, network: Network) -> Simplex:
        like = next((p for p in network.parameters()), torch.zeros(()))
        like = torch.empty(0, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        ids = {"num_ids": network.num_ids, "mask_id": network.mask_id}
        return Simplex(Cosine(offset=self.offset), like, scale=self.scale, block=self.block, **ids)

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
        """Probabilities times embeddings: softmax(z) at the noised positions, the token itself elsewhere.

        A network without embeddings reads the probabilities themselves.
        """
        p_NI = torch.softmax(z_NE, dim=1)
        embed = getattr(network, "embed", None)
        if embed is None:
            return in_their_places(F.one_hot(tokens_BL, network.num_ids).to(p_NI), row_N, position_N, p_NI)
        e_ID = embed(torch.arange(network.num_ids, device=tokens_BL.device))
        return in_their_places(embed(tokens_BL), row_N, position_N, p_NI.to(e_ID) @ e_ID)

    def lines(self, network: Network, batch: Batch) -> Lines:
        """One block per row, drawn among those with scored tokens; the network sees nothing after the block."""
        scored_BL = batch.scored_BL
        block_L = torch.arange(scored_BL.shape[1], device=scored_BL.device) // self.block
        first_B = torch.where(scored_BL, block_L, block_L[-1]).amin(dim=1)
        last_B = torch.where(scored_BL, block_L, 0).amax(dim=1)
        num_B = (last_B - first_B + 1).clamp(min=1)
        block_B = first_B + (uniform(batch.key_B, DRAW_BLOCK) * num_B).long().clamp(max=num_B - 1)
        valid_BL = block_L <= block_B[:, None]
        valid_BL = valid_BL if batch.valid_BL is None else valid_BL & batch.valid_BL
        where_BL = scored_BL & (block_L == block_B[:, None])
        return Lines.of(batch, where_BL, valid_BL, network.device_for(batch.x_BL), num_B)

    def loss(self, network: Network, batch: Batch) -> LossSum:
        self.check(network)
        batch = batch.drop_labels(network.label_dropout)
        process, lines = self.process(network), self.lines(network, batch)
        times = self.times(process.gamma, put(batch.time_B, process.like.device))
        h_ND, _, _ = self.diffusion(network, batch, process, lines, times)
        weight_N = lines.counted(torch.ones(len(lines.x_N), device=h_ND.device))
        return LossSum(weighted_cross_entropy(network, h_ND, lines.x_N, weight_N), batch.num_tokens)

    def learned(self, process: Gaussian) -> list[Tensor]:
        return []

    def sampler(self) -> Sampler:
        from unmask.samplers.simplex import Simplex as Projection

        return Projection()
