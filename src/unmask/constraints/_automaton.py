"""The token automaton: an automaton over bytes joined with a vocabulary, tokens that act alike grouped into classes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unmask.constraints import MAX_STATES, Constraint
from unmask.constraints._dfa import Dfa, reduce_states
from unmask.errors import UsageError
from unmask.tokens import Tokenizer

MAX_CELLS = 1 << 26  # states × classes
_BLOCK = 64  # states that walk through the vocabulary at a time


@dataclass(frozen=True, eq=False)
class Automaton:
    """Which rows of tokens are accepted. State 0 is the start.

    class_I: the class of each id; tokens of a class lead every state to the same next one.
    next_SC: the state behind a state and a class, -1 for no way on. over: see Constraint.
    """

    next_SC: NDArray[np.int32]
    accept_S: NDArray[np.bool_]
    class_I: NDArray[np.int64]
    over: str = "text"

    @property
    def num_states(self) -> int:
        return len(self.accept_S)

    @property
    def num_classes(self) -> int:
        return int(self.next_SC.shape[1])

    @classmethod
    def of(cls, next_SI: NDArray[np.int32], accept_S: NDArray[np.bool_], over: str = "text") -> Automaton:
        """From the full table of states × ids.

        >>> import numpy as np
        >>> even_ones = Automaton.of(np.array([[0, 1, -1], [1, 0, -1]], dtype=np.int32), np.array([True, False]))
        >>> even_ones.accepts([1, 0, 1]), even_ones.accepts([1])
        (True, False)
        """
        _, first, class_I = np.unique(next_SI, axis=1, return_index=True, return_inverse=True)
        return cls(next_SI[:, first], accept_S, class_I.reshape(-1).astype(np.int64), over).reduced()

    def reduced(self) -> Automaton:
        """Without useless states; then classes that no longer differ are joined."""
        next_SC, accept_S = reduce_states(self.next_SC, self.accept_S)
        _, first, inverse = np.unique(next_SC, axis=1, return_index=True, return_inverse=True)
        next_SC = np.ascontiguousarray(next_SC[:, first])
        return Automaton(next_SC, accept_S, inverse.reshape(-1)[self.class_I].astype(np.int64), self.over)

    def accepts(self, ids: Iterable[int]) -> bool:
        """Whether this row of tokens is accepted."""
        state = 0
        for id in ids:
            state = int(self.next_SC[state, self.class_I[id]])
            if state < 0:
                return False
        return bool(self.accept_S[state])

    def shortest(self, never: Sequence[int] = ()) -> int | None:
        """How many tokens the shortest accepted row has, without the ids in `never`; None: there is none."""
        may_I = np.ones(len(self.class_I), dtype=bool)
        may_I[list(never)] = False
        classes = np.unique(self.class_I[may_I])
        seen_S = np.zeros(self.num_states, dtype=bool)
        frontier, num = np.array([0]), 0
        while len(frontier):
            if self.accept_S[frontier].any():
                return num
            seen_S[frontier] = True
            behind = np.unique(self.next_SC[frontier][:, classes])
            behind = behind[behind >= 0]
            frontier, num = behind[~seen_S[behind]], num + 1
        return None


def join(dfa: Dfa, tokenizer: Tokenizer, *, over: str, may_end: bool) -> Automaton:
    """The rows of tokens whose spelling `dfa` accepts; behind an end-of-text everything may follow.

    >>> from unmask.constraints.choices import spelled
    >>> from unmask.tokens import load_tokenizer
    >>> join(spelled(["ab"]), load_tokenizer("chars"), over="text", may_end=False).accepts([1, 2])
    True
    """
    dfa = dfa.reduced()
    if not dfa.accept_S.any():
        raise UsageError("the constraint matches no text at all: check the pattern")
    if len(dfa.accept_S) > MAX_STATES:
        raise UsageError(
            f"the constraint has {len(dfa.accept_S)} states, more than {MAX_STATES}: "
            "use smaller counts, or [a-z] instead of \\w"
        )
    first, inside = tokenizer.spellings()
    # A text's first token may be spelled otherwise than one inside (no joining space): the start is a state of its own.
    next_SB = np.concatenate([dfa.next_SB[:1], dfa.next_SB])
    next_SB = np.where(next_SB < 0, np.int32(-1), next_SB + 1)
    accept_S = np.concatenate([dfa.accept_S[:1], dfa.accept_S])
    special = _special(tokenizer)
    blocks = [_walk(next_SB, np.arange(1), _drop(first, special))]
    class_I = np.unique(blocks[0], axis=1, return_inverse=True)[1].reshape(-1)
    words = _drop(inside, special)
    for lo in range(1, len(accept_S), _BLOCK):
        blocks.append(_walk(next_SB, np.arange(lo, min(lo + _BLOCK, len(accept_S))), words))
        inverse = np.unique(blocks[-1], axis=1, return_inverse=True)[1].reshape(-1)
        class_I = np.unique(class_I * (inverse.max() + 1) + inverse, return_inverse=True)[1].reshape(-1)
    end = len(accept_S)
    for id in special:  # each acts as no other id does
        class_I[id] = class_I.max() + 1
    class_I = np.unique(class_I, return_inverse=True)[1].reshape(-1)
    first_C = np.unique(class_I, return_index=True)[1]
    next_SC = np.full((end + 1, len(first_C)), -1, dtype=np.int32)
    next_SC[:end] = np.concatenate([block[:, first_C] for block in blocks])
    if tokenizer.bos_id is not None:
        next_SC[0, class_I[tokenizer.bos_id]] = 0  # stands before the text and spells nothing of it
    next_SC = _end(next_SC, accept_S, class_I, tokenizer, may_end)
    automaton = Automaton(next_SC, np.append(accept_S, may_end), class_I, over).reduced()
    if not automaton.accept_S.any():
        raise UsageError("the constraint matches nothing that this vocabulary can spell: check the pattern")
    check_size(automaton)
    return automaton


def count_tokens(least: int, most: int | None, tokenizer: Tokenizer, *, over: str, may_end: bool) -> Automaton:
    """The rows of `least` to `most` tokens, the end not counted."""
    num = (least if most is None else most) + 1
    class_I = np.zeros(tokenizer.num_ids, dtype=np.int64)
    for number, id in enumerate(_special(tokenizer)):
        class_I[id] = number + 1
    next_SC = np.full((num + 1, class_I.max() + 1), -1, dtype=np.int32)
    next_SC[: num - 1, 0] = np.arange(1, num)
    if most is None:
        next_SC[num - 1, 0] = num - 1
    if tokenizer.bos_id is not None:
        next_SC[0, class_I[tokenizer.bos_id]] = 0
    accept_S = np.arange(num) >= least
    next_SC = _end(next_SC, accept_S, class_I, tokenizer, may_end)
    return Automaton(next_SC, np.append(accept_S, may_end), class_I, over).reduced()


def _end(
    next_SC: NDArray[np.int32],
    accept_S: NDArray[np.bool_],
    class_I: NDArray[np.int64],
    tokenizer: Tokenizer,
    may_end: bool,
) -> NDArray[np.int32]:
    """End-of-text leads from every accepting state to the last one, in which anything may follow."""
    if may_end:
        end = len(accept_S)
        next_SC[:end][accept_S, class_I[tokenizer.eot_id]] = end
        next_SC[end] = end
        next_SC[end, class_I[tokenizer.mask_id]] = -1
    return next_SC


def intersect(a: Automaton, b: Automaton) -> Automaton:
    """What both accept."""
    if a.over != b.over:
        raise UsageError("constraints given together must be over the same: all over the text or all over the gap")
    key_I = a.class_I * b.num_classes + b.class_I
    both_C, class_I = np.unique(key_I, return_inverse=True)
    a_SC, b_SC = a.next_SC[:, both_C // b.num_classes], b.next_SC[:, both_C % b.num_classes]
    pairs, rows, done = np.array([0]), [], 0
    while done < len(pairs):
        sa, sb = np.divmod(pairs[done:], b.num_states)
        done = len(pairs)
        behind = np.where((a_SC[sa] < 0) | (b_SC[sb] < 0), -1, a_SC[sa].astype(np.int64) * b.num_states + b_SC[sb])
        rows.append(behind)
        new = np.setdiff1d(behind, np.append(pairs, -1))
        pairs = np.concatenate([pairs, new])
        if len(pairs) > 8 * MAX_STATES:
            raise UsageError(f"the constraints together have more than {8 * MAX_STATES} states: give fewer of them")
    behind = np.concatenate(rows)
    order = np.argsort(pairs)
    next_SC = np.where(behind < 0, -1, order[np.searchsorted(pairs[order], behind).clip(max=len(pairs) - 1)])
    sa, sb = np.divmod(pairs, b.num_states)
    joined = Automaton(next_SC.astype(np.int32), a.accept_S[sa] & b.accept_S[sb], class_I.reshape(-1), a.over)
    joined = joined.reduced()
    if not joined.accept_S.any():
        raise UsageError("the constraints exclude each other: no text obeys all of them")
    check_size(joined)
    return joined


def compile_constraints(
    constraints: Constraint | Sequence[Constraint], tokenizer: Tokenizer, *, may_end: bool
) -> Automaton:
    """One automaton for one constraint or for several that must all hold."""
    several = [constraints] if isinstance(constraints, Constraint) else list(constraints)
    if not several:
        raise UsageError("no constraint in the list: leave it out instead")
    return functools.reduce(intersect, [c.automaton(tokenizer, may_end=may_end) for c in several])


def check_size(automaton: Automaton) -> None:
    """Refuse what would take the memory of a network."""
    if automaton.next_SC.size > MAX_CELLS:
        raise UsageError(
            f"the constraint has {automaton.num_states} states and {automaton.num_classes} kinds of tokens in this "
            "vocabulary, which is too much: use smaller counts or classes"
        )


def _special(tokenizer: Tokenizer) -> list[int]:
    """Ids that are no part of a text's spelling."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return sorted({tokenizer.mask_id, tokenizer.eot_id, *bos})


def _drop(words: Sequence[bytes | None], special: Sequence[int]) -> list[bytes]:
    """Spellings as bytes; b"" for ids that spell nothing, which no pattern can ask for."""
    return [b"" if word is None or id in special else word for id, word in enumerate(words)]


def _walk(next_SB: NDArray[np.int32], states: NDArray[np.int64], words: list[bytes]) -> NDArray[np.int32]:
    """The state behind each of `states` and each word [states, words]; a column of bytes at a time, words by length."""
    lengths = np.array([len(word) for word in words])
    starts = np.cumsum(lengths) - lengths
    letters = np.frombuffer(b"".join(words), dtype=np.uint8)
    order = np.argsort(-lengths, kind="stable")
    # A dead state of its own at the end, so that -1 walks on as any other.
    table = np.concatenate([next_SB, np.full((1, next_SB.shape[1]), -1, dtype=np.int32)])
    at = np.repeat(states[:, None].astype(np.int32), len(words), axis=1)
    for column in range(int(lengths.max(initial=0))):
        num = int((lengths > column).sum())
        at[:, :num] = table[at[:, :num], letters[starts[order[:num]] + column]]
    at[:, lengths[order] == 0] = -1
    behind = np.empty_like(at)
    behind[:, order] = at
    return behind
