"""The task of a fine-tuned network, and how a text and its pair become a row of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unmask.data.complement import check_complement, reversed_places
from unmask.errors import UsageError
from unmask.heads.base import Head
from unmask.heads.pooled import Pooled
from unmask.registry import came_later, check_fields

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.denoisers.network import Network

Kind = Literal["classification", "regression"]
MAX_LABELS, MAX_WORD = 10_000, 1_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: classes named by words, or a number; for single texts or pairs. Stored in model folders.

    length: of a row in tokens. between: the text between the two of a pair; empty: an end-of-text token. mean, scale:
    of a regression; the network's output is relative to the mean, in units of the scale. text, pair, label: the columns
    of the files that it was trained on. complement: the complement of each id on the other strand of DNA; if set,
    answers are conjoined: the same for a sequence and its reverse complement. types: whether a network that can tell
    the texts of a pair apart is told which is the second.
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
    complement: tuple[int, ...] = came_later((), before=())
    types: bool = came_later(True, before=False)

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
        if self.conjoined and self.pairs:
            raise UsageError("answers to pairs cannot be conjoined, which is of one sequence: set conjoin = false")

    @property
    def outputs(self) -> int:
        return len(self.labels) if self.kind == "classification" else 1

    @property
    def conjoined(self) -> bool:
        return bool(self.complement)

    def joins_vectors(self, network: Network) -> bool:
        """Whether a conjoined head reads both strands from the vectors of one pass, instead of from two rows.

        >>> import unmask
        >>> Task(labels=("no", "yes"), length=16).joins_vectors(unmask.denoisers.DiT().build(num_ids=5, mask_id=4))
        False
        """
        return self.conjoined and network.strand_width > 0

    def tells_pairs(self, network: Network) -> bool:
        """Whether the network is told which text of a pair is the second, by its token types.

        >>> import unmask
        >>> Task(labels=("no", "yes"), length=16).tells_pairs(unmask.denoisers.DiT().build(num_ids=5, mask_id=4))
        False
        """
        return self.pairs and self.types and network.tells_pairs

    def width(self, network: Network) -> int:
        """The width of the vectors that the head reads."""
        return network.strand_width if self.joins_vectors(network) else network.width

    def attach(self, network: Network) -> None:
        """Build the head and register it as `network.task`, so that optimizer, average and model folder include it.

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
        if self.conjoined:
            check_complement(self.complement, num_ids=network.num_ids, mask_id=network.mask_id)
        self.head.check(network)
        first = next(network.parameters())
        head = self.head.build(width=self.width(network), outputs=self.outputs, causal=network.causal)
        network.task = head.to(first.device)
        head.train(network.training)


def check_words(labels: Sequence[str]) -> None:
    """Refuse too few or too many classes, and empty or repeated names.

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


def task_outputs(
    task: Task, network: Network, ids_BL: Tensor, valid_BL: Tensor, text_BL: Tensor, second_BL: Tensor
) -> Tensor:
    """out_BK in float32: the head's outputs for rows of ids, which may still be on the host.

    valid_BL: not padding. text_BL: of these, not anchors. second_BL: of these, from a pair's second text on. If the
    network's vectors describe both strands, a conjoined head reads each strand from its own start to its end, and the
    two outputs are averaged; rows then contain only the sequence.
    """
    import torch

    from unmask.denoisers.flat_rows import put_rows
    from unmask.denoisers.ragged import vectors_at
    from unmask.devices import put

    assert network.task is not None
    wanted_BL = task.head.wanted(valid_BL, text_BL, causal=network.causal)
    places_BL = reversed_places(ids_BL, valid_BL)
    both = task.joins_vectors(network)
    asked_BL = wanted_BL | wanted_BL.gather(1, places_BL) if both else wanted_BL
    flat_N = asked_BL.flatten().nonzero().squeeze(1)
    level_B = torch.zeros(len(ids_BL))  # nothing is masked
    told_BL = second_BL if task.tells_pairs(network) else None
    h_ND = vectors_at(network, ids_BL, level_B, flat_N, valid_BL=valid_BL, second_BL=told_BL)
    device = h_ND.device
    B, L = ids_BL.shape
    h_BLD = put_rows(h_ND.float(), put(flat_N, device), B * L).view(B, L, -1)
    wanted_BL = put(wanted_BL, device)
    width = task.width(network)
    outs: list[Tensor] = []
    for lo in range(0, h_BLD.shape[-1] if both else width, width):
        part_BLD = h_BLD[..., lo : lo + width]
        if lo:  # the other strand's vectors are at the positions of the first; it is read from the end
            part_BLD = part_BLD.gather(1, put(places_BL, device).unsqueeze(-1).expand(-1, -1, width))
        outs.append(network.task(part_BLD * wanted_BL.unsqueeze(-1) if both else part_BLD, wanted_BL).float())
    return torch.stack(outs).mean(dim=0)
