"""The plan of a comparison, made and checked before anything is written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unmask.comparison.stored import StoredPlan, read_plan, write_plan
from unmask.comparison.trial import RUNS, read_trial
from unmask.config import RunConfig, load_config, option_paths
from unmask.data.packing import Rows, rows_of
from unmask.data.reading_bar import reading_bar
from unmask.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_json
from unmask.errors import DataError, UsageError, did_you_mean
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import check_pair
from unmask.storage.atomic import atomic_text
from unmask.storage.model_folder import NoStart
from unmask.storage.untrusted import read_text
from unmask.training.checkpoint.resume import MAY_CHANGE

TOKENIZER = "tokenizer.json"
LOOKS = 10  # validations per run, among which its best weights are chosen
SET_HERE = {"out": "--out", "steps": "--tokens", "seed": "--seeds"}  # recipe keys that the comparison sets itself
# What all systems of a comparison have in common; the rest of a recipe is the system.
COMMON = ("batch", "tokenizer", "data.share", "data.held_out", "data.packing", "data.length")
CORPORA = ("data.train", "data.valid")
SIZE = ("hidden", "blocks", "heads")
ESTIMATORS = ("count", "time", "pseudo")  # in addition to T=<steps>
# How and where a run is written, and what `shared` already records by content.
NO_PART = (MAY_CHANGE - {"valid_every"}) | {"seed", "steps", "tokenizer", "sample_every"}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How every trial is measured: the same held-out rows, the same keys, the same number of draws.

    also: further estimators to measure the same weights with, if the objective supports them ("T=100").
    """

    valid_rows: int | None = None
    draws: int = 8
    seed: int = 0
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("valid_rows", "draws"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """Identifies a trial: system and seed, and digests of everything that determines its result and of what all trials
    share."""

    name: str
    system: str
    seed: int
    fingerprint: str
    shared: str
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Planned(TrialSpec):
    """A trial to run."""

    options: dict[str, Any]  # the recipe's options that determine the result


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A comparison: what its trials share, and the trials."""

    out: Path
    protocol: Protocol
    shared: dict[str, Any]
    trials: list[Planned]
    tokenizer: Tokenizer
    systems: list[str]

    def begin(self) -> None:
        """Refuse a folder that holds a different comparison; then record this one."""
        stored = read_plan(self.out)
        if stored is not None:
            stored.check_shared(self.shared, self.trials[0].config, self.protocol)
        for trial in self.trials:
            if stored is not None:
                stored.check_options(trial.name, trial.options, trial.config)
            done = read_trial(self.out, trial.name)
            if done is not None and done.fingerprint != trial.fingerprint:
                raise UsageError(f"{self.out} holds another {trial.name}: give another --out, or remove its file there")
        known = {} if stored is None else stored.trials
        new = {trial.name: trial.options for trial in self.trials if trial.name not in known}
        self.out.mkdir(parents=True, exist_ok=True)
        if not (self.out / TOKENIZER).exists():
            atomic_text(self.out / TOKENIZER, self.tokenizer.to_json())
        write_plan(self.out, self.shared if stored is None else stored.shared, known | new)


def make_plan(
    recipes: Sequence[str | Path],
    *,
    tokens: int,
    out: Path,
    seeds: int | Sequence[int] = 1,
    overrides: Mapping[str, Any] | None = None,
    protocol: Protocol,
) -> Plan:
    """Read the recipes, pack the data and build each network once; raises UsageError if anything does not fit.

    >>> make_plan(["demo"], tokens=10_000, out=Path("out"), protocol=Protocol()).trials  # doctest: +SKIP
    """
    overrides = dict(overrides or {})
    numbers = _seeds(seeds)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: give --out the name of a folder")
    for key, flag in SET_HERE.items():
        if key in overrides:
            raise UsageError(f"a comparison decides {key} for all recipes: leave out --{key}, and give {flag}")
    configs = _configs(recipes, overrides)
    check_common(configs)
    first = next(iter(configs.values()))
    corpora = {
        "train": _fingerprint(first.data.train),
        "valid": None if first.data.valid is None else _fingerprint(first.data.valid),
    }
    stored = read_plan(out)
    tokenizer = _tokenizer(first, stored, corpora)
    rows = _rows(configs, tokenizer)
    steps = _steps(tokens, first.batch, rows)
    shared = {  # in the order in which differences are reported
        "tokens": tokens,
        "common": {key: option_paths(first)[key] for key in COMMON if key != "tokenizer"},
        "size": _common_size(configs),
        "protocol": asdict(protocol) | {"also": list(protocol.also)},
        "tokenizer": {"spec": _spec(first.tokenizer), "sha256": tokenizer.fingerprint()},
        "corpora": corpora,
        "corpus": {"train": rows[0].report.sentence(), "valid": rows[1].report.sentence()},
        "epoch_tokens": rows[0].report.tokens,
        "steps": steps,
    }
    for system, config in configs.items():
        _check_builds(system, config, tokenizer)
    _check_also(protocol.also, configs)
    if "valid_every" not in overrides:
        every = max(1, steps // LOOKS)
        configs = {system: replace(config, valid_every=every) for system, config in configs.items()}
    # seed by seed: if cut short, every system has results
    trials = [
        _planned(out, system, config, seed, shared, protocol, stored)
        for seed in numbers
        for system, config in configs.items()
    ]
    return Plan(out=out, protocol=protocol, shared=shared, trials=trials, tokenizer=tokenizer, systems=list(configs))


def _planned(
    out: Path,
    system: str,
    config: RunConfig,
    seed: int,
    shared: dict[str, Any],
    protocol: Protocol,
    stored: StoredPlan | None,
) -> Planned:
    name = f"{system}-s{seed}"
    config = replace(
        config,
        out=str(out / RUNS / name),
        seed=seed,
        steps=shared["steps"],
        valid_rows=min(config.valid_rows, protocol.valid_rows or config.valid_rows),
        sample_every=0,
        save_every=config.valid_every,
        keep=1,
    )
    if _is_trained(config.tokenizer):
        config = replace(config, tokenizer=str((out / TOKENIZER).resolve()))
    options = {key: value for key, value in option_paths(config).items() if key not in NO_PART}
    written = shared if stored is None else stored.shared  # `begin` refuses what differs
    written_options = options if stored is None else stored.trials.get(name, options)
    return Planned(
        name=name,
        system=system,
        seed=seed,
        fingerprint=_digest([written, written_options, system, seed]),
        shared=_digest(written),
        config=config,
        options=options,
    )


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:40]


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    numbers = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise UsageError(f"a comparison has at least 1 seed, each 0 or more and there once; got {seeds}")
    return numbers


def _configs(recipes: Sequence[str | Path], overrides: Mapping[str, Any]) -> dict[str, RunConfig]:
    """The systems by name: the recipe's file name without its ending, or the name of a built-in recipe."""
    if not recipes:
        raise UsageError("name at least one recipe to compare")
    configs: dict[str, RunConfig] = {}
    for recipe in recipes:
        name = Path(recipe).name.removesuffix(".toml").removesuffix(".json")
        if name in configs:
            raise UsageError(f"two recipes are called {name}: the table could not tell them apart, so rename one")
        try:
            config = load_config(recipe, overrides)
            configs[name] = replace(config, data=config.data.absolute())
        except UsageError as e:
            raise UsageError(f"{recipe}: {e}") from None
    return configs


def check_common(configs: Mapping[str, RunConfig]) -> None:
    """Refuse recipes that differ in what a comparison must have in common: data, tokenizer, length, batch, size.

    >>> check_common({"a": RunConfig(batch=8), "b": RunConfig(batch=16)})
    Traceback (most recent call last):
    unmask.errors.UsageError: a has batch = 8 and b has 16: give --batch for all
    """
    names = list(configs)
    first = configs[names[0]]
    for name in names[1:]:
        other = configs[name]
        pairs = [(key, option_paths(first)[key], option_paths(other)[key]) for key in COMMON]
        pairs += [(key, *(getattr(c.data, key.rpartition(".")[2]) for c in (first, other))) for key in CORPORA]
        sizes = [_size(config) for config in (first, other)]
        pairs += [
            (f"denoiser.{key}", sizes[0][key], sizes[1][key]) for key in SIZE if key in sizes[0] and key in sizes[1]
        ]
        for key, mine, theirs in pairs:
            if mine != theirs:
                raise UsageError(f"{names[0]} has {key} = {mine} and {name} has {theirs}: give --{key} for all")


def _common_size(configs: Mapping[str, RunConfig]) -> dict[str, int]:
    """The size of all networks; empty if they are of kinds whose sizes are not comparable."""
    sizes = [_size(config) for config in configs.values()]
    return sizes[0] if all(size == sizes[0] for size in sizes) else {}


def _size(config: RunConfig) -> dict[str, int]:
    """The size of a network that declares it: width, blocks and heads."""
    dims = getattr(config.denoiser, "dims", ())
    return dict(zip(SIZE, dims, strict=False))


def _fingerprint(corpus: Any) -> str:
    try:
        return str(corpus.fingerprint())
    except DataError as e:
        raise UsageError(str(e)) from None


def _tokenizer(config: RunConfig, stored: StoredPlan | None, corpora: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of all systems; one that was already trained on this corpus for this comparison is reused."""
    if stored is not None and _is_trained(config.tokenizer) and (stored.out / TOKENIZER).exists():
        known: list[Any] = [stored.shared.get(key) for key in ("corpora", "tokenizer")]
        if known[0] == corpora and known[1].get("spec") == config.tokenizer:
            return tokenizer_from_json(read_text(stored.out / TOKENIZER))
    try:
        return load_tokenizer(config.tokenizer, config.data.train)
    except DataError as e:
        raise UsageError(str(e)) from None


def _is_trained(tokenizer: str) -> bool:
    """Whether it is trained on the corpus, which is then done once for all systems."""
    return tokenizer == "bpe" or tokenizer.startswith("bpe:")


def _spec(tokenizer: str) -> str:
    """The tokenizer's name; for a file only the file name, because it may have been moved."""
    return Path(tokenizer).name if Path(tokenizer).exists() else tokenizer


def _rows(configs: Mapping[str, RunConfig], tokenizer: Tokenizer) -> tuple[Rows, Rows]:
    """The rows of the first system; those of all systems are packed, so that errors in the data are reported now."""
    packed = []
    try:
        with reading_bar() as bar:
            for config in configs.values():
                how: dict[str, Any] = {"anchor": config.anchor, "progress": bar}
                packed.append(tuple(rows_of(config.data, tokenizer, part, **how) for part in ("train", "valid")))
    except DataError as e:
        raise UsageError(str(e)) from None
    return packed[0][0], packed[0][1]


def _steps(tokens: int, batch: int, rows: tuple[Rows, Rows]) -> int:
    per_step = batch * rows[0].report.tokens / rows[0].report.rows
    steps = int(tokens / per_step + 1e-9)
    if steps < 1:
        raise UsageError(
            f"--tokens {tokens:,} is less than one batch, which has {per_step:,.0f} tokens: "
            "give more, or a smaller --batch"
        )
    return steps


def _check_builds(system: str, config: RunConfig, tokenizer: Tokenizer) -> None:
    """Build the network, and everything that a run later needs from the objective, including its sampler."""
    try:
        with NoStart():
            denoiser = config.denoiser.for_tokenizer(tokenizer)
            network = denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
            denoiser.describe(network)
            config.objective.attach(network)
        config.objective.check(network)
        config.objective.check_whole(network)
        canvas = Canvas.blank(num=1, length=config.data.length, mask_id=tokenizer.mask_id)
        check_pair(config.objective.predictor(network), config.objective.sampler(), canvas)
    except UsageError as e:
        raise UsageError(f"{system}: {e}") from None


def _check_also(also: Sequence[str], configs: Mapping[str, RunConfig]) -> None:
    """Refuse a name that is not an estimator. An estimator is applied only to the systems that support it."""
    for name in also:
        known = name in ESTIMATORS or re.fullmatch(r"T=[1-9]\d{0,8}", name)
        if not known and not any(_has_estimator(config, name) for config in configs.values()):
            raise UsageError(f"--also {name}: no such estimator; {did_you_mean(name, [*ESTIMATORS, 'T=1000'])}")


def _has_estimator(config: RunConfig, name: str) -> bool:
    try:
        config.objective.with_estimator(name)
    except UsageError:
        return False
    return True


def check_reference(reference: str | None, systems: Sequence[str]) -> str:
    """The system that gaps are measured against: by default the first.

    >>> check_reference(None, ["ar", "mdlm"])
    'ar'
    """
    if reference is None:
        return systems[0]
    if reference not in systems:
        raise UsageError(f"--reference {reference} is none of the systems; {did_you_mean(reference, systems)}")
    return reference
