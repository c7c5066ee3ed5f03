"""The cost of a draw under an automaton, known in advance, for callers that enforce a budget."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.constraints._transitions import Transitions

CELLS = 1 << 23  # limit of float64 numbers in memory for tensors of spans × positions × states
LINES = 1 << 19  # the same for vocabulary × positions, so that it fits in a processor's cache
# Approximate nanoseconds on one core: per position, per id, per class in a set, per transition between two states,
# and per state's transition by one class where a token is drawn.
_POSITION, _ID, _CLASS, _WAY, _DRAWN = 300_000, 17, 2, 100, 26
_LIKELIEST = 6  # factor of the cost per class for the maximum instead of the sum


@dataclass(frozen=True)
class Cost:
    """call: the cost of one network call for one row, whatever it opens; token: of each token written.

    Both are in nanoseconds on one core, accurate within a factor of a few. A row's whole text takes
    calls × call + tokens × token. shared_bytes: memory of the automaton and its tables, once for all rows and requests.
    row_bytes: the maximum memory of a row during a draw; between draws it needs almost none.
    """

    call: int
    token: int
    shared_bytes: int
    row_bytes: int

    @classmethod
    def of(
        cls, num_states: int, num_classes: int, num_ids: int, transitions: Transitions, length: int, likeliest: bool
    ) -> Cost:
        S, C, P, U, E = num_states, num_classes, transitions.num_pairs, transitions.num_sets, len(transitions.class_E)
        line = _POSITION + _ID * num_ids + _CLASS * (_LIKELIEST if likeliest else 1) * E + _WAY * P
        block = max(1, CELLS // (U + S))  # positions whose weights and messages are kept at a time
        twice = length > block  # then they are recomputed in the forward pass
        kept = min(length, block) * (U + S) + -(-length // block) * S
        # The transitions again, padded and by state; a few numbers for each; a few chunks of lines; and the network's
        # prediction in float32.
        return cls(
            call=length * line * (2 if twice else 1),
            token=_ID * num_ids + _DRAWN * S * C,
            shared_bytes=4 * S * C + 12 * E + 8 * (9 * P + 4096) + 16 * num_ids,
            row_bytes=8 * (kept + 8 * P + 8 * max(LINES, C, U) + 4 * num_ids) + 4 * length * num_ids,
        )
