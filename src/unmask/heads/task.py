"""What a fine-tuned network answers, and how a text and its pair become a row that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unmask.errors import UsageError
from unmask.heads.base import Head
from unmask.heads.pooled import Pooled
from unmask.registry import check_fields

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.denoisers.network import Network

Kind = Literal["classification", "regression"]
MAX_LABELS, MAX_WORD = 10_000, 1_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """Classes by their words, or a number; of single texts or of pairs. Written to model folders.

    length: of a row in tokens. between: the text between those of a pair; empty: an end-of-text token. mean, scale: of
    a number; the network's output counts from the mean in units of the scale. text, pair, label: the columns of the
    files that it was trained on.
    """

    kind: Kind = "classification"
    labels: tuple[str, ...] = ()
    pairs: bool = False
    head: Head = Pooled()
    length: int
    between: str = ""
    mean: float = 0.0
    scale: float = 1.0
    text: str = "text"
    pair: str | None = None
    label: str = "label"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind == "regression" and self.labels:
            raise UsageError("a regression has no labels: leave them out, or set kind = classification")
        if self.kind == "classification":
            check_words(self.labels)
        if self.length < 2:
            raise UsageError(f"length must be at least 2, got {self.length}")
        if not self.scale > 0:
            raise UsageError(f"scale must be above 0, got {self.scale}")

    @property
    def outputs(self) -> int:
        return len(self.labels) if self.kind == "classification" else 1

    def attach(self, network: Network) -> None:
        """Make the head and register it as `network.task`, so that optimizer, average and model folder have it.

        >>> import unmask
        >>> network = unmask.denoisers.DiT(hidden=8, blocks=1, heads=2).build(num_ids=5, mask_id=4)
        >>> Task(labels=("no", "yes"), length=16).attach(network)
        >>> network.task.output.weight.shape
        torch.Size([2, 8])
        """
        if network.width < 1:
            raise UsageError(
                "this network does not say how wide its vectors are (`width`), so it can have no task head"
            )
        self.head.check(network)
        first = next(network.parameters())
        head = self.head.build(width=network.width, outputs=self.outputs, causal=network.causal)
        network.task = head.to(first.device)
        head.train(network.training)


def check_words(labels: Sequence[str]) -> None:
    """Refuse classes that are too few, too many, empty or named twice.

    >>> check_words(["yes"])
    Traceback (most recent call last):
    unmask.errors.UsageError: a classification has at least 2 classes, got 1: 'yes'
    """
    if not 2 <= len(labels) <= MAX_LABELS:
        few = f"at least 2 classes, got {len(labels)}" + (f": {labels[0][:40]!r}" if labels else "")
        raise UsageError(f"a classification has {few if len(labels) < 2 else f'at most {MAX_LABELS} classes'}")
    if any(not word or len(word) > MAX_WORD for word in labels):
        raise UsageError(f"a class is a word of 1 to {MAX_WORD} characters: one here is empty or longer")
    if len(set(labels)) < len(labels):
        raise UsageError("the classes are not all different: name each once")


def task_outputs(task: Task, network: Network, ids_BL: Tensor, valid_BL: Tensor, text_BL: Tensor) -> Tensor:
    """out_BK in float32: the head's answer to rows of ids, which may still be on the host.

    valid_BL: what is not padding. text_BL: of that, what is no frame around the row.
    """
    import torch

    from unmask.denoisers.flat_rows import put_rows
    from unmask.denoisers.ragged import vectors_at
    from unmask.devices import put

    assert network.task is not None
    wanted_BL = task.head.wanted(valid_BL, text_BL, causal=network.causal)
    flat_N = wanted_BL.flatten().nonzero().squeeze(1)
    level_B = torch.zeros(len(ids_BL))  # nothing is masked
    h_ND = vectors_at(network, ids_BL, level_B, flat_N, valid_BL=valid_BL)
    B, L = ids_BL.shape
    h_BLD = put_rows(h_ND.float(), put(flat_N, h_ND.device), B * L).view(B, L, -1)
    out_BK: Tensor = network.task(h_BLD, put(wanted_BL, h_ND.device))
    return out_BK.float()
