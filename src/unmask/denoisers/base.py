"""Denoisers: the networks x_theta. A plug-in describes one; its `build()` makes the module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from unmask.registry import Room

if TYPE_CHECKING:
    from unmask.denoisers.network import Network

room = Room("unmask.denoisers", base="Denoiser", helpers=("network", "flat_rows", "ragged"))


class Denoiser(ABC):
    """The description of a network; frozen, written to recipes and model folders."""

    room: ClassVar[Room] = room

    @property
    @abstractmethod
    def causal(self) -> bool:
        """Whether position l sees only what stands before it."""

    @property
    @abstractmethod
    def uses_level(self) -> bool:
        """Whether the network looks at the noise level."""

    @abstractmethod
    def build(self, *, num_ids: int, mask_id: int) -> Network:
        """The module, freshly initialised, for a vocabulary of `num_ids` ids, the mask among them."""
