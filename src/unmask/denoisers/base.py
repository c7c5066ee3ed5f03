"""Denoisers: the networks x_theta. A plug-in describes one; its `build()` creates the module."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from unmask.errors import UsageError
from unmask.registry import Room

if TYPE_CHECKING:
    from unmask.data.tokenizers import Tokenizer
    from unmask.denoisers.network import Network

room = Room("unmask.denoisers", base="Denoiser", helpers=("network", "flat_rows", "ragged", "recorded", "recurrent"))


def other_way(denoiser: object, *, causal: bool) -> str:
    """Advice for an error message, if a denoiser is causal but must not be, or the reverse.

    >>> other_way(None, causal=True)
    'set denoiser.causal = true'
    """
    description = getattr(denoiser, "config", denoiser)
    fixed = dataclasses.is_dataclass(description) and "causal" not in {f.name for f in dataclasses.fields(description)}
    if not fixed:
        return f"set denoiser.causal = {str(causal).lower()}"
    return f"this one always does otherwise, so take another, such as {'mamba' if causal else 'caduceus'} or dit"


class Denoiser(ABC):
    """The description of a network; frozen, written to recipes and model folders."""

    room: ClassVar[Room] = room
    # Of a description that comes with pretrained weights: the fields that the recipe decides all the same.
    chosen_by_recipe: ClassVar[tuple[str, ...]] = ()

    @property
    def framed(self) -> bool:
        """Whether all rows begin and end with fixed tokens, also rows cut out of a stream, as encoders require."""
        return False

    @property
    @abstractmethod
    def causal(self) -> bool:
        """Whether position l sees only the positions before it."""

    @property
    @abstractmethod
    def uses_level(self) -> bool:
        """Whether the network is conditioned on the noise level."""

    def for_tokenizer(self, tokenizer: Tokenizer) -> Self:
        """This description completed with information from the vocabulary, as it is built and saved."""
        return self

    @abstractmethod
    def build(self, *, num_ids: int, mask_id: int) -> Network:
        """Create the module with fresh weights, for a vocabulary of `num_ids` ids including the mask.

        A run may call it more than once, and from another thread (`training/warm_up.py`): it must change nothing else.
        """

    def check_start(self, *, num_ids: int, mask_id: int) -> None:  # noqa: B027 (most describe all of it)
        """Raise if the description is not explicit enough to train from scratch."""

    def describe(self, network: Network) -> None:
        """Attach this description to the network that `build` returned; raise if it cannot be trained and saved."""
        from unmask.denoisers.network import Network

        made: object = network
        if not isinstance(made, Network):
            raise UsageError(f"{type(self).__name__}.build returned {type(made).__name__}, which is no Network")
        for name in ("num_ids", "mask_id"):
            if not isinstance(getattr(made, name, None), int):
                raise UsageError(f"the network of {type(self).__name__} has no {name}: set it where it is made")
        made.config = self
