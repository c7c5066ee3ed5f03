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
    best_is: ClassVar[Literal["least", "most"] | None] = (
        None  # which of its values is the better one, where it is known
    )

    @abstractmethod
    def measure(self, model: Model, data: Rows, *, seed: int) -> Measurement:
        """The number. data: packed rows, which say what of them is valid, prompt and text (`make_batch`).

        Everything random follows from (seed, row number), so that the number does not depend on how rows are batched.
        The measurement's protocol says how it was measured; `unmask.evaluate` adds on what.
        """


def metric_names(metrics: Sequence[Metric]) -> list[str]:
    """What metrics are called side by side: by their plug-ins' names, a second one of a kind with a number.

    >>> from unmask.metrics import MaskedAccuracy, Perplexity
    >>> metric_names([MaskedAccuracy(rate=0.1), Perplexity(), MaskedAccuracy(rate=0.5)])
    ['masked_accuracy', 'perplexity', 'masked_accuracy_2']
    """
    kinds = [room.name_of(metric) for metric in metrics]
    earlier = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
    return [kind if not num else f"{kind}_{num + 1}" for kind, num in zip(kinds, earlier, strict=True)]
