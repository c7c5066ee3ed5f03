"""Caduceus: Mamba read in both directions; with `equivariance`, it treats both strands of DNA alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.data.complement import check_complement, complement_of, reversed_places
from unmask.denoisers import Denoiser
from unmask.denoisers.flat_rows import gather_positions, take_rows
from unmask.denoisers.mamba import mixer_sizes
from unmask.denoisers.network import Attend, LinearHead, refuse_options
from unmask.denoisers.recurrent.layers import Block, Branch, Conditioning, Layered, RMSNorm, Sizes, check_sizes
from unmask.denoisers.recurrent.mixer import Mixer
from unmask.errors import UsageError
from unmask.registry import check_fields

if TYPE_CHECKING:
    from unmask.data.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Caduceus(Denoiser):
    """Blocks x + mixer(norm(x)) whose mixers read ahead and back between the same projections; 118 x 4 is the DNA
    experiments' size.

    equivariance: none. ps: the logits of a reverse complement are the reverse complement of the logits, since both
    strands pass through the same weights, in training, too. ph: trained as none, on rows of either strand; in use its
    logits are the average of both strands'.
    complement: of each id the one that it is on the other strand; training fills it in from the tokenizer's letters.
    conditioning, cond_dim, classes and label_dropout: as for a dit.
    """

    hidden: int = 118
    blocks: int = 4
    expand: int = 2
    states: int = 16
    taps: int = 4
    rank: int = 0
    tied: bool = True
    equivariance: Literal["none", "ps", "ph"] = "none"
    complement: tuple[int, ...] = ()
    conditioning: Conditioning = "none"
    cond_dim: int = 128
    classes: int = 0
    label_dropout: float = 0.1

    causal = False

    def __post_init__(self) -> None:
        check_fields(self)
        own = {"hidden": self.hidden, "blocks": self.blocks, "expand": self.expand, "states": self.states}
        check_sizes(
            conditioning=self.conditioning,
            cond_dim=self.cond_dim,
            classes=self.classes,
            label_dropout=self.label_dropout,
            taps=self.taps,
            **own,
        )
        if self.rank < 0:
            raise UsageError(f"rank must be at least 1, or 0 for hidden / 16; got {self.rank}")

    @property
    def uses_level(self) -> bool:
        return self.conditioning != "none"

    def for_tokenizer(self, tokenizer: Tokenizer) -> Self:
        if self.equivariance == "none" or self.complement:
            return self
        return replace(self, complement=complement_of(tokenizer))

    def build(self, *, num_ids: int, mask_id: int) -> CaduceusNetwork:
        return CaduceusNetwork(self, num_ids=num_ids, mask_id=mask_id)


class CaduceusNetwork(Layered):
    complement_I: Tensor

    def __init__(self, config: Caduceus, *, num_ids: int, mask_id: int) -> None:
        sizes = mixer_sizes(
            hidden=config.hidden, expand=config.expand, states=config.states, taps=config.taps, rank=config.rank
        )
        cond_dim = config.cond_dim if config.conditioning != "none" or config.classes else 0
        D, conditioned = config.hidden, (config.conditioning, config.cond_dim, config.classes, config.label_dropout)
        mixers = (Mixer(sizes, both=True, depth=config.blocks) for _ in range(config.blocks))
        blocks = [Block(Branch(RMSNorm(D), mixer, D, cond_dim)) for mixer in mixers]
        super().__init__("caduceus", Sizes(num_ids, mask_id, D, config.tied, *conditioned), blocks, RMSNorm(D))
        self.config = config
        if config.equivariance != "none":
            self.strand_width = D
            check_complement(config.complement, num_ids=num_ids, mask_id=mask_id)
        if config.equivariance == "ps":
            self.width = 2 * D
        self.register_buffer("complement_I", torch.tensor(config.complement, dtype=torch.int64), persistent=False)

    @property
    def reads_both(self) -> bool:
        """Whether vectors are those of both strands, beside each other."""
        return self.config.equivariance == "ps" or (self.config.equivariance == "ph" and not self.training)

    def trunk(
        self,
        z: Tensor,
        level: Tensor | None = None,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        cond: Tensor | None = None,
        at_BK: Tensor | None = None,
        **other: Any,
    ) -> Tensor:
        if not self.reads_both:
            return super().trunk(z, level, valid_BL=valid_BL, attend=attend, cond=cond, at_BK=at_BK, **other)
        refuse_options(self.name, **other)
        h_BLD = self._both(z, level, self.seen(attend, valid_BL), cond)
        return h_BLD if at_BK is None else gather_positions(h_BLD, at_BK)

    def trunk_at(
        self,
        z: Tensor,
        level: Tensor | None,
        flat_N: Tensor,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        cond: Tensor | None = None,
    ) -> Tensor:
        if not self.reads_both:
            return super().trunk_at(z, level, flat_N, valid_BL=valid_BL, attend=attend, cond=cond)
        h_BLD = self._both(z, level, self.seen(attend, valid_BL), cond)
        return take_rows(h_BLD.flatten(0, 1), flat_N)

    def _both(self, z: Tensor, level: Tensor | None, valid_BL: Tensor | None, cond: Tensor | None) -> Tensor:
        """[B, L, 2 D]: what is read at each position of the rows, and at its place on the other strand.

        The halves of the channels meet in the head alone, so both strands are rows of one batch.
        """
        if z.is_floating_point():
            raise UsageError("reverse complements are of tokens: a caduceus that reads vectors has equivariance = none")
        places_BL = reversed_places(z, valid_BL)
        other_BL = self.complement_I[z.gather(1, places_BL)]
        twice = [None if t is None else torch.cat([t, t]) for t in (valid_BL, cond)]
        level = None if level is None else torch.cat([level, level if level.ndim == 1 else level.gather(1, places_BL)])
        h_BLD, other_BLD = self.final(self.read(torch.cat([z, other_BL]), level, *twice)).chunk(2)
        return torch.cat([h_BLD, gather_positions(other_BLD, places_BL)], dim=-1)

    def head(self, h_ND: Tensor) -> Tensor:
        if h_ND.shape[-1] == self.embed.embedding_dim:
            return super().head(h_ND)
        return F.linear(h_ND, self._both_weight())

    def _both_weight(self) -> Tensor:
        """The head on both strands' vectors: a token here is its complement there."""
        weight_ID = self.output.weight
        both = torch.cat([weight_ID, weight_ID[self.complement_I]], dim=1)
        return both if self.config.equivariance == "ps" else both / 2

    def head_linear(self) -> nn.Linear | LinearHead:
        return LinearHead(self._both_weight(), None) if self.reads_both else self.output
