"""Training objectives: what is minimised, the bound it gives, and what a sampler may ask of the trained network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from unmask.registry import Room

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.data.batch import Batch
    from unmask.denoisers import Denoiser
    from unmask.denoisers.network import Network
    from unmask.evaluation.bound import Bound
    from unmask.objectives.chunked_loss import LossSum
    from unmask.samplers import Sampler
    from unmask.sampling.predictor import Predictor

room = Room("unmask.objectives", base="Objective", helpers=("chunked_loss", "terms"))


class Objective(ABC):
    """A per-sequence upper bound of -log p(x) in nats, and its stochastic estimate for training."""

    room: ClassVar[Room] = room

    @abstractmethod
    def check(self, denoiser: Denoiser | Network) -> None:
        """Raise UsageError with a sentence when this objective and this denoiser make no sense together."""

    @abstractmethod
    def loss(self, denoiser: Network, batch: Batch) -> LossSum:
        """What is trained: a sum of nats over the batch's scored tokens, with their count."""

    @abstractmethod
    def bound(
        self,
        denoiser: Network,
        x_BL: Tensor,
        valid_BL: Tensor | None = None,
        *,
        scored_BL: Tensor | None = None,
        seed: int = 0,
        first_row: int = 0,
        num_samples: int = 8,
        estimator: str | None = None,
        label_B: Tensor | None = None,
    ) -> Bound:
        """The bound of each sequence, given its class where it has one, from `num_samples` draws of noise each.

        Row i is driven by (seed, first_row + i), so that a set of rows may be scored in batches of any size.
        """

    @abstractmethod
    def estimator(self, denoiser: Network | Denoiser) -> str:
        """Which form `bound` takes unless told otherwise; part of the protocol that goes beside a number."""

    @abstractmethod
    def predictor(self, denoiser: Network) -> Predictor:
        """What a sampler consumes."""

    @abstractmethod
    def sampler(self) -> Sampler:
        """The sampler that follows this objective's law, for whoever names none."""
