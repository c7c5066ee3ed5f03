"""Which texts a step takes, how many, how long, and what is asked of them. The work, in tokens, is the same for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from unmask.data.batch import Batch, make_batch
from unmask.objectives import Objective
from ways.data import Tokens
from ways.objectives import NextToken, Weighted

Part = tuple[Objective, Batch]
FEW_SHAPES = 8  # a batch is cut at eighths: a GPU's attention searches for kernels at each new shape


@dataclass(frozen=True)
class Stage:
    """Up to a share of the run's tokens: rows of a share of the length, a batch of a share of the tokens."""

    until: float = 1.0
    batch: float = 1.0
    length: float = 1.0


@dataclass(frozen=True)
class Moment:
    """A step, its batch's shape, and the tokens of the steps before it as a share of all."""

    step: int
    batch: int
    length: int
    done: float
    tokens: int  # before it

    @property
    def work(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True)
class Plan:
    """Fresh texts in every step, in stages. shifted: each epoch cuts the text at another place."""

    stages: tuple[Stage, ...] = (Stage(),)
    shifted: bool = False

    def moments(self, steps: int, batch: int, length: int) -> list[Moment]:
        """The steps that do the work of `steps` steps of batch x length tokens.

        >>> [(m.batch, m.length) for m in Plan((Stage(0.5, 0.5), Stage(1.0, 1.0, 0.5))).moments(2, 4, 8)]
        [(2, 8), (2, 8), (8, 4)]
        """
        total, tokens = steps * batch * length, 0
        made: list[Moment] = []
        while tokens < total:
            stage = next(stage for stage in self.stages if tokens < stage.until * total)
            cut = round(length * stage.length)
            rows = max(1, round(batch * stage.batch * length / cut))
            made.append(Moment(len(made), rows, cut, tokens / total, tokens))
            tokens += made[-1].work
        return made

    def parts(self, objective: Objective, tokens: Tokens, moment: Moment, seed: int) -> list[Part]:
        x_BL = tokens.rows(moment.tokens // moment.length, moment.batch, moment.length, seed=seed, shifted=self.shifted)
        return [(objective, make_batch(x_BL, seed=seed, step=moment.step))]


@dataclass(frozen=True)
class Pairs(Plan):
    """Half as many texts, each twice: what `Complement` takes."""

    def parts(self, objective: Objective, tokens: Tokens, moment: Moment, seed: int) -> list[Part]:
        half = moment.batch // 2
        x_BL = tokens.rows(moment.step * half, half, moment.length, seed=seed)
        one = make_batch(x_BL, seed=seed, step=moment.step)
        twice = (torch.cat([t, t]) for t in (one.x_BL, one.scored_BL, one.key_B, one.time_B))
        x, scored, key, time = twice
        return [(objective, Batch(x, None, scored, key, time))]


@dataclass(frozen=True)
class Kept(Plan):
    """A text stays for `keep` steps, each with fewer masks in the same random order; then another takes its place.

    A keep-th of the rows changes at a time, so that every batch has all times, each row's uniform.
    """

    keep: int = 4

    def parts(self, objective: Objective, tokens: Tokens, moment: Moment, seed: int) -> list[Part]:
        size = moment.batch // self.keep
        groups = []
        for g in range(self.keep):
            turn, phase = divmod(moment.step + g, self.keep)
            first = g * size
            x_BL = tokens.rows(turn * moment.batch + first, size, moment.length, seed=seed)
            one = make_batch(x_BL, seed=seed, step=turn, first_row=first, num_rows=size)
            groups.append(replace(one, time_B=(self.keep - 1 - phase + one.time_B) / self.keep))
        x, scored, key, time = (
            torch.cat([getattr(one, name) for one in groups]) for name in ("x_BL", "scored_BL", "key_B", "time_B")
        )
        return [(objective, Batch(x, None, scored, key, time))]


@dataclass(frozen=True)
class Turning(Plan):
    """Another loss first, the way's own after a share of the run."""

    first: Objective = Weighted(power=0.5)
    until: float = 0.7

    def parts(self, objective: Objective, tokens: Tokens, moment: Moment, seed: int) -> list[Part]:
        return super().parts(self.first if moment.done < self.until else objective, tokens, moment, seed)


@dataclass(frozen=True)
class NextTokenFirst(Plan):
    """A share of the rows is read for the next token: all of `start` until `flat`, falling to none at `until`."""

    start: float = 1.0
    flat: float = 0.15
    until: float = 0.15

    def share(self, done: float) -> float:
        """
        >>> [NextTokenFirst(start=0.5, flat=0.0, until=0.8).share(done) for done in (0.0, 0.4, 0.9)]
        [0.5, 0.25, 0.0]
        """
        if done >= self.until:
            return 0.0
        return self.start * min(1.0, (self.until - done) / max(self.until - self.flat, 1e-9))

    def parts(self, objective: Objective, tokens: Tokens, moment: Moment, seed: int) -> list[Part]:
        ((_, whole),) = super().parts(objective, tokens, moment, seed)
        causal = round(self.share(moment.done) * FEW_SHAPES) * moment.batch // FEW_SHAPES
        parts: list[Part] = [(NextToken(), whole.rows(0, causal))] if causal else []
        if causal < moment.batch:  # made anew, so that the times are spread evenly over those that are left
            parts.append((objective, make_batch(whole.x_BL[causal:], seed=seed, step=moment.step)))
        return parts
