"""What a pretrained model is before (`Source`) and after (`Pretrained`) a family has read it."""

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

PREFIX = "hf:"  # before a path or a hub name, where a model of ours may be named, too


class Source(ABC):
    """A model as others have saved it; nothing in it is executed, and no number is read before somebody asks.

    where: how messages name it. config: its config.json, parsed, as transformers names things. special: the spellings
    of its special tokens by role (`mask_token`, `cls_token`, `sep_token`, `bos_token`, `eos_token`, `pad_token`,
    `unk_token`), as far as it says them.
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
        """Its tensors by their names there, each read when it is asked for."""

    @abstractmethod
    def shapes(self) -> dict[str, Tensor]:
        """The same without the numbers, on the meta device."""

    @abstractmethod
    def tokenizer(self) -> tokenizers.Tokenizer:
        """Its vocabulary as it is; which ids are mask, begin and end is for the family to say (`Roles`)."""

    @property
    @abstractmethod
    def special(self) -> dict[str, str]: ...


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model of others as one of ours.

    denoiser: the description, from which `build` makes the network without the source. state: a function that reads the
    weights, named as that network names them; called once. tokenizer: with its roles and its width, `num_ids`. length:
    the most positions that the network knows.
    """

    denoiser: Denoiser
    state: Mapping[str, Tensor]
    tokenizer: Tokenizer
    length: int
    causal: bool = False
