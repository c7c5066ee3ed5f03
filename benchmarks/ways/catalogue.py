"""The ways, by name: each is the baseline with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
import torch

from unmask.config import OptimConfig
from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.errors import UsageError, did_you_mean
from unmask.objectives import Objective
from ways import networks
from ways.data import Tokens
from ways.objectives import Bell, Complement, Counts, NextToken, Power, Weighted
from ways.optimizers import MakeUpdater, embedding_rate, flat_ema_updater, normuon_updater, plain_updater
from ways.schedules import Kept, NextTokenFirst, Pairs, Plan, Stage, Turning


@dataclass(frozen=True)
class Setting:
    """What all ways share: the network's size, the shape of a batch, the work, and what is measured."""

    name: str
    denoiser: DiT
    length: int
    batch: int
    steps: int
    valid_rows: int
    valid_draws: int
    looks: tuple[float, ...] = (1 / 3, 0.7, 0.8, 0.9, 1.0)  # shares of the run after which it is measured
    optim: OptimConfig = OptimConfig(lr=5e-3, muon=True, schedule="wsd", decay_fraction=0.3, ema=0.995)


SETTINGS = {
    "small": Setting("small", DiT(hidden=384, blocks=6, heads=6, tied=True), 256, 128, 600, 256, 8),
    # bytes instead of subwords, small enough for a CPU
    "characters": Setting("characters", DiT(hidden=96, blocks=3, heads=3, tied=True), 128, 32, 500, 128, 8),
    "tiny": Setting("tiny", DiT(hidden=64, blocks=2, heads=2, tied=True), 64, 16, 20, 16, 8),
}


@dataclass(frozen=True)
class Way:
    """One change; `about` says which."""

    name: str
    about: str
    objective: Objective = Counts()
    network: type[DiTNetwork] = DiTNetwork
    denoiser: Callable[[DiT], DiT] = lambda config: config
    optim: Mapping[str, Any] = field(default_factory=dict)
    start: Callable[[DiTNetwork, Tokens], None] = lambda network, tokens: None
    updater: MakeUpdater = plain_updater
    plan: Plan = Plan()
    work: float = 1.0  # tokens, as a multiple of the baseline's
    split: float = 0.0  # share of the tokens that are read as the two that they were merged from

    def build(self, setting: Setting, tokens: Tokens) -> DiTNetwork:
        network = self.network(self.denoiser(setting.denoiser), num_ids=tokens.num_ids, mask_id=tokens.mask_id)
        self.start(network, tokens)
        return network

    def rates(self, setting: Setting) -> OptimConfig:
        return replace(setting.optim, **self.optim)


def _unigram(network: DiTNetwork, tokens: Tokens) -> None:
    """The head's bias is the logarithm of each token's share of the text; each counts once more than it is there."""
    count_I = np.bincount(tokens.train, minlength=tokens.num_ids) + 1
    network.output.bias.data.copy_(torch.from_numpy(np.log(count_I / count_I.sum())))


def _untied(config: DiT) -> DiT:
    return replace(config, tied=False)


def _wide_heads(config: DiT) -> DiT:
    return replace(config, heads=max(1, config.dims[2] // 2))


def _value_residual(config: DiT) -> DiT:
    return replace(config, value_residual=True)


def _dropout(share: float) -> Callable[[DiT], DiT]:
    return lambda config: replace(config, dropout=share)


BASELINE = Way("baseline", "Muon 5e-3, tied, qk_norm, zero_init, count form, WSD 0.3, EMA 0.995")

# What a difference in nats is worth in tokens is read off these.
LONGER = (
    Way("work-0.75", "the baseline with 3/4 of the tokens", work=0.75),
    Way("work-1.5", "the baseline with 3/2 of the tokens", work=1.5),
    Way("work-2", "the baseline with twice the tokens", work=2.0),
)

TIMES = (
    Way("bell-0.25", "counts from a bell of width 0.25, unbiased", Bell(width=0.25)),
    Way("bell-0.4", "counts from a bell of width 0.4, unbiased", Bell(width=0.4)),
    Way("low", "few masks more often, p(n) ~ n^-1/2, unbiased", Power(power=-0.5)),
    Way("plain", "every masked token counts alike", Weighted(power=0.0)),
    Way("half", "weight (L/n)^1/2", Weighted(power=0.5)),
    Way("power-0.75", "weight (L/n)^3/4", Weighted(power=0.75)),
    Way("half-then-bound", "weight (L/n)^1/2 until the rate falls, then the bound", plan=Turning()),
    Way("clip-0.05", "no counts below 5% of a row", Weighted(least=0.05)),
    Way("clip-0.15", "no counts below 15% of a row", Weighted(least=0.15)),
    Way("complement", "a mask and its complement, half as many texts, unbiased", Complement(), plan=Pairs()),
    Way("puma-4", "a text stays for 4 steps, each opening more of it", plan=Kept(keep=4)),
)

ORDER = (
    Way("warm-15", "next token for 15% of the run, then masks", network=networks.Unshifted, plan=NextTokenFirst()),
    Way(
        "warm-30",
        "next token for 30% of the run, then masks",
        network=networks.Unshifted,
        plan=NextTokenFirst(flat=0.3, until=0.3),
    ),
    Way(
        "mixed",
        "half of the rows for the next token, falling to none at 70%",
        network=networks.Unshifted,
        plan=NextTokenFirst(start=0.5, flat=0.0, until=0.7),
    ),
    Way(
        "mixed-more",
        "three quarters of the rows for the next token, falling to none at 70%",
        network=networks.Unshifted,
        plan=NextTokenFirst(start=0.75, flat=0.0, until=0.7),
    ),
    Way(
        "mixed-longer",
        "half of the rows for the next token, falling to none at 95%",
        network=networks.Unshifted,
        plan=NextTokenFirst(start=0.5, flat=0.0, until=0.95),
    ),
)

NETWORK = (
    Way("relu2", "squared ReLU", network=networks.SquaredRelu),
    Way("swiglu", "SwiGLU of as many parameters", network=networks.SwiGLU),
    Way("rmsnorm", "RMSNorm", network=networks.RmsNormed),
    Way("value-residual", "values of block 1 mixed into later ones", denoiser=_value_residual),
    Way("value-embedding", "a second embedding in the values of 4 blocks", network=networks.ValueEmbedding),
    Way("softcap-15", "logits within 15", network=networks.SoftCap),
    Way("softcap-30", "logits within 30", network=networks.SoftCap30),
    Way("skips", "U-net skips between the halves", network=networks.Skips),
    Way("embedding-mix", "the embedding into each block", network=networks.EmbeddingMix),
    Way("embedding-norm", "the embedding enters with size 1", network=networks.NormedEmbedding),
    Way("attention-gain", "a learned gain for queries and keys", network=networks.AttentionGain),
    Way("half-rotary", "half of each head without position", network=networks.HalfRotary),
    Way("wide-heads", "half as many heads, twice as wide", denoiser=_wide_heads),
    Way("untied", "a head of its own", denoiser=_untied),
    Way("unigram-start", "the head starts as the tokens' shares", start=_unigram),
)

SMALL_FIRST = (Stage(0.15, 0.25), Stage(0.4, 0.5), Stage(1.0, 1.0))
SHORT_FIRST = (Stage(0.3, 1.0, 0.25), Stage(0.6, 1.0, 0.5), Stage(1.0, 1.0))
HALF_BATCH = Plan((Stage(1.0, 0.5),))

OPTIMISATION = (
    Way("lr-0.6", "lr 3e-3", optim={"lr": 3e-3}),
    Way("lr-1.6", "lr 8e-3", optim={"lr": 8e-3}),
    Way("embedding-lr-3", "the embedding's rate x 3", updater=embedding_rate(3.0)),
    Way("embedding-lr-0.3", "the embedding's rate x 0.3", updater=embedding_rate(0.3)),
    Way("decay-0.03", "weight decay 0.03", optim={"weight_decay": 0.03}),
    Way("decay-0.1", "weight decay 0.1", optim={"weight_decay": 0.1}),
    *(
        Way(f"decay-{x:g}", f"weight decay {x:g}", optim={"weight_decay": x})
        for x in (0.3, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 16.0)
    ),
    Way("wsd-0.6", "the rate falls over 60% of the run", optim={"decay_fraction": 0.6}),
    Way("wsd-1", "the rate falls from the start", optim={"decay_fraction": 1.0}),
    Way("warmup-1", "warm-up of 1%", optim={"warmup": 0.01}),
    # The ramp of the average holds it below 0.985 for the first 600 steps: larger decays change nothing there.
    Way("ema-0.96", "EMA 0.96", optim={"ema": 0.96}),
    Way("ema-flat-0.99", "EMA 0.99 from the first step on", optim={"ema": 0.99}, updater=flat_ema_updater),
    Way("momentum-0.9", "Muon's momentum 0.9", optim={"momentum": 0.9}),
    Way("batch-half", "half the batch, twice the steps", plan=HALF_BATCH),
    Way("batch-half-lr-0.7", "half the batch, twice the steps, lr 3.5e-3", plan=HALF_BATCH, optim={"lr": 3.5e-3}),
    Way("batch-ramp", "a quarter of the batch, then half, then all", plan=Plan(SMALL_FIRST)),
    Way("length-ramp", "a quarter of the length, then half, then all", plan=Plan(SHORT_FIRST)),
    Way("dropout-0.1", "dropout 0.1", denoiser=_dropout(0.1)),
    Way("dropout-0.2", "dropout 0.2", denoiser=_dropout(0.2)),
    Way("normuon", "Muon with rows of one size", updater=normuon_updater),
    Way("shifted", "another cut of the text in each epoch", plan=Plan(shifted=True)),
)

# Of a BPE alone.
SPLIT = (
    Way("split-0.1", "a tenth of the tokens in the two parts of each", split=0.1),
    Way("split-0.2", "a fifth of the tokens in the two parts of each", split=0.2),
)

# What the recipe `fast` has of all this, without its `until_epoch`; others are added to it where a text is read often.
FAST = Way(
    "fast",
    "half + mixed + value-residual, another cut of the text in each epoch",
    Weighted(power=0.5),
    network=networks.Unshifted,
    denoiser=_value_residual,
    plan=NextTokenFirst(start=0.5, flat=0.0, until=0.7, shifted=True),
)


def _fast_until(until: float) -> Way:
    plan = NextTokenFirst(start=0.5, flat=0.0, until=until, shifted=True)
    return replace(FAST, name=f"fast-{until:g}", about=f"{FAST.about}; next-token rows until {until:.0%}", plan=plan)


REPEATED = (
    *(_fast_until(until) for until in (0.03, 0.1, 0.2, 0.3, 0.35)),
    Way(
        "ar",
        "autoregression: all rows for the next token, which is what is measured",
        NextToken(),
        network=networks.Unshifted,
        denoiser=_value_residual,
        plan=NextTokenFirst(start=1.0, flat=1.0, until=2.0, shifted=True),
    ),
)

WAYS = {way.name: way for way in (BASELINE, FAST, *REPEATED, *LONGER, *TIMES, *ORDER, *NETWORK, *OPTIMISATION, *SPLIT)}


def way_named(name: str) -> Way:
    """A way of the catalogue, or several of them at once: "plain+relu2".

    >>> way_named("plain+lr-0.6").optim
    {'lr': 0.003}
    """
    names = name.split("+")
    for one in names:
        if one not in WAYS:
            raise UsageError(f"unknown way {one!r}; {did_you_mean(one, WAYS)}")
    ways = [way for way in WAYS.values() if way.name in names]
    return ways[0] if len(names) == 1 else _together(name, ways)


def _together(name: str, ways: list[Way]) -> Way:
    made = Way(name, " + ".join(way.about for way in ways))
    for part in ("objective", "updater", "plan", "work", "start", "split"):
        given = [getattr(way, part) for way in ways if getattr(way, part) != getattr(BASELINE, part)]
        if len(given) > 1:
            raise UsageError(f"{name}: two of these change the same thing ({part}): leave out one")
        made = replace(made, **{part: given[0]}) if given else made

    def denoiser(config: DiT) -> DiT:
        return reduce(lambda changed, way: way.denoiser(changed), ways, config)

    optim = reduce(lambda all, way: {**all, **way.optim}, ways, dict[str, Any]())
    return replace(made, denoiser=denoiser, optim=optim, network=networks.together([way.network for way in ways]))
