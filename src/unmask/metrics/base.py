"""Metrics: one number about a model on some data, with its interval and the protocol of the measurement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from unmask.registry import Room

if TYPE_CHECKING:
    from unmask.data.packing import Rows
    from unmask.evaluation.measurement import Measurement
    from unmask.model import Model

room = Room("unmask.metrics", base="Metric")


class Metric(ABC):
    """What `unmask.evaluate` and `unmask eval --metric` measure. A plug-in is a frozen dataclass of its options."""

    room: ClassVar[Room] = room
    best_is: ClassVar[Literal["least", "most"] | None] = None  # which values are better, if known

    @abstractmethod
    def measure(self, model: Model, data: Rows, *, seed: int) -> Measurement:
        """The measurement. data: packed rows, which define which tokens are valid, prompt and text (`make_batch`).

        Everything random follows from (seed, row number), so that the value does not depend on how rows are batched.
        The measurement's protocol describes the method; `unmask.evaluate` adds the data.
        """


def metric_names(metrics: Sequence[Metric]) -> list[str]:
    """Names for several metrics: those of their plug-ins, with a number for further ones of the same kind.

    >>> from unmask.metrics import MaskedAccuracy, Perplexity
    >>> metric_names([MaskedAccuracy(rate=0.1), Perplexity(), MaskedAccuracy(rate=0.5)])
    ['masked_accuracy', 'perplexity', 'masked_accuracy_2']
    """
    kinds = [room.name_of(metric) for metric in metrics]
    earlier = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
    return [kind if not num else f"{kind}_{num + 1}" for kind, num in zip(kinds, earlier, strict=True)]
