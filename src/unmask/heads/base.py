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

        h_BLD are the trunk's vectors where wanted_BL holds, zeros elsewhere. causal: h at a position knows only the
        tokens before it, so that of a row's first position knows nothing, that of its last one all but itself. Where
        both strands of DNA are read in one pass the module is called for each, with that strand's vectors in its order.
        """

    def wanted(self, valid_BL: Tensor, text_BL: Tensor, *, causal: bool) -> Tensor:
        """The positions whose vectors are asked for: all of the text. A trunk may save what nobody wants.

        valid_BL: what is no padding, from a row's first position on. text_BL: of that, what is no frame around the row.
        """
        return text_BL

    def check(self, network: Network) -> None:  # noqa: B027 (most heads take any network)
        """Raise UsageError for a network whose vectors this head cannot use."""
