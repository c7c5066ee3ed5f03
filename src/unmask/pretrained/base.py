"""A pretrained model before (`Source`) and after (`Pretrained`) a family has read it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers
    from torch import Tensor

    from unmask.data.tokenizers import Tokenizer
    from unmask.denoisers import Denoiser

PREFIX = "hf:"  # prefix of a path or a hub name, in places where one of our models may also be named


class Source(ABC):
    """A model as a third party has saved it; nothing in it is executed, and no tensor is read before it is requested.

    where: its name in messages. config: its config.json, parsed, with transformers' keys. special: the spellings of its
    special tokens by role (`mask_token`, `cls_token`, `sep_token`, `bos_token`, `eos_token`, `pad_token`, `unk_token`),
    as far as they are given.
    """

    where: str
    config: dict[str, Any]

    @property
    def model_type(self) -> str:
        kind = self.config.get("model_type")
        return kind if isinstance(kind, str) else ""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Its tensors by their original names, each read when requested."""

    @abstractmethod
    def shapes(self) -> dict[str, Tensor]:
        """The tensors on the meta device, without data."""

    @abstractmethod
    def tokenizer(self) -> tokenizers.Tokenizer:
        """Its vocabulary unchanged; the family decides which ids are mask, begin and end (`Roles`)."""

    @property
    @abstractmethod
    def special(self) -> dict[str, str]: ...


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A third-party model converted to ours.

    denoiser: the description, whose `build` creates the network without the source. state: a function that reads the
    weights under the network's names; called once. tokenizer: with roles and `num_ids`. length: the maximum number of
    positions of the network.
    """

    denoiser: Denoiser
    state: Mapping[str, Tensor]
    tokenizer: Tokenizer
    length: int
    causal: bool = False
