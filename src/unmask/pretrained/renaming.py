"""Tensors of a source under our names: which of theirs each one is, and how it is converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.data.tokenizers import Tokenizer
from unmask.denoisers import Denoiser
from unmask.errors import ModelFolderError, UsageError
from unmask.pretrained.base import Source
from unmask.storage.model_folder import NoStart, unshared
from unmask.storage.untrusted import printable

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class Their(NamedTuple):
    """Their tensor of that name, converted to ours. equals: other names that may hold the same tensor, if it
    is shared."""

    name: str
    turned: Callable[[Tensor], Tensor] = as_it_is
    equals: tuple[str, ...] = ()


class Renamed(Mapping[str, Tensor]):
    """The weights of a network, in float32, each read when requested. Names and shapes are checked first.

    known: the source's spelling of each name in `theirs`, if there are several; tensors neither listed there nor in
    `unused` are refused.
    """

    def __init__(
        self,
        source: Source,
        denoiser: Denoiser,
        tokenizer: Tokenizer,
        theirs: Mapping[str, Their],
        *,
        known: Mapping[str, str],
        unused: frozenset[str] = frozenset(),
    ) -> None:
        self._source, self._theirs, self._known = source, theirs, known
        shapes = source.shapes()
        try:
            with torch.device("meta"), NoStart():
                own = unshared(denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id))
        except UsageError as e:
            raise ModelFolderError(f"{source.where}: config.json describes no network: {e}") from None
        except (RuntimeError, OverflowError, TypeError):  # the product of the sizes overflows
            raise ModelFolderError(f"{source.where}: the sizes of config.json are beyond any network") from None
        assert own.keys() == theirs.keys(), own.keys() ^ theirs.keys()
        for ours, their in theirs.items():
            name = self._place(their)
            if shapes[name].dtype not in FLOATS:
                raise ModelFolderError(f"{source.where}: {name} holds {shapes[name].dtype}, no floating-point numbers")
            try:
                shape = tuple(their.turned(shapes[name]).shape)
            except (RuntimeError, IndexError):
                shape = tuple(shapes[name].shape)
            if shape != tuple(own[ours].shape):
                raise ModelFolderError(
                    f"{source.where}: {name} has shape {tuple(shapes[name].shape)}, which the config.json of a "
                    f"{source.model_type} does not ask for"
                )
        used = {name for their in theirs.values() for name in (their.name, *their.equals)} | unused
        if more := sorted(known.keys() - used):
            raise ModelFolderError(
                f"{source.where} holds the tensor {printable(known[more[0]])}, of which the config.json of a "
                f"{source.model_type} says nothing"
            )

    def _place(self, their: Their) -> str:
        names = [self._known[name] for name in (their.name, *their.equals) if name in self._known]
        if not names:
            raise ModelFolderError(
                f"{self._source.where} lacks the tensor {their.name}, which its config.json promises"
            )
        return names[0]

    def __getitem__(self, ours: str) -> Tensor:
        their = self._theirs[ours]
        name = self._place(their)
        tensor = self._source.tensors[name].float()
        for other in their.equals:
            place = self._known.get(other, name)
            if place != name and not self._source.tensors[place].float().equal(tensor):
                raise UsageError(
                    f"{self._source.where}: {name} and {place} differ, and are one here: this model is another kind"
                )
        if not bool(torch.isfinite(tensor).all()):
            raise ModelFolderError(f"{self._source.where}: {name} holds numbers that are not finite; it is damaged")
        return their.turned(tensor).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)


def whole(source: Source, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number from the config."""
    value = config.get(key, default)
    if value is None:
        raise ModelFolderError(f"{source.where}: config.json does not say {key}")
    if type(value) is not int or not 1 <= value <= 1 << 24:
        raise ModelFolderError(
            f"{source.where}: {key} of config.json is {printable(repr(value))}, no size of a network"
        )
    return value


def check_rows(source: Source, shapes: Mapping[str, Tensor], num_ids: int) -> None:
    """Refuse a vocabulary larger than every tensor, before a list of its ids costs memory and time."""
    if num_ids > max((t.shape[0] for t in shapes.values() if t.ndim), default=0):
        raise ModelFolderError(
            f"{source.where}: vocab_size of config.json is {printable(num_ids)}, no tensor has so many rows"
        )


def check_ordinary(source: Source, config: Mapping[str, Any], ordinary: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse keys that change what the network computes; each is given with the values that we support."""
    for key, values in ordinary.items():
        if key in config and config[key] not in values:
            said = printable(repr(config[key]), 60)
            raise UsageError(
                f"{source.where}: {key} = {said} in config.json is a network that none of our denoisers computes"
            )


def tied_or_own(head: str, known: Mapping[str, str], source: Source) -> bool:
    """Whether the head is the embedding: because the config says so, or because there is no other."""
    return source.config.get("tie_word_embeddings", True) is not False or head not in known
