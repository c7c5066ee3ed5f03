"""Which ids of a vocabulary play a part, where somebody says it rather than their spellings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from unmask.errors import ModelFolderError
from unmask.storage.untrusted import printable

WITH_ROLES = "subwords"  # what a tokenizer.json of ours with roles calls itself


@dataclass(frozen=True, kw_only=True)
class Roles:
    """num_ids: the width of the logits, which may be more than the vocabulary names. mask: its id, which no text
    yields. begin, end: what frames a row. fixed: ids that may stand in a row and are never noised, scored or written;
    where `end` is among them, texts are not ended by a token that the model writes.

    >>> Roles(mask=3, begin=0, end=1, num_ids=9, fixed=(0, 1)).check(8)
    """

    mask: int
    end: int
    begin: int | None = None
    num_ids: int
    fixed: tuple[int, ...] = ()

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Roles:
        """From plain data of a file, of which nothing is believed.

        >>> Roles.from_data({"mask": 3, "end": 1, "begin": None, "num_ids": 9, "fixed": [1]}).fixed
        (1,)
        """
        if data.keys() != {field.name for field in fields(cls)} or not isinstance(data["fixed"], list | tuple):
            raise ModelFolderError("the tokenizer's roles are damaged: they are mask, end, begin, num_ids and fixed")
        ids = [
            *data["fixed"],
            data["mask"],
            data["end"],
            data["num_ids"],
            0 if data["begin"] is None else data["begin"],
        ]
        if odd := [id for id in ids if type(id) is not int]:
            raise ModelFolderError(f"the tokenizer's roles are damaged: {printable(repr(odd[0]))} is no id")
        return cls(**data | {"fixed": tuple(data["fixed"])})

    def check(self, most: int) -> None:
        """Refuse roles that do not fit each other, or a vocabulary whose largest id is `most`."""
        if most >= self.num_ids:
            raise ModelFolderError(
                f"the tokenizer has ids up to {most}, the network only {self.num_ids}: they do not belong together"
            )
        parts = [self.mask, self.end, *self.fixed, *([] if self.begin is None else [self.begin])]
        if odd := [id for id in parts if not 0 <= id < self.num_ids]:
            raise ModelFolderError(f"the tokenizer's roles name the id {odd[0]}, there are {self.num_ids}")
        if self.mask in (self.end, self.begin, *self.fixed):
            raise ModelFolderError(f"the id {self.mask} is the mask and something else, too: no row could hold both")
