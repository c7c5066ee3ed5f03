"""The token automaton: an automaton over bytes combined with a vocabulary, with equivalent tokens in classes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unmask.constraints import MAX_STATES, Constraint
from unmask.constraints._dfa import Dfa, reduce_states, same_columns
from unmask.constraints._transitions import Transitions
from unmask.constraints.cost import Cost
from unmask.data.tokenizers import Tokenizer
from unmask.errors import Public, UsageError

MAX_CELLS = 1 << 26  # states × classes
_BLOCK = 64  # states processed at a time


@dataclass(frozen=True, eq=False)
class Automaton:
    """An automaton that accepts or rejects rows of tokens. State 0 is the start.

    class_I: the class of each id; tokens of a class have the same transitions in every state.
    next_SC: the state after a state and a class, -1 for no transition. over: see Constraint; "both": it reads the text
    with two additional ids, which mark the beginning and end of each gap (see `interleave`).
    """

    next_SC: NDArray[np.int32]
    accept_S: NDArray[np.bool_]
    class_I: NDArray[np.int64]
    over: str = "text"

    @property
    def num_states(self) -> int:
        return len(self.accept_S)

    @property
    def num_words(self) -> int:
        """The number of ids in the vocabulary, without the markers that open and close a gap."""
        return len(self.class_I) - 2 * (self.over == "both")

    @property
    def num_classes(self) -> int:
        return int(self.next_SC.shape[1])

    @classmethod
    def of(cls, next_SI: NDArray[np.int32], accept_S: NDArray[np.bool_], over: str = "text") -> Automaton:
        """Create an automaton from the full table of states × ids.

        >>> import numpy as np
        >>> even_ones = Automaton.of(np.array([[0, 1, -1], [1, 0, -1]], dtype=np.int32), np.array([True, False]))
        >>> even_ones.accepts([1, 0, 1]), even_ones.accepts([1])
        (True, False)
        """
        first, class_I = same_columns(next_SI)
        return cls(next_SI[:, first], accept_S, class_I, over).reduced()

    def reduced(self) -> Automaton:
        """The automaton without useless states, and with classes merged that no longer differ."""
        next_SC, accept_S = reduce_states(self.next_SC, self.accept_S)
        first, kind_C = same_columns(next_SC)
        return Automaton(np.ascontiguousarray(next_SC[:, first]), accept_S, kind_C[self.class_I], self.over)

    @functools.cached_property
    def transitions(self) -> Transitions:
        """The transitions between states: computed once, and pickled with the automaton."""
        return Transitions.of(self.next_SC)

    def cost(self, length: int, *, likeliest: bool = False) -> Cost:
        """The cost of writing a row of `length` tokens under this automaton, without the network.

        likeliest: at temperature 0.

        >>> zeros = Automaton.of(np.array([[0, -1, -1]], dtype=np.int32), np.array([True]))
        >>> zeros.cost(200).call == 2 * zeros.cost(100).call, zeros.cost(200).row_bytes < 1 << 26
        (True, True)
        """
        return Cost.of(self.num_states, self.num_classes, self.num_words, self.transitions, length, likeliest)

    def accepts(self, ids: Iterable[int]) -> bool:
        """Whether this row of tokens is accepted."""
        state = 0
        for id in ids:
            state = int(self.next_SC[state, self.class_I[id]])
            if state < 0:
                return False
        return bool(self.accept_S[state])

    def shortest(self, never: Sequence[int] = ()) -> int | None:
        """The length of the shortest accepted row without the ids in `never`; None if no row is accepted."""
        may_I = np.ones(len(self.class_I), dtype=bool)
        may_I[list(never)] = False
        classes = np.unique(self.class_I[may_I])
        reached_S = np.zeros(self.num_states, dtype=bool)
        frontier, num = np.array([0]), 0
        while len(frontier):
            if self.accept_S[frontier].any():
                return num
            reached_S[frontier] = True
            successors = np.unique(self.next_SC[frontier][:, classes])
            successors = successors[successors >= 0]
            frontier, num = successors[~reached_S[successors]], num + 1
        return None


def join(dfa: Dfa, tokenizer: Tokenizer, *, over: str, may_end: bool) -> Automaton:
    """The automaton of the rows of tokens whose spelling `dfa` accepts; after an end-of-text anything may follow.

    >>> from unmask.constraints.choices import spelled
    >>> from unmask.data.tokenizers import load_tokenizer
    >>> join(spelled(["ab"]), load_tokenizer("chars"), over="text", may_end=False).accepts([1, 2])
    True
    """
    dfa = dfa.reduced()
    if not dfa.accept_S.any():
        raise UsageError("the constraint matches no text at all: check the pattern")
    if len(dfa.accept_S) > MAX_STATES:
        raise UsageError(
            "the constraint has {states} states, more than {most}: use smaller counts, or [a-z] instead of \\w",
            states=Public(len(dfa.accept_S)),
            most=Public(MAX_STATES),
        )
    first, inside = tokenizer.spellings()
    # A text's first token may be spelled differently from later ones (no joining space), so the start is a separate
    # state.
    next_SB = np.concatenate([dfa.next_SB[:1], dfa.next_SB])
    next_SB = np.where(next_SB < 0, np.int32(-1), next_SB + 1)
    accept_S = np.concatenate([dfa.accept_S[:1], dfa.accept_S])
    special = _special(tokenizer)
    class_I = same_columns(_walk(next_SB, np.arange(1), _Words.of(first, special)))[1]
    words = _Words.of(inside, special)
    for lo in range(1, len(accept_S), _BLOCK):
        kind_I = same_columns(_walk(next_SB, np.arange(lo, min(lo + _BLOCK, len(accept_S))), words))[1]
        class_I = np.unique(class_I * (kind_I.max() + 1) + kind_I, return_inverse=True)[1].reshape(-1)
    end = len(accept_S)
    for id in special:  # each has a class of its own
        class_I[id] = class_I.max() + 1
    class_I = np.unique(class_I, return_inverse=True)[1].reshape(-1)
    first_C = np.unique(class_I, return_index=True)[1]
    check_size(end + 1, len(first_C))
    next_SC = np.full((end + 1, len(first_C)), -1, dtype=np.int32)
    next_SC[0] = _walk(next_SB, np.arange(1), _Words.of([first[id] for id in first_C], []))
    next_SC[1:end] = _walk(next_SB, np.arange(1, end), _Words.of([inside[id] for id in first_C], []))
    next_SC[:end, class_I[special]] = -1
    if tokenizer.bos_id is not None:
        next_SC[0, class_I[tokenizer.bos_id]] = 0  # precedes the text and is not part of its spelling
    next_SC = _end(next_SC, accept_S, class_I, tokenizer, may_end)
    automaton = Automaton(next_SC, np.append(accept_S, may_end), class_I, over).reduced()
    if not automaton.accept_S.any():
        raise UsageError("the constraint matches nothing that this vocabulary can spell: check the pattern")
    return automaton


def count_tokens(least: int, most: int | None, tokenizer: Tokenizer, *, over: str, may_end: bool) -> Automaton:
    """The automaton of the rows of `least` to `most` tokens, not counting end-of-text."""
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
    """Add end-of-text: from every accepting state to the last state, after which anything may follow."""
    if may_end:
        end = len(accept_S)
        next_SC[:end][accept_S, class_I[tokenizer.eot_id]] = end
        next_SC[end] = end
        next_SC[end, class_I[tokenizer.mask_id]] = -1
    return next_SC


def intersect(a: Automaton, b: Automaton) -> Automaton:
    """The automaton of the rows that both accept."""
    key_I = a.class_I * b.num_classes + b.class_I
    both_C, class_I = np.unique(key_I, return_inverse=True)
    a_SC, b_SC = a.next_SC[:, both_C // b.num_classes], b.next_SC[:, both_C % b.num_classes]

    def step(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        sa, sb = np.divmod(pairs, b.num_states)
        return np.where((a_SC[sa] < 0) | (b_SC[sb] < 0), -1, a_SC[sa].astype(np.int64) * b.num_states + b_SC[sb])

    pairs, next_SC = _reached_pairs(0, step)
    sa, sb = np.divmod(pairs, b.num_states)
    return _joined(Automaton(next_SC, a.accept_S[sa] & b.accept_S[sb], class_I.reshape(-1), a.over))


def interleave(text: Automaton, gap: Automaton) -> Automaton:
    """The automaton of texts that `text` accepts with gaps that `gap` accepts. The last two, new ids mark gaps.

    A state is a pair of a state of `text` and, inside a gap, a state of `gap`; outside gaps, `gap` reads nothing.

    >>> even = Automaton.of(np.array([[1, 1, -1], [0, 0, -1]], dtype=np.int32), np.array([True, False]))  # in length
    >>> ones = Automaton.of(np.array([[-1, 0, -1]], dtype=np.int32), np.array([True]), "gap")
    >>> both = interleave(even, ones)
    >>> both.accepts([0, 3, 1, 4]), both.accepts([0, 3, 0, 4]), both.accepts([0, 3, 1, 1, 4])
    (True, False, False)
    """
    outside = gap.num_states  # as the gap's state
    key_I = text.class_I * gap.num_classes + gap.class_I
    both_C, class_I = np.unique(key_I, return_inverse=True)
    num = len(both_C)
    # Outside, a token does not change the gap's state; "no transition" is represented by the last state.
    text_SC = text.next_SC[:, both_C // gap.num_classes].astype(np.int64)
    gap_SC = np.concatenate([gap.next_SC[:, both_C % gap.num_classes], np.full((1, num), outside, dtype=np.int32)])

    def step(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        st, sg = np.divmod(pairs, outside + 1)
        words = np.where((text_SC[st] < 0) | (gap_SC[sg] < 0), -1, text_SC[st] * (outside + 1) + gap_SC[sg])
        opens = np.where(sg == outside, st * (outside + 1), -1)
        closes = np.where(np.append(gap.accept_S, False)[sg], st * (outside + 1) + outside, -1)
        return np.column_stack([words, opens, closes])

    pairs, next_SC = _reached_pairs(outside, step)
    st, sg = np.divmod(pairs, outside + 1)
    accept_S = text.accept_S[st] & (sg == outside)
    return _joined(Automaton(next_SC, accept_S, np.append(class_I.reshape(-1), [num, num + 1]), "both"))


def _reached_pairs(
    start: int, step: Callable[[NDArray[np.int64]], NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The pairs of states (as one number each) reachable from `start`, and the transitions of each by class."""
    pairs, rows, done = np.array([start]), [], 0
    while done < len(pairs):
        successors = step(pairs[done:])
        done = len(pairs)
        rows.append(successors)
        pairs = np.concatenate([pairs, np.setdiff1d(successors, np.append(pairs, -1))])
        if len(pairs) > 8 * MAX_STATES:
            raise UsageError(
                "the constraints together have more than {most} states: give fewer of them", most=Public(8 * MAX_STATES)
            )
    successors = np.concatenate(rows)
    order = np.argsort(pairs)
    next_SC = np.where(successors < 0, -1, order[np.searchsorted(pairs[order], successors).clip(max=len(pairs) - 1)])
    return pairs, next_SC.astype(np.int32)


def _joined(both: Automaton) -> Automaton:
    both = both.reduced()
    if not both.accept_S.any():
        raise UsageError("the constraints exclude each other: no text obeys all of them")
    check_size(both.num_states, both.num_classes)
    return both


def compile_constraints(
    constraints: Constraint | Sequence[Constraint], tokenizer: Tokenizer, *, may_end: bool
) -> Automaton:
    """One automaton for a constraint, or for several that must all hold."""
    several = [constraints] if isinstance(constraints, Constraint) else list(constraints)
    if not several:
        raise UsageError("no constraint in the list: leave it out instead")
    made = [_made(c, tokenizer, may_end) for c in several]
    parts = [[a for a in made if a.over == over] for over in ("text", "gap")]
    whole = functools.reduce(interleave, [functools.reduce(intersect, part) for part in parts if part])
    _ = whole.transitions  # computed now, so that too many transitions are refused here
    return whole


def _made(constraint: Constraint, tokenizer: Tokenizer, may_end: bool) -> Automaton:
    """The constraint's automaton, cached: combining it with a large vocabulary takes about a second."""
    try:
        return _kept(constraint, tokenizer, may_end)
    except TypeError:  # an option that cannot be a key, such as a list
        return constraint.automaton(tokenizer, may_end=may_end)


@functools.lru_cache(maxsize=8)
def _kept(constraint: Constraint, tokenizer: Tokenizer, may_end: bool) -> Automaton:
    return constraint.automaton(tokenizer, may_end=may_end)


def check_size(num_states: int, num_classes: int) -> None:
    """Refuse automata that would need as much memory as a network."""
    if num_states * num_classes > MAX_CELLS:
        raise UsageError(
            "the constraint has {num_states} states and {num_classes} kinds of tokens in this vocabulary, "
            "which is too much: use smaller counts or classes",
            num_states=Public(num_states),
            num_classes=Public(num_classes),
        )


def _special(tokenizer: Tokenizer) -> list[int]:
    """Ids that are not part of a text's spelling."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return sorted({tokenizer.mask_id, tokenizer.eot_id, *bos})


@dataclass(frozen=True)
class _Words:
    """Spellings side by side, longest first: word i is letters[start_I[i] : start_I[i] + length_I[i]]."""

    letters: NDArray[np.uint8]
    start_I: NDArray[np.int64]
    length_I: NDArray[np.int64]
    order_I: NDArray[np.int64]  # the id of each

    @classmethod
    def of(cls, words: Sequence[bytes | None], special: Sequence[int]) -> _Words:
        kept = [b"" if word is None else word for word in words]
        for id in special:
            kept[id] = b""  # has no spelling, so no pattern can match it
        length_I = np.array([len(word) for word in kept])
        order_I = np.argsort(-length_I, kind="stable")
        start_I = np.cumsum(length_I) - length_I
        return cls(np.frombuffer(b"".join(kept), dtype=np.uint8), start_I[order_I], length_I[order_I], order_I)


def _walk(next_SB: NDArray[np.int32], states: NDArray[np.int64], words: _Words) -> NDArray[np.int32]:
    """The state after each of `states` and each word [states, words], computed one letter column at a time."""
    # An extra dead state at the end, so that -1 needs no special case.
    table = np.concatenate([next_SB, np.full((1, next_SB.shape[1]), -1, dtype=np.int32)])
    at = np.repeat(states[:, None].astype(np.int32), len(words.order_I), axis=1)
    for column in range(int(words.length_I.max(initial=0))):
        num = int((words.length_I > column).sum())
        at[:, :num] = table[at[:, :num], words.letters[words.start_I[:num] + column]]
    at[:, words.length_I == 0] = -1
    end = np.empty_like(at)
    end[:, words.order_I] = at
    return end
