"""The reverse complement of a row of DNA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.data.tokenizers import Tokenizer

PAIRS = {b"A": b"T", b"C": b"G", b"a": b"t", b"c": b"g"}


def complement_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The complement of each id: A and T, C and G, in either case; every other id is its own complement.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> complement_of(load_tokenizer("bytes"))[ord("A")] == ord("T")
    True
    """
    spelled = tokenizer.spellings()[1]
    pairs = {**PAIRS, **{there: here for here, there in PAIRS.items()}}
    id_of = {word: id for id, word in enumerate(spelled) if word in pairs}
    if missing := [word.decode() for word in (b"A", b"C", b"G", b"T") if not {word, word.lower()} & id_of.keys()]:
        raise UsageError(f"reverse complements need the letters A, C, G and T, the tokenizer has no {missing[0]}")
    if longer := next((w for w in spelled if w is not None and len(w) > 1 and {*w.upper()} <= {*b"ACGT"}), None):
        raise UsageError(
            f"reverse complements need a token a letter, the tokenizer has {longer.decode()!r}: use another"
        )
    complement = [id if word is None else id_of.get(pairs.get(word, word), id) for id, word in enumerate(spelled)]
    complement += range(len(complement), tokenizer.num_ids)
    complement[tokenizer.mask_id] = tokenizer.mask_id
    return tuple(complement)


def spells_dna(tokenizer: Tokenizer) -> bool:
    """Whether this vocabulary contains only DNA: one token each for A, C, G and T, perhaps N, and special tokens.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> spells_dna(load_tokenizer("dna")), spells_dna(load_tokenizer("bytes"))
    (True, False)
    """
    try:
        spelled = tokenizer.spellings()[1]
    except UsageError:  # the spelling of its ids is unknown
        return False
    special = {tokenizer.mask_id, tokenizer.eot_id, *tokenizer.fixed_ids}
    letters = {word.upper() for id, word in enumerate(spelled) if word and id not in special}
    return {b"A", b"C", b"G", b"T"} <= letters <= {b"A", b"C", b"G", b"T", b"N"}


def check_complement(complement: Sequence[int], *, num_ids: int, mask_id: int) -> None:
    """Refuse a tuple that is not a valid complement of each id.

    >>> check_complement((1, 0, 2), num_ids=3, mask_id=2)
    >>> check_complement((1, 2, 0), num_ids=3, mask_id=2)
    Traceback (most recent call last):
    unmask.errors.UsageError: the complement of id 0 is 1, but that of 1 is 2: complements go in pairs
    """
    if not complement:
        raise UsageError("reverse complements need the complement of each id: train by a recipe, or set complement")
    if len(complement) != num_ids:
        raise UsageError(f"complement has {len(complement)} ids, the vocabulary {num_ids}")
    for id, other in enumerate(complement):
        if not 0 <= other < num_ids:
            raise UsageError(f"the complement of id {id} is {other}, which is no id below {num_ids}")
        if complement[other] != id:
            raise UsageError(
                f"the complement of id {id} is {other}, but that of {other} is {complement[other]}: "
                "complements go in pairs"
            )
    if complement[mask_id] != mask_id:
        raise UsageError(f"the mask, id {mask_id}, must be its own complement, got {complement[mask_id]}")


def reversed_places(z_BL: Tensor, valid_BL: Tensor | None) -> Tensor:
    """The index of each position after the row is reversed; padding stays at the end.

    >>> reversed_places(torch.zeros(1, 4), torch.tensor([[True, True, True, False]]))
    tensor([[2, 1, 0, 3]])
    """
    position_BL = torch.arange(z_BL.shape[1], device=z_BL.device).expand(z_BL.shape[:2])
    if valid_BL is None:
        return position_BL.flip(1)
    last_B1 = valid_BL.sum(dim=1, keepdim=True) - 1
    return torch.where(valid_BL, last_B1 - position_BL, position_BL)
