"""Metrics: one number about a model on some data, with its interval and the protocol it was measured by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from unmask.registry import Room

if TYPE_CHECKING:
    from unmask.data.packing import Rows
    from unmask.evaluation.measurement import Measurement
    from unmask.model import Model

room = Room("unmask.metrics", base="Metric")


class Metric(ABC):
    """What `unmask.evaluate` and `unmask eval --metric` measure. A plug-in is a frozen dataclass of its options."""

    room: ClassVar[Room] = room

    @abstractmethod
    def measure(self, model: Model, data: Rows, *, seed: int) -> Measurement:
        """The number. data: packed rows, which say what of them is valid, prompt and text (`make_batch`).

        Everything random follows from (seed, row number), so that the number does not depend on how rows are batched.
        The measurement's protocol says how it was measured; `unmask.evaluate` adds on what.
        """
