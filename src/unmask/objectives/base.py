"""Training objectives: what is minimised, the bound it gives, and what the trained network predicts for a sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, Self, cast

from unmask.errors import UsageError
from unmask.registry import Room

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unmask.data.batch import Batch
    from unmask.data.rows import Ints
    from unmask.denoisers import Denoiser
    from unmask.denoisers.network import Network
    from unmask.evaluation.bound import Bound
    from unmask.model import Model
    from unmask.objectives.chunked_loss import LossSum
    from unmask.objectives.draws import Draws
    from unmask.objectives.score_queries import ScoreQuery
    from unmask.processes.base import Process
    from unmask.samplers import Sampler
    from unmask.sampling.predictor import Predictor

room = Room("unmask.objectives", base="Objective", helpers=("chunked_loss", "draws", "score_queries", "terms"))

# What the evaluated value is: a likelihood, an upper bound of -log p, or neither (a pseudo-likelihood).
Kind = Literal["exact", "upper bound", "pseudo"]


class Objective(ABC):
    """A training objective. A subclass defines how a batch is scored; training, evaluation, sampling and the server do
    the rest.

    A subclass defines `check`, `loss`, `position_nats` (or `row_nats`), `process`, `predictor` and `sampler`. All
    randomness comes from the batch (`key_B`, `time_B`), so a row's value does not depend on the other rows.
    """

    room: ClassVar[Room] = room
    kind: ClassVar[Kind] = "upper bound"

    # --- the trained model ---

    def build(self, *, num_ids: int, width: int) -> nn.Module | None:
        """Create the objective's own modules: a learned schedule (named `noise`), embeddings, a head; or None.

        width: of the denoiser's vectors h_ND, 0 if unknown. The modules are optimised, averaged, sharded, checkpointed
        and saved with the denoiser's parameters. An objective that trains a schedule overrides this method; all others
        refuse a schedule with parameters, which would never be updated.
        """
        noise = getattr(self, "noise", None)
        if noise is not None and noise.build() is not None:
            raise UsageError(
                f"{type(self).__name__} does not train the parameters of the schedule {type(noise).__name__}: "
                "use a schedule without any, or the objective mdlm"
            )
        return None

    def attach(self, network: Network) -> None:
        """Register the module that `build` returns as `network.objective`, unless the network already has one.

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

    def prepare(self, network: Network, token_counts: Callable[[], Ints]) -> None:
        """Set statistics of the training rows in the modules of `build`; called once, before a run's first step.

        token_counts(): [num_ids] the number of occurrences of each id. It reads all rows, so call it only if needed.
        Values stored in parameters or buffers are saved with the model, which then loads without the corpus.
        """
        return

    @abstractmethod
    def check(self, denoiser: Denoiser | Network) -> None:
        """Raise UsageError if this objective cannot train this denoiser."""

    @abstractmethod
    def process(self, network: Network) -> Process | None:
        """The forward process, with the learned schedule if `build` created one; None if nothing is noised."""

    def frozen(self) -> dict[str, Model]:
        """Models that the loss calls but does not train, such as a teacher: not optimised, averaged or saved."""
        return {}

    def check_fixed(self, network: Network) -> None:
        """Refuse a process that can turn a token into any other, if the network never predicts some of the ids."""
        process = self.process(network)
        if network.fixed_ids and process is not None and process.name != "absorbing":
            raise UsageError(
                f"this denoiser never predicts its special tokens, which the process {process.name} of "
                f"{type(self).__name__} would put into a text: use an objective that masks, such as mdlm"
            )

    def check_whole(self, network: Network) -> None:
        """Raise before a run's first step if something is missing that the run needs only later."""
        self.check_fixed(network)
        name, base = type(self).__name__, Objective
        if type(self).row_nats is base.row_nats and type(self).position_nats is base.position_nats:
            raise UsageError(f"{name} cannot be evaluated: define position_nats (or row_nats)")
        for method, made in (("predictor", self.predictor(network)), ("sampler", self.sampler())):
            if cast(object, made) is None:
                raise UsageError(f"{name}.{method} returned None: return a {method}, without which it cannot write")

    # --- training ---

    @abstractmethod
    def loss(self, network: Network, batch: Batch) -> LossSum:
        """The training loss: a sum of nats over the batch's scored tokens, with their count."""

    # --- evaluation ---

    def row_nats(self, network: Network, batch: Batch) -> Tensor:
        """[B] one unbiased estimate of each row's bound: the mean over keys and times is the bound."""
        return self.position_nats(network, batch).sum(dim=1)

    def position_nats(self, network: Network, batch: Batch) -> Tensor:
        """[B, L] the same estimate, position by position."""
        raise UsageError(f"{type(self).__name__} does not say which token its bound comes from")

    @property
    def one_reading(self) -> bool:
        """Whether the value is deterministic, so that one network call per row is enough."""
        return self.kind == "exact"

    def estimator(self, network: Network | Denoiser) -> str:
        """The form of `bound` that is used by default; part of the protocol reported with a value."""
        return "exact" if self.kind == "exact" else "own"

    def with_estimator(self, name: str) -> Self:
        """This objective with another form of its bound."""
        if name not in (None, "own", "exact") or (name == "exact") != (self.kind == "exact"):
            raise UsageError(f"the estimator {name!r} is none of {type(self).__name__}: leave it out")
        return self

    def bound(
        self,
        network: Network,
        x_BL: Tensor,
        valid_BL: Tensor | None = None,
        *,
        scored_BL: Tensor | None = None,
        seed: int = 0,
        first_row: int = 0,
        num_samples: int | Draws = 8,
        estimator: str | None = None,
        label_B: Tensor | None = None,
    ) -> Bound:
        """The bound of each sequence, given its class if it has one, from `num_samples` estimates (`row_nats`) each.

        num_samples: a number, or a `Draws`, which also determines how the draws are grouped. The randomness of row i
        depends on (seed, first_row + i) only, so rows may be scored in batches of any size.
        """
        from unmask.evaluation.estimate import estimate_bound

        how = {"seed": seed, "first_row": first_row, "num_samples": num_samples, "estimator": estimator}
        return estimate_bound(self, network, x_BL, valid_BL, scored_BL=scored_BL, label_B=label_B, **how)  # type: ignore[arg-type]

    def score_queries(self, network: Network, batch: Batch, *, num_samples: int) -> Iterator[ScoreQuery] | None:
        """The queries that make up the score of the single row in `batch`, so that a server can batch them with others.

        batch.key_B is the row's key. None: the row can only be scored by `bound`, in one piece.
        """
        return None

    # --- sampling ---

    @abstractmethod
    def predictor(self, network: Network) -> Predictor:
        """The predictor through which samplers call the network."""

    @abstractmethod
    def sampler(self) -> Sampler:
        """The default sampler, which samples from this objective's reverse process."""
