"""Task heads: a plug-in describes one; its `build()` makes the module that reads the trunk's vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from unmask.registry import Room

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unmask.denoisers.network import Network

room = Room("unmask.heads", base="Head", helpers=("task",))


class Head(ABC):
    """The description of a task head; frozen, written to recipes and model folders."""

    room: ClassVar[Room] = room

    @abstractmethod
    def build(self, *, width: int, outputs: int, causal: bool) -> nn.Module:
        """The module, freshly initialised: out_BK = module(h_BLD, wanted_BL), K = `outputs`.

        h_BLD holds the trunk's vectors where wanted_BL is True, zeros elsewhere. causal: the vector at a position
        depends only on the tokens before it, so that at a row's first position it depends on none, and at the last one
        on all but the last token. If both strands of DNA are read in one pass, the module is called once per strand,
        with that strand's vectors in its order.
        """

    def wanted(self, valid_BL: Tensor, text_BL: Tensor, *, causal: bool) -> Tensor:
        """The positions whose vectors the head needs: the whole text. The trunk may skip the others.

        valid_BL: not padding, which is always at the end of a row. text_BL: of these, the positions that are not
        anchors.
        """
        return text_BL

    def check(self, network: Network) -> None:  # noqa: B027 (most heads take any network)
        """Raise UsageError for a network whose vectors this head cannot use."""
