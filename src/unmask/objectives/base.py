"""Training objectives: what is minimised, the bound it gives, and what a sampler may ask of the trained network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from unmask.registry import Room

if TYPE_CHECKING:
    from torch import Tensor, nn

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

    def build(self, *, num_ids: int, width: int) -> nn.Module | None:
        """Modules of the objective's own, freshly started: a learned schedule (under the name `noise`), embeddings, a
        head. None: it has none. width: of the denoiser's vectors h_ND, 0 where the denoiser does not say.

        They are optimised, averaged, sharded, checkpointed and saved with the denoiser's parameters.
        """
        return None

    def attach(self, network: Network) -> None:
        """Register what `build` returns as `network.objective`, once: a network that has it already keeps it.

        >>> import unmask
        >>> network = unmask.denoisers.DiT(hidden=8, blocks=1, heads=2).build(num_ids=5, mask_id=4)
        >>> unmask.objectives.MDLM().attach(network)
        >>> network.objective is None  # a schedule without parameters needs no module
        True
        """
        if network.objective is not None:
            return
        modules = self.build(num_ids=network.num_ids, width=network.width)
        if modules is not None:
            first = next(network.parameters(), None)
            network.objective = modules.to(first.device) if first is not None else modules
            modules.train(network.training)

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
